// Views, in-place ops and autograd: every pair is right, or refused by name.
#include "autograd/autograd.h"
#include "autograd/capture/capture.h"
#include "autograd/recompute.h"
#include "runtime/apply.h"
#include "runtime/ops/batch_norm.h"
#include "runtime/ops/listing.h"
#include "runtime/ops/optimizer_steps.h"
#include "runtime/ops/order_free_norm.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::test;

namespace {

Tensor leaf(const Shape& shape, unsigned seed = 1) {
  return numbers(shape, f64, seed, 0.3, 0.9).requires_grad_();
}

struct View {
  const char* name;
  std::function<Tensor(const Tensor&)> take;
};

const View views[] = {
    {"reshape", [](const Tensor& x) { return reshape(x, {6}); }},
    {"transpose", [](const Tensor& x) { return transpose(x, 0, 1); }},
    {"select", [](const Tensor& x) { return select(x, 0, 1); }},
    {"slice", [](const Tensor& x) { return slice(x, 1, 0, 3, 2); }},
    {"narrow of a view", [](const Tensor& x) { return narrow(reshape(x, {6}), 0, 1, 3); }},
    {"expand", [](const Tensor& x) { return expand(unsqueeze(x, 0), {2, 2, 3}); }},
};

bool refused(const std::function<void()>& body, const std::string& op) {
  const std::string text = message_of<StateError>(body);
  INFO(text);
  CHECK(one_line_about(text, op));
  return text != "(nothing was thrown)";
}

}  // namespace

TEST_CASE("in place: a leaf that requires grad is refused, under NoGrad it is written") {
  const Tensor x = leaf({2, 3}), before = clone(x.detach());
  CHECK(refused([&] { add_(x, 1.0); }, "add_"));
  CHECK(refused([&] { fill_(x, 1); }, "fill_"));
  CHECK(refused([&] { copy_(x, zeros({2, 3}, {f64})); }, "copy_"));
  CHECK(same_bits(x.detach(), before));  // refused before anything was written
  const NoGrad guard;
  add_(x, 1.0);
  CHECK(same_bits(x.detach(), add(before, 1.0)));
}

TEST_CASE("in place: on a computed tensor gradients are those of the other form, or it is refused") {
  const auto two = [](const Tensor& w) { return mul(w, 1.5); };
  for (const ElementwiseListing& entry : elementwise_listing()) {
    if (!entry.in_place) continue;
    INFO(entry.op->name());
    const Tensor x = leaf({4}), w = leaf({4}, 2);
    const auto inputs = [&](const Tensor& first) {
      std::vector<Tensor> in{first};
      if (entry.arity == 2) in.push_back(w);
      return in;
    };
    const Tensor leaves[] = {x, w};
    const std::vector<Tensor> expected = grad(sum(sherd::apply(*entry.op, inputs(two(x)))[0]), leaves);
    const Tensor h = two(x), kept = clone(h.detach());
    std::vector<Tensor> got;
    const std::string text = message_of<StateError>([&] {
      sherd::apply(*entry.in_place, inputs(h));
      got = grad(sum(h), leaves);
    });
    INFO(text);
    if (got.empty()) {
      CHECK(one_line_about(text, std::string(entry.op->name()) + "_"));
      CHECK(same_bits(h.detach(), kept));
      continue;
    }
    for (std::size_t i = 0; i < 2; ++i) CHECK(distance(got[i], expected[i]) < 1e-12);
  }
}

TEST_CASE("in place: copy_ and fill_ cut what they overwrite") {
  const Tensor x = leaf({2, 3}), row = leaf({3}, 2);
  Tensor h = mul(x, 2.0);
  copy_(h, row);
  sum(mul(h, 3.0)).backward();
  CHECK(same_bits(row.grad(), full({3}, 6, {f64})));
  CHECK(same_bits(x.grad(), zeros({2, 3}, {f64})));
  const Tensor y = mul(row, 2.0);
  fill_(y, 4);
  sum(y).backward();
  CHECK(same_bits(row.grad(), full({3}, 6, {f64})));
  const Tensor fresh = zeros({2, 3}, {f64});
  copy_(fresh, row);
  CHECK(fresh.requires_grad());
  CHECK_FALSE(fresh.is_leaf());
}

TEST_CASE("views: gradients pass through each of them") {
  for (const View& view : views) {
    INFO(view.name);
    CHECK(gradient_error([&](std::span<const Tensor> in) { return square(view.take(in[0])); },
                         std::vector{numbers({2, 3}, f64)}) < 1e-7);
  }
}

TEST_CASE("views: one taken before its base was written is refused afterwards, one taken after is right") {
  for (const View& view : views) {
    INFO(view.name);
    const Tensor x = leaf({2, 3}), w = leaf({2, 3}, 2);
    const Tensor base = mul(x, 2.0), before = view.take(base);
    add_(base, w);
    CHECK(refused([&] { exp(before); }, "exp"));
    CHECK(refused([&] { reshape(before, {-1, 1}); }, before.is_contiguous() ? "view" : "clone"));
    const Tensor after = view.take(base);
    const Tensor leaves[] = {x, w};
    const std::vector<Tensor> got = grad(sum(square(after)), leaves);
    const std::vector<Tensor> expected = grad(sum(square(view.take(add(mul(x, 2.0), w)))), leaves);
    for (std::size_t i = 0; i < 2; ++i) CHECK(distance(got[i], expected[i]) < 1e-12);
  }
}

TEST_CASE("views: writing one while gradients are recorded is refused, before anything is written") {
  for (const View& view : views) {
    INFO(view.name);
    const Tensor x = leaf({2, 3});
    const Tensor base = mul(x, 2.0), part = view.take(base), kept = clone(base.detach());
    CHECK(refused([&] { mul_(part, 3.0); }, "mul_"));
    CHECK(refused([&] { fill_(part, 0); }, "fill_"));
    const Tensor plain = zeros({2, 3}, {f64}),
                 plain_part = view.take(plain);  // no history of its own, but the value has one
    CHECK(refused([&] { copy_(plain_part, sum(x)); }, "copy_"));
    CHECK(same_bits(base.detach(), kept));
    CHECK(same_bits(plain, zeros({2, 3}, {f64})));
  }
}

TEST_CASE("views: without history they are written freely, and the base sees it") {
  const Tensor base = zeros({2, 3});
  fill_(select(base, 0, 1), 4);
  add_(transpose(base, 0, 1), 1.0);
  CHECK(base.to_vector<float>() == std::vector<float>{1, 1, 1, 5, 5, 5});
  const Tensor x = leaf({2, 3});
  sum(mul(x, to(base, f64))).backward();
  CHECK(same_bits(x.grad(), to(base, f64)));
}

TEST_CASE("views: a write through one, or through an alias without history, shows in the version check") {
  const Tensor w = leaf({2, 3}, 2);
  for (int way = 0; way < 3; ++way) {
    const Tensor h = zeros({2, 3}, {f64});
    const Tensor y = sum(mul(h, w));
    if (way == 0) fill_(select(h, 0, 0), 1);
    if (way == 1) add_(h.detach(), 1.0);
    if (way == 2) *alias(h, {{1}, {1}, 2}).mutable_data<double>() = 5;
    CHECK(refused([&] { y.backward(); }, "mul"));
  }
}

namespace {

/// A way to write a tensor of shape (4), f32, by an op.
struct Writer {
  const char* op;
  std::function<void(const Tensor& t)> write;
};

Tensor f64_scalar(double value) { return Tensor::scalar(value, {f64}); }

const Writer writers[] = {
    {"mul_", [](const Tensor& t) { mul_(t, 3.0); }},
    {"add_", [](const Tensor& t) { add_(t, ones({4})); }},
    {"fill_", [](const Tensor& t) { fill_(t, 3); }},
    {"copy_", [](const Tensor& t) { copy_(t, ones({4})); }},
    {"sgd_step_",
     [](const Tensor& t) { apply_many(ops::SgdStep{}, Tensors{f64_scalar(0.1), t, ones({4})}); }},
    {"adam_step_",
     [](const Tensor& t) {
       apply_many(ops::AdamStep{},
                  Tensors{f64_scalar(0.1), t, ones({4}), zeros({4}), zeros({4}), f64_scalar(0)});
     }},
    {"running_statistics_",
     [](const Tensor& t) {
       apply_many(ops::RunningStatistics{}, Tensors{t, ones({4}), zeros({4}), ones({4})});
     }},
    {"clip_scale_", [](const Tensor& t) { apply_many(ops::ClipScale{0.1}, Tensors{f64_scalar(9), t}); }},
};

/// A way to another handle on the memory of a tensor of shape (4) that knows nothing of its history.
struct Past {
  const char* name;
  std::function<Tensor(const Tensor& y)> take;
};

Tensor view_without_grad(const Tensor& t) {
  const NoGrad guard;
  return view(t, {4});
}

const Past pasts[] = {
    {"a view under NoGrad", view_without_grad},
    {"a view of a view under NoGrad",
     [](const Tensor& y) { return view_without_grad(view_without_grad(y)); }},
    {"a view, with grad mode, of one under NoGrad",
     [](const Tensor& y) { return view(view_without_grad(y), {4}); }},
};

/// The same by the user's word that the history shall not know.
const Past detached[] = {
    {"detach", [](const Tensor& y) { return y.detach(); }},
    {"detach of a view", [](const Tensor& y) { return view(y, {4}).detach(); }},
    {"a view of detach", [](const Tensor& y) { return view(y.detach(), {4}); }},
    {"alias", [](const Tensor& y) { return alias(y, y.layout()); }},
};

Tensor f32_leaf() { return numbers({4}, f32, 1, 0.3, 0.9).requires_grad_(); }

}  // namespace

TEST_CASE(
    "in place: a write past a computed tensor is refused before it is done, by whatever op and handle") {
  for (const Writer& writer : writers)
    for (const Past& past : pasts) {
      INFO(writer.op << " through " << past.name);
      const Tensor x = f32_leaf(), y = mul(x, 2.0), kept = clone(y.detach()), handle = past.take(y);
      const std::uint32_t version = y.storage().version();
      CHECK(refused([&] { writer.write(handle); }, writer.op));
      CHECK(refused([&] { recompute([&] { return writer.write(handle), exp(y); }); }, writer.op));
      CHECK(refused(
          [&] {
            recompute([&] {
              const Tensor h = mul(x, 2.0);
              writer.write(past.take(h));
              return exp(h);
            });
          },
          writer.op));
      CHECK(refused(
          [&] {
            capture(
                [&](std::span<const Tensor> in) -> std::vector<Tensor> {
                  const Tensor h = mul(in[0], 2.0);
                  writer.write(past.take(h));
                  return {sum(h)};
                },
                {x});
          },
          writer.op));
      CHECK(same_bits(y.detach(), kept));
      CHECK(y.storage().version() == version);
      sum(y).backward();
      CHECK(same_bits(x.grad(), full({4}, 2)));
      const NoGrad guard;  // whoever says so writes
      CHECK_NOTHROW(writer.write(handle));
    }
}

TEST_CASE("in place: what detach gives is written freely, and a gradient that needs the old values says so") {
  for (const Writer& writer : writers)
    for (const Past& past : detached) {
      INFO(writer.op << " through " << past.name);
      const Tensor x = f32_leaf(), y = mul(x, 2.0), s = square(y);
      const std::uint32_t version = y.storage().version();
      CHECK_NOTHROW(writer.write(past.take(y)));
      CHECK(y.storage().version() > version);
      CHECK(refused([&] { sum(s).backward(); }, "square"));
      sum(y).backward();
      CHECK(same_bits(x.grad(), full({4}, 2)));
    }
}

TEST_CASE("in place: memory whose computed tensor is gone, or that is a leaf's, is written freely") {
  for (const Writer& writer : writers)
    for (const Past& past : pasts) {
      INFO(writer.op << " through " << past.name);
      const Tensor x = f32_leaf();
      const Tensor handle = past.take(mul(x, 2.0)), by_hand = clone(handle);
      CHECK_NOTHROW(writer.write(handle));
      writer.write(by_hand);
      CHECK(same_bits(handle, by_hand));
      const Tensor part = view(x, {4});  // has the history of a view; its values are the leaf's
      CHECK_NOTHROW(writer.write(past.take(x)));
      sum(square(x)).backward();
      CHECK(distance(x.grad(), mul(x.detach(), 2.0)) < 1e-6);
    }
}

TEST_CASE("in place: a recorded write to a detached tensor is refused while others share its memory") {
  const Tensor w = leaf({4}, 2);
  const Tensor h = zeros({4}, {f64}), kept = clone(h);
  for (const Past& past : pasts) {
    INFO(past.name);
    CHECK(refused([&] { copy_(past.take(h), w); }, "copy_"));
    CHECK(refused([&] { add_(past.take(h), w); }, "add_"));
  }
  CHECK(same_bits(h, kept));
  const Tensor x = leaf({4});
  const Tensor state = mul(x, 2.0).detach();  // nobody else has it
  add_(state, w);
  sum(mul(state, x.detach())).backward();
  CHECK(same_bits(w.grad(), x.detach()));
}

TEST_CASE("in place: a write through a view of older history is refused before it is done") {
  const Tensor w = leaf({4}, 2);
  struct Write {
    const char* op;
    std::function<void(const Tensor& t)> write;
  };
  const Write writes[] = {{"fill_", [](const Tensor& t) { fill_(t, 5); }},
                          {"mul_", [](const Tensor& t) { mul_(t, 5.0); }},
                          {"copy_", [](const Tensor& t) { copy_(t, ones({4}, {f64})); }},
                          {"add_", [&](const Tensor& t) { add_(t, w); }},
                          {"add_", [&](const Tensor& t) { add_(zeros({4}, {f64}), t); }}};
  for (const Write& write : writes)
    for (const bool has_history : {false, true}) {
      INFO(write.op << ", the base has a history: " << has_history);
      const Tensor x = leaf({4}), base = has_history ? mul(x, 2.0) : zeros({4}, {f64});
      const Tensor before = view(base, {4}), below = narrow(before, 0, 0, 4);
      add_(base, w);
      const Tensor kept = clone(base.detach());
      const std::uint32_t version = base.storage().version();
      CHECK(refused([&] { write.write(before); }, write.op));
      CHECK(refused([&] { write.write(below); }, write.op));
      CHECK(same_bits(base.detach(), kept));
      CHECK(base.storage().version() == version);
    }
}

TEST_CASE("in place: of a tensor with itself") {
  const Tensor x = leaf({3});
  const Tensor h = mul(x, 1.0);
  add_(h, h);
  sum(h).backward();
  CHECK(same_bits(x.grad(), full({3}, 2, {f64})));
  const Tensor v = zeros({4});
  CHECK(refused([&] { add_(narrow(v, 0, 0, 3), narrow(v, 0, 1, 3)); }, "add_"));
  CHECK(refused([&] { add_(expand(zeros({1}), {3}), zeros({3})); }, "add_"));
}

TEST_CASE("in place: hooks on the old value keep the old value's gradient") {
  const Tensor x = leaf({2});
  const Tensor h = mul(x, 3.0);
  Tensor seen;
  const Subscription hook = register_hook(h, [&](const Tensor& g) {
    seen = clone(g);
    return Tensor{};
  });
  mul_(h, 5.0);
  sum(h).backward();
  CHECK(same_bits(seen, full({2}, 5, {f64})));
  CHECK(same_bits(x.grad(), full({2}, 15, {f64})));
}

TEST_CASE("in place: a tensor that held no history takes part in it from the write on") {
  const Tensor w = leaf({3}, 2);
  const Tensor total = zeros({3}, {f64});
  for (int i = 1; i <= 3; ++i) add_(total, mul(w, static_cast<double>(i)));
  sum(total).backward();
  CHECK(same_bits(w.grad(), full({3}, 6, {f64})));
}

TEST_CASE("in place: a gradient reads what was written over, the input's own and another handle's value") {
  const auto handles = [](const Tensor& a) {
    return std::vector{a.detach(),
                       [&] {
                         const NoGrad off;
                         return view(a, a.shape());
                       }(),
                       a};
  };
  for (const bool divide : {false, true})
    for (std::size_t which = 0; which < 3; ++which) {
      const Tensor x = numbers({2, 3}, f64, 1, 0.5, 2).requires_grad_();
      const auto gradients = [&](bool in_place) {
        const Tensor a = mul(x, 1.5), other = handles(a)[which];
        const Tensor y = divide ? (in_place ? div_(a, other) : div(a, other))
                                : (in_place ? mul_(a, other) : mul(a, other));
        const Tensor first = grad(sum(exp(y)), {x}, {}, {.create_graph = true})[0];
        return std::vector{y.detach(), first.detach(), grad(sum(square(first)), {x})[0]};
      };
      const std::vector<Tensor> expected = gradients(false), got = gradients(true);
      for (std::size_t i = 0; i < expected.size(); ++i) CHECK(same_bits(got[i], expected[i]));
    }
}

TEST_CASE(
    "in place: a write through a chain of both trained has the gradients of the other form, captured and "
    "recomputed too") {
  const Tensor x = leaf({3, 4}), w = leaf({3, 4}, 2);
  const Tensor leaves[] = {x, w};
  const auto chain = [&](bool in_place) {
    const Tensor h = mul(x, 2.0);
    if (!in_place) return mul(div(mul(h, w), add(w, 1.0)), w);
    mul_(h, w);
    div_(h, add(w, 1.0));
    return mul_(h, w);
  };
  const std::vector<Tensor> expected = grad(sum(exp(chain(false))), leaves);
  const auto check = [&](const std::vector<Tensor>& got) {
    for (std::size_t i = 0; i < 2; ++i) CHECK(distance(got[i], expected[i]) < 1e-12);
  };
  check(grad(sum(exp(chain(true))), leaves));
  check(grad(sum(exp(recompute([&] { return chain(true); }))), leaves));
  const auto step = [&](std::span<const Tensor>) { return grad(sum(exp(chain(true))), leaves); };
  Program program = capture(step, {});
  for (int i = 0; i < 3; ++i) check(program.replay({}));
}

TEST_CASE("in place: a result that is a view of what nobody else holds is written as one that is none") {
  struct Case {
    const char* name;
    std::function<Tensor(const Tensor&, int)> compute;
  };
  const Case cases[] = {{"softmax", [](const Tensor& x, int axis) { return softmax(x, axis); }},
                        {"cumsum", [](const Tensor& x, int axis) { return cumsum(x, axis); }},
                        {"cumprod", [](const Tensor& x, int axis) { return cumprod(x, axis); }},
                        {"sort", [](const Tensor& x, int axis) { return sort(x, axis).values; }}};
  const Tensor x = leaf({3, 3}), leaves[] = {x};
  for (const Case& c : cases) {
    std::vector<std::string> refusals;
    for (const int axis : {0, 1}) {
      INFO(c.name << " along " << axis);
      const Tensor y = c.compute(mul(x, 2.0), axis), expected = mul(y, 3.0);
      const std::vector<Tensor> expected_gradient =
          grad(sum(exp(expected)), leaves, {}, {.retain_graph = true});
      CHECK_NOTHROW(mul_(y, 3.0));
      CHECK(same_bits(y.detach(), expected.detach()));
      // A gradient that needs the result is told by its version.
      std::vector<Tensor> got;
      refusals.push_back(message_of<StateError>([&] { got = grad(sum(exp(y)), leaves); }));
      if (!got.empty()) CHECK(distance(got[0], expected_gradient[0]) < 1e-12);
    }
    CHECK(refusals[0] == refusals[1]);
  }
}
