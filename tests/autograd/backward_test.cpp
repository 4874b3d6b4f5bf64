// What backward computes, what it keeps, and what it refuses.
#include <atomic>
#include <cmath>
#include <map>
#include <thread>
#include <utility>

#include "autograd/autograd.h"
#include "autograd/recompute.h"
#include "runtime/ops/listing.h"
#include "tests/runtime/harness.h"
#include "tests/sanitizer.h"

using namespace sherd;
using namespace sherd::test;

namespace {

Tensor leaf(const Shape& shape, unsigned seed = 1, DType dtype = f64) {
  return numbers(shape, dtype, seed).requires_grad_();
}

Tensor gradient(const Tensor& y, const Tensor& x, BackwardOptions options = {}) {
  return grad(y, std::span(&x, 1), {}, options)[0];
}

}  // namespace

TEST_CASE("backward: gradients are the hand-made ones") {
  const Tensor w = leaf({3, 4}), x = leaf({4}, 2), b = leaf({3}, 3);
  sum(square(add(matmul(w, x), b))).backward();
  const NoGrad guard;
  const Tensor r = mul(add(matmul(w, x), b), 2.0);
  CHECK(distance(b.grad(), r) < 1e-12);
  CHECK(distance(w.grad(), mul(unsqueeze(r, 1), unsqueeze(x, 0))) < 1e-12);
  CHECK(distance(x.grad(), matmul(r, w)) < 1e-12);
}

TEST_CASE("backward: gradients add up over backwards, uses and outputs") {
  const Tensor x = leaf({3});
  sum(mul(x, 3.0)).backward();
  sum(mul(x, 4.0)).backward();
  CHECK(same_bits(x.grad(), full({3}, 7, {f64})));
  x.set_grad({});
  sum(add(add(x, x), mul(x, x.detach()))).backward();
  CHECK(distance(x.grad(), add(x.detach(), 2.0)) < 1e-15);
  x.set_grad({});
  const Tensor outputs[] = {sum(x), mul(sum(x), 2.0), sum(x)};
  backward(outputs);
  CHECK(same_bits(x.grad(), full({3}, 4, {f64})));
}

TEST_CASE("backward: an upstream gradient weights its output and is left as it was") {
  const Tensor x = leaf({2, 3});
  const Tensor up = numbers({2, 3}, f64, 5), kept = clone(up);
  x.backward(up);
  CHECK(same_bits(x.grad(), up));
  x.backward(up);
  CHECK(same_bits(up, kept));
  CHECK(same_bits(x.grad(), mul(up, 2.0)));
  CHECK(&x.grad().storage() != &up.storage());
  CHECK(one_line_about(message_of<ShapeError>([&] { mul(x, 2.0).backward(); }), "upstream"));
  CHECK(one_line_about(message_of<ShapeError>([&] { mul(x, 2.0).backward(zeros({3}, {f64})); }), "upstream"));
  CHECK(one_line_about(message_of<DTypeError>([&] { mul(x, 2.0).backward(zeros({2, 3})); }), "f32"));
  CHECK(one_line_about(message_of<StateError>([&] { zeros({}).backward(); }), "requires grad"));
  const Tensor outputs[] = {sum(x), sum(x)}, one[] = {Tensor::scalar(1, {f64})};
  CHECK(one_line_about(message_of<ValueError>([&] { backward(outputs, one); }), "2 outputs"));
}

TEST_CASE("backward: leaves never share the memory of their gradients") {
  const Tensor a = leaf({4}), b = leaf({4}, 2), c = leaf({4}, 3);
  const Tensor up = ones({4}, {f64});
  add(add(a, b), reshape(c, {4})).backward(up);
  const Tensor* all[] = {&a, &b, &c};
  for (const Tensor* x : all)
    for (const Tensor* y : all)
      if (x != y) CHECK(&x->grad().storage() != &y->grad().storage());
  {
    const NoGrad guard;
    fill_(a.grad(), 9);
  }
  CHECK(same_bits(b.grad(), up));
  CHECK(same_bits(c.grad(), up));
  const Tensor parts[] = {leaf({2}), leaf({3}, 2)};
  cat(parts).backward(numbers({5}, f64, 4));
  CHECK(&parts[0].grad().storage() != &parts[1].grad().storage());
  const Tensor e = leaf({1});
  expand(e, {5}).backward(ones({5}, {f64}));
  CHECK(e.grad().item() == 5);
  const Tensor s = leaf({3});
  sum(s).backward();
  CHECK(s.grad().is_contiguous());
}

TEST_CASE("backward: the gradient of a leaf in 16 bits is rounded once, however often the leaf is used") {
  for (const DType dtype : {bf16, f16})
    for (const int uses : {1, 2, 3, 4, 100, 3000})
      for (const double value : {1.0, 0.3}) {
        INFO(name_of(dtype) << " " << uses << " times");
        const Tensor x = zeros({3}, {dtype}).requires_grad_();
        const Tensor weight = mul(numbers({3}, dtype, 1, 0.5, 1.5), value);
        const auto y = [&](const Tensor& of) {
          std::vector<Tensor> each;
          for (int i = 0; i < uses; ++i) each.push_back(to(mul(of, weight), f32));
          Tensor all = each[0];
          for (int i = 1; i < uses; ++i) all = add(all, each[static_cast<std::size_t>(i)]);
          return sum(all);
        };
        const Tensor expected = to(mul(to(weight, f64), uses), dtype);
        y(x).backward();
        CHECK(same_bits(x.grad(), expected));
        CHECK(same_bits(gradient(y(x), x), expected));
        CHECK(same_bits(gradient(y(x), x, {.create_graph = true}).detach(), expected));
        // A sum for a leaf that f32 reads too is f32; here the leaf's own dtype stays.
        const Tensor wide = zeros({3}).requires_grad_();
        const Tensor cast = to(wide, dtype);
        y(cast).backward();
        CHECK(wide.grad().dtype() == f32);
      }
}

TEST_CASE("backward: memory that a caller lent is neither written nor kept, though its tensors are gone") {
  for (const DType dtype : {f64, f32, f16, bf16})
    for (const Reduction reduction : {Reduction::mean, Reduction::sum}) {
      INFO(name_of(dtype));
      const Tensor values = numbers({3, 5}, dtype, 2), before = clone(values);
      const auto lent = [&] { return from_blob(values.raw(), {3, 5}, dtype); };
      const Tensor targets = Tensor::from<std::int64_t>({1, 4, 0}, {3});
      Tensor wanted;
      for (const bool borrowed : {false, true}) {  // a loss whose gradient may go where its input was
        Tensor x = (borrowed ? lent() : clone(values)).requires_grad_();
        Tensor seen;
        Subscription hook = register_hook(x, [&](const Tensor& g) {
          seen = clone(g);
          return Tensor{};
        });
        const Tensor loss = cross_entropy(x, targets, {reduction});
        x = {};
        loss.backward();
        if (borrowed) CHECK(same_bits(seen, wanted));
        wanted = seen;
        CHECK(same_bits(values, before));
      }
      // Hooks of a leaf and of what is computed, whose gradients are added to others in every order.
      const Tensor a = zeros({3, 5}, {dtype}).requires_grad_(), b = mul(a, 1);
      const Subscription on_leaf = register_hook(a, [&](const Tensor&) { return lent(); });
      const Subscription between = register_hook(b, [&](const Tensor&) { return lent(); });
      for (int pass = 0; pass < 3; ++pass) {
        sum(add(add(mul(b, 2), a), b)).backward({}, true);
        CHECK(same_bits(values, before));
        CHECK(a.grad().raw() != values.raw());
      }
      // One that is the sum to which others come, in an op that adds to it.
      const Tensor c = numbers({3, 5}, dtype, 4).requires_grad_(), d = mul(c, 1);
      const Subscription first = register_hook(d, [&](const Tensor&) { return lent(); });
      sum(add(layer_norm(c, {}, {}), add(rms_norm(c, {}), d))).backward();
      CHECK(same_bits(values, before));
      CHECK(c.grad().raw() != values.raw());
      for (const Tensor& g : grad(sum(mul(d, 3)), std::span(&d, 1))) CHECK(g.raw() != values.raw());
      CHECK(same_bits(values, before));
    }
}

TEST_CASE("backward: a gradient that somebody holds is not written") {
  const Tensor x = leaf({3});
  sum(x).backward();
  const Tensor held = x.grad(), before = clone(held);
  Tensor seen;
  const Subscription hook = register_hook(x, [&](const Tensor& g) {
    seen = g;
    return Tensor{};
  });
  mul(x, 2.0).backward(ones({3}, {f64}));
  CHECK(same_bits(x.grad(), full({3}, 3, {f64})));
  CHECK(same_bits(seen, full({3}, 2, {f64})));  // what the hook kept is not what was added to
  CHECK(same_bits(held, x.grad()));             // .grad is one tensor that grows
  x.set_grad({});
  const Tensor y = mul(x, 3.0);
  Tensor inner;
  const Subscription on_y = register_hook(y, [&](const Tensor& g) {
    inner = g;
    return Tensor{};
  });
  add(add(y, y), y).backward(ones({3}, {f64}));
  CHECK(same_bits(inner, full({3}, 3, {f64})));
  CHECK(same_bits(x.grad(), full({3}, 9, {f64})));
}

TEST_CASE("backward: a graph serves once unless it is retained") {
  const Tensor x = leaf({3});
  const Tensor y = sum(exp(x));
  y.backward({}, true);
  const Tensor first = clone(x.grad());
  y.backward();
  CHECK(distance(x.grad(), mul(first, 2.0)) < 1e-12);
  const std::string text = message_of<StateError>([&] { y.backward(); });
  CHECK(one_line_about(text, "freed"));
  CHECK(one_line_about(text, "retain_graph"));
  CHECK(one_line_about(text, "sum"));
  CHECK(distance(x.grad(), mul(first, 2.0)) < 1e-12);  // a refused one adds nothing
}

TEST_CASE("backward: create_graph gives gradients that have gradients") {
  const Tensor x = leaf({4});
  const Tensor y = sum(mul(square(x), x));
  const Tensor first = gradient(y, x, {.create_graph = true});
  CHECK(distance(first, mul(square(x.detach()), 3.0)) < 1e-12);
  const Tensor second = gradient(sum(first), x, {.create_graph = true});
  CHECK(distance(second, mul(x.detach(), 6.0)) < 1e-12);
  CHECK(distance(gradient(sum(second), x), full({4}, 6, {f64})) < 1e-12);
  CHECK_FALSE(x.grad().defined());
  y.backward({}, false, true);
  CHECK(x.grad().requires_grad());
  sum(x.grad()).backward();  // penalty on a gradient: adds to the same .grad
  CHECK(distance(x.grad().detach(), add(mul(square(x.detach()), 3.0), mul(x.detach(), 6.0))) < 1e-12);
}

TEST_CASE("grad: prunes, feeds nothing, and says where nothing flows") {
  const Tensor x = leaf({3}), w = leaf({3}, 2), unused = leaf({3}, 3);
  const Tensor h = mul(x, w), y = sum(exp(h));
  Heard heard;
  std::vector<Tensor> got;
  {
    const Listening scope(heard);
    const Tensor inputs[] = {h, unused};
    got = grad(y, inputs, {}, {.retain_graph = true});
  }
  CHECK_FALSE(heard.names.contains("mul_grad"));  // behind h nothing was asked for
  CHECK(distance(got[0], exp(h.detach())) < 1e-12);
  CHECK_FALSE(got[1].defined());
  CHECK_FALSE(x.grad().defined());
  const Tensor both[] = {x, x, w, y};
  got = grad(y, both, {}, {.retain_graph = true});
  CHECK(same_bits(got[0], got[1]));
  CHECK(distance(got[2], mul(exp(h.detach()), x.detach())) < 1e-12);
  CHECK(got[3].item() == 1);
  CHECK_FALSE(w.grad().defined());
  const Tensor constant = zeros({3}, {f64});
  CHECK(one_line_about(message_of<StateError>([&] { gradient(y, constant); }), "grad"));
  CHECK_NOTHROW(y.backward());  // the refused call took nothing
  CHECK(w.grad().defined());
}

TEST_CASE("grad: its messages open with its own name, as backward's do with theirs") {
  const Tensor x = leaf({3}), plain = ones({3});
  for (const std::string call : {"backward", "grad"}) {
    const auto refused = [&](const Tensor& y, const Tensor& upstream) {
      return message_of<Error>(
          [&] { call == "grad" ? void(grad(y, std::span(&x, 1), upstream, {})) : y.backward(upstream); });
    };
    const Tensor spent = sum(square(x));
    spent.backward();
    CHECK(one_line_about(refused(plain, {}), call + ": a tensor of shape (3) does not depend"));
    CHECK(
        one_line_about(refused(mul(x, 2), {}), call + ": a tensor of shape (3) needs an upstream gradient"));
    CHECK(one_line_about(refused(mul(x, 2), ones({2})), call + ":"));
    CHECK(one_line_about(refused(spent, {}), call + ": the graph behind"));
    CHECK(one_line_about(refused({}, {}), call + ": output 0"));
  }
  const Tensor computed = mul(x, 2);
  CHECK(one_line_about(message_of<StateError>([&] { set_sink(computed, nullptr); }), "set_sink"));
  CHECK(one_line_about(message_of<StateError>([&] { set_leaf_name(computed, "w"); }), "set_leaf_name"));
}

TEST_CASE("grad: leaves what it did not walk") {
  const Tensor x = leaf({3}), w = leaf({3}, 2);
  const Tensor a = exp(x), b = exp(w);
  const Tensor y = add(sum(a), sum(b));
  CHECK(gradient(y, x).defined());
  CHECK_NOTHROW(sum(b).backward());
  CHECK(w.grad().defined());
}

TEST_CASE("backward: grad mode and detach cut history") {
  const Tensor x = leaf({3});
  {
    const NoGrad guard;
    CHECK_FALSE(mul(x, 2.0).requires_grad());
    {
      const GradMode inner(true);
      CHECK(mul(x, 2.0).requires_grad());
    }
    CHECK_FALSE(mul(x, 2.0).requires_grad());
  }
  CHECK(mul(x, 2.0).requires_grad());
  CHECK_FALSE(x.detach().requires_grad());
  CHECK(&x.detach().storage() == &x.storage());
  sum(mul(x, x.detach())).backward();
  CHECK(distance(x.grad(), x.detach()) < 1e-15);
  CHECK_FALSE(greater(x, 0.0).requires_grad());
  CHECK_FALSE(to(x, i64).requires_grad());
  CHECK_FALSE(argmax(x, 0).requires_grad());
}

TEST_CASE("backward: leaves and only leaves change their mind") {
  Tensor x = leaf({2});
  CHECK(x.is_leaf());
  Tensor y = mul(x, 2.0);
  CHECK_FALSE(y.is_leaf());
  CHECK(one_line_about(message_of<StateError>([&] { y.requires_grad_(false); }), "requires_grad_"));
  CHECK(one_line_about(message_of<DTypeError>([] { zeros({2}, {i64}).requires_grad_(); }), "i64"));
  CHECK(one_line_about(message_of<StateError>([&] { y.set_grad(x); }), "set_grad"));
  sum(y).backward();
  const Tensor before = x.grad();
  x.requires_grad_(false);
  CHECK_FALSE(mul(x, 2.0).requires_grad());
  CHECK(x.grad().is(before));
  x.requires_grad_();
  x.set_grad(numbers({7}, f16));  // a free slot
  CHECK(x.grad().shape() == Shape{7});
}

TEST_CASE(
    "backward: a leaf that is frozen after the forward pass gets no gradient, and its hooks hear nothing") {
  Tensor w = leaf({3}), x = leaf({3}, 2);
  int heard = 0;
  const Subscription hook = register_hook(w, [&](const Tensor&) { return ++heard, Tensor(); });
  const Tensor y = sum(mul(w, x));
  w.requires_grad_(false);
  y.backward({}, true);
  CHECK_FALSE(w.grad().defined());
  CHECK(heard == 0);
  CHECK(distance(x.grad(), w) < 1e-12);
  CHECK(distance(gradient(y, x, {.retain_graph = true}), w) < 1e-12);
  w.requires_grad_();
  y.backward();
  CHECK(distance(w.grad(), x) < 1e-12);
  CHECK(heard == 1);
}

TEST_CASE("backward: a kept value that changed is named") {
  const Tensor x = leaf({3}), w = leaf({3}, 2);
  const auto refuses = [](const Tensor& y, const std::string& op) {
    const std::string text = message_of<StateError>([&] { sum(y).backward(); });
    INFO(text);
    CHECK(one_line_about(text, op));
    CHECK(one_line_about(text, "(3)"));
    CHECK(one_line_about(text, "changed in place"));
  };
  const Tensor a = mul(x, 2.0), product = mul(a, w);
  {
    const NoGrad guard;
    add_(a, 1.0);
  }
  refuses(product, "mul");
  const Tensor y = exp(x);
  {
    const NoGrad guard;
    fill_(narrow(y, 0, 1, 1), 0);  // through a view
  }
  refuses(y, "exp");
  const Tensor b = mul(x, 2.0), second = mul(b, w);
  *b.mutable_data<double>() = 3;  // through a host pointer
  refuses(second, "mul");
  const Tensor c = mul(x, 2.0), sum_only = add(c, w);
  {
    const NoGrad guard;
    fill_(c, 0);
  }
  CHECK_NOTHROW(sum(sum_only).backward());  // add keeps nothing
}

namespace {
thread_local Tensor late;  // goes when its thread ends, after the rank's context
}

TEST_CASE("backward: a chain of very many nodes is walked and freed without recursion") {
  const Tensor x = Tensor::scalar(1, {f64}).requires_grad_();
  const auto chain = [&](int n) {
    Tensor y = x;
    for (int i = 0; i < n; ++i) y = add(y, 0.0);
    return y;
  };
  constexpr int many = address_sanitizer ? 200000 : 1000000;  // it takes long, and its frames are larger
  {
    const Tensor dropped = chain(many);
  }
  const Tensor y = chain(many);
  y.backward();
  CHECK(x.grad().item() == 1);
  std::thread([held = chain(many / 4)]() mutable { held = {}; }).join();
  std::thread([&] { late = chain(many / 4); }).join();  // goes when its thread ends
}

TEST_CASE("backward: a graph of any shape goes without recursion") {
  constexpr int many = address_sanitizer ? 40000 : 100000;
  const Tensor x = ones({1}).requires_grad_();
  struct Shape {
    const char* name;
    std::function<Tensor()> build;
  };
  const Shape shapes[] = {{"both edges to one node",
                           [&] {
                             Tensor y = x;
                             for (int i = 0; i < many; ++i) y = mul(y, y);
                             return y;
                           }},
                          {"each node used by the next two",
                           [&] {
                             Tensor before = x, y = mul(x, 1.0);
                             for (int i = 0; i < many; ++i) y = maximum(std::exchange(before, y), y);
                             return y;
                           }},
                          {"two chains that meet again and again",
                           [&] {
                             Tensor y = x;
                             for (int i = 0; i < many / 3; ++i) y = maximum(neg(y), mul(y, 1.0));
                             return y;
                           }},
                          {"held by hooks of later nodes", [&] {
                             Tensor y = x;
                             for (int i = 0; i < many; ++i) {
                               const Tensor next = ones({1}).requires_grad_();
                               const Tensor z = mul(next, 1.0);
                               register_hook(z, [held = y](const Tensor&) { return Tensor{}; }).keep();
                               y = z;
                             }
                             return y;
                           }}};
  for (const Shape& shape : shapes) {
    INFO(shape.name);
    shape.build();  // dropped at once
    {
      Tensor y = shape.build();
      std::atomic<int> ready = 0;
      std::vector<std::thread> threads;
      for (int i = 0; i < 4; ++i)
        threads.emplace_back([&ready, held = y]() mutable {
          ++ready;
          while (ready < 4) std::this_thread::yield();
          held = {};
        });
      y = {};  // the last handle is one of the threads'
      for (std::thread& t : threads) t.join();
    }
    CHECK_NOTHROW(shape.build().backward());
  }
}

TEST_CASE("backward: a graph begun on one thread is walked on another") {
  const Tensor x = leaf({5});
  Tensor h, y;
  for (int i = 0; i < 100; ++i) h = mul(x, 1.0);  // this tape counts further than the next one
  std::thread([&] { y = sum(mul(exp(h), sin(x))); }).join();
  std::thread([&] { y.backward(); }).join();
  const Tensor there = clone(x.grad());
  x.set_grad({});
  sum(mul(exp(mul(x, 1.0)), sin(x))).backward();
  CHECK(distance(there, x.grad()) < 1e-12);
}

TEST_CASE("backward: threads with graphs of their own do not meet") {
  std::vector<Tensor> results(4);
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < 4; ++i)
    threads.emplace_back([&results, i] {
      Context::current().set_threads(1);
      const Tensor x = leaf({50}, i + 1);
      for (int k = 0; k < 20; ++k) sum(mul(exp(x), x)).backward();
      results[i] = x.grad();
    });
  for (std::thread& t : threads) t.join();
  for (unsigned i = 0; i < 4; ++i) {
    const Tensor x = leaf({50}, i + 1);
    for (int k = 0; k < 20; ++k) sum(mul(exp(x), x)).backward();
    CHECK(same_bits(results[i], x.grad()));
  }
}

TEST_CASE("backward: more inputs than a mask has bits all get their gradients") {
  std::vector<Tensor> parts;
  for (unsigned i = 0; i < 200; ++i) parts.push_back(leaf({2}, i + 1));
  parts[150].requires_grad_(false);
  const Tensor up = numbers({400}, f64, 9);
  cat(parts).backward(up);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    INFO(i);
    if (i == 150)
      CHECK_FALSE(parts[i].grad().defined());
    else
      CHECK(same_bits(parts[i].grad(), narrow(up, 0, 2 * static_cast<std::int64_t>(i), 2)));
  }
}

TEST_CASE("backward: of any number of inputs, those that want a gradient get theirs and only those") {
  for (const std::int64_t count : {1, 2, 3, 62, 63, 64, 65, 66, 127, 128, 129, 200})
    for (const std::int64_t first : {0L, 1L, 61L, 62L, 63L, 64L, 65L, 127L, 128L, count - 1})
      for (const std::int64_t second : {first, std::min(first + 1, count - 1), count - 1}) {
        if (first >= count) continue;
        INFO(count << " inputs, " << first << " and " << second << " want gradients");
        const auto wants = [&](std::int64_t i) { return i == first || i == second; };
        std::vector<Tensor> parts;
        for (std::int64_t i = 0; i < count; ++i)
          parts.push_back(wants(i) ? leaf({2}, static_cast<unsigned>(i + 1)) : zeros({2}, {f64}));
        const Tensor up = numbers({2 * count}, f64, 9);
        for (const bool recomputed : {false, true}) {
          const auto join = [&] { return cat(parts); };
          const Tensor y = recomputed ? recompute(join) : join();
          std::int64_t slices = 0;
          struct Count final : Listener {
            explicit Count(std::int64_t& slices) : slices(slices) {}
            void after(const AnyOp& op, Inputs, Outputs) override { slices += op.name() == "slice"; }
            std::int64_t& slices;
          } counter(slices);
          {
            const Listening listening(counter);
            y.backward(up);
          }
          CHECK(slices == (first == second ? 1 : 2));
          for (std::int64_t i = 0; i < count; ++i) {
            const Tensor grad = parts[static_cast<std::size_t>(i)].grad();
            if (!wants(i))
              CHECK_FALSE(grad.defined());
            else
              CHECK(same_bits(grad, mul(narrow(up, 0, 2 * i, 2), recomputed ? 2.0 : 1.0)));
          }
        }
      }
}

TEST_CASE("grad: keeps no more on its way than a backward") {
  const auto needed = [](bool by_grad) {
    std::size_t bytes = 0;
    std::thread([&] {  // a pool of its own, so what it caches at the end is what was needed at once
      const Tensor x = zeros({1 << 18}, {f64}).requires_grad_();
      Tensor y = x;
      for (int i = 0; i < 60; ++i) y = mul(y, 1.5);
      const Tensor loss = sum(y);
      y = {};
      Tensor result;
      if (by_grad)
        result = gradient(loss, x);
      else
        loss.backward();
      bytes = Context::current().cpu_pool().cached_bytes();
    })
        .join();
    return bytes;
  };
  const std::size_t by_backward = needed(false), by_grad = needed(true);
  if (test::skip_if(by_backward == 0, "the pool caches nothing in sanitizer builds")) return;
  CHECK(by_grad <= by_backward + (1 << 16));
}

TEST_CASE("grad: computes only what leads to what is asked for") {
  const Tensor x = leaf({3}), w = leaf({3}, 2), far = leaf({3}, 3);
  const Tensor y = sum(mul(mul(x, w), exp(far)));
  struct Count final : Listener {
    void after(const AnyOp& op, Inputs, Outputs) override { ++calls[std::string(op.name())]; }
    std::map<std::string, int> calls;
  } count;
  {
    const Listening listening(count);
    CHECK(gradient(y, x).defined());
  }
  CHECK(count.calls["mul_grad"] == 2);  // one input each of two products
  CHECK(count.calls["exp_grad"] == 0);
}

TEST_CASE("grad: create_graph changes no bit of the first gradient, and the second is rounded once") {
  for (const ElementwiseListing& entry : elementwise_listing()) {
    if (!entry.op->differentiable()) continue;
    for (const DType dtype : {f16, bf16, f32, f64}) {
      if (!entry.dtypes.contains(dtype)) continue;
      for (const double factor : {1.0, 3.0, 400.0}) {
        INFO(entry.op->name() << " " << name_of(dtype) << " times " << factor);
        std::vector<Tensor> in;
        for (int i = 0; i < entry.arity; ++i)
          in.push_back(
              to(numbers({2, 9}, f64, static_cast<unsigned>(i) + 1) * factor, dtype).requires_grad_());
        const Tensor up = numbers({2, 9}, dtype, 7);
        const auto first = [&](bool create_graph) {
          return grad(sherd::apply(*entry.op, in)[0], in, up, {.create_graph = create_graph});
        };
        const std::vector<Tensor> plain = first(false), recorded = first(true);
        for (std::size_t i = 0; i < plain.size(); ++i) CHECK(same_bits(recorded[i].detach(), plain[i]));
      }
    }
  }
  // Squares of 800 are beyond f16, and of no interest to who asks for f16.
  for (const DType dtype : {f16, bf16}) {
    const Tensor x = full({1}, 800, {dtype}).requires_grad_();
    const Tensor slope = gradient(sum(gelu(x, GeluForm::tanh)), x, {.create_graph = true});
    CHECK(slope.item() == 1);
    CHECK(gradient(sum(slope), x).item() == 0);
  }
}

TEST_CASE("grad: each result is a tensor of its own, and so is each leaf's gradient under create_graph") {
  const auto pairs_differ = [](std::vector<Tensor> tensors) {
    for (std::size_t i = 0; i < tensors.size(); ++i)
      for (std::size_t j = 0; j < i; ++j) CHECK(&tensors[i].storage() != &tensors[j].storage());
  };
  struct Way {
    const char* name;
    std::function<Tensor(const Tensor&, const Tensor&)> join;
  };
  const Way ways[] = {
      {"add", [](const Tensor& a, const Tensor& b) { return add(a, b); }},
      {"through views",
       [](const Tensor& a, const Tensor& b) { return add(reshape(a, {6}), reshape(b, {6})); }},
      {"transposed", [](const Tensor& a, const Tensor& b) { return transpose(add(a, b), 0, 1); }},
      {"clone", [](const Tensor& a, const Tensor& b) { return add(clone(a), clone(b)); }},
      {"broadcast",
       [](const Tensor& a, const Tensor& b) { return add(a, expand(unsqueeze(b, 0), {1, 2, 3})); }},
      {"joined", [](const Tensor& a, const Tensor& b) { return cat(std::vector{a, b}); }},
      {"product", [](const Tensor& a, const Tensor& b) { return mul(a, b); }},
  };
  for (const Way& way : ways)
    for (const bool create_graph : {false, true}) {
      INFO(way.name << ", create_graph " << create_graph);
      const Tensor a = leaf({2, 3}), b = leaf({2, 3}, 2), y = way.join(a, b);
      const Tensor up = numbers(y.shape(), f64, 7), kept = clone(up);
      const Tensor inputs[] = {a, b, y, a};
      const auto results = grad(y, inputs, up, {.retain_graph = true, .create_graph = create_graph});
      pairs_differ({results[0], results[1], results[2], results[3], up});
      CHECK(same_bits(results[0].detach(), results[3].detach()));
      y.backward(up, true, create_graph);
      pairs_differ({a.grad(), b.grad(), up});
      const Tensor other = clone(b.grad().detach());
      const NoGrad guard;
      fill_(a.grad(), 3);
      CHECK(same_bits(b.grad().detach(), other));
      CHECK(same_bits(up, kept));
      a.set_grad({});  // a recorded gradient has the leaf in its graph, and the leaf the gradient
      b.set_grad({});
    }
}

TEST_CASE("backward: a leaf keeps no more memory than its gradient fills") {
  std::vector<Tensor> parts;
  for (unsigned i = 0; i < 8; ++i) parts.push_back(leaf({4}, i + 1));
  sum(mul(cat(parts), numbers({32}, f64, 9))).backward();
  for (const Tensor& part : parts) CHECK(part.grad().storage().bytes() == 4 * sizeof(double));
}

TEST_CASE("gradcheck: finds a wrong gradient and takes only f64") {
  const Tensor x = numbers({4}, f64);
  CHECK(gradcheck([](std::span<const Tensor> in) { return exp(in[0]); }, std::span(&x, 1)) < 1e-7);
  CHECK(gradcheck([](std::span<const Tensor> in) { return mul(in[0], in[0].detach()); }, std::span(&x, 1)) >
        1e-3);
  const Tensor narrow_x = numbers({4}, f32);
  CHECK_THROWS_AS(gradcheck([](std::span<const Tensor> in) { return in[0]; }, std::span(&narrow_x, 1)),
                  DTypeError);
  const auto to_f32 = [](std::span<const Tensor> in) { return to(in[0], f32); };
  CHECK(one_line_about(message_of<DTypeError>([&] { gradcheck(to_f32, std::span(&x, 1)); }), "gradcheck"));
  const Tensor shape_only = empty({4}, {f64, Device::meta()});
  CHECK(one_line_about(message_of<DeviceError>([&] {
                         gradcheck([](std::span<const Tensor> in) { return exp(in[0]); },
                                   std::span(&shape_only, 1));
                       }),
                       "meta"));
  const Tensor transposed = transpose(numbers({2, 3}, f64), 0, 1), kept = clone(transposed);
  CHECK(gradcheck([](std::span<const Tensor> in) { return square(in[0]); }, std::span(&transposed, 1)) <
        1e-7);
  CHECK(same_bits(transposed, kept));
}

TEST_CASE("cross_entropy's gradient takes the memory of logits that nobody else reads, and of no others") {
  manual_seed(9);
  const Tensor w = randn({7, 4}).requires_grad_(), x = randn({6, 4}),
               targets = Tensor::from<std::int64_t>({0, 3, -100, 6, 2, 2}, {6});
  enum class Held { not_at_all, by_user, by_view, by_a_second_backward, as_leaf };
  std::vector<Tensor> gradients;
  for (const Held held :
       {Held::not_at_all, Held::by_user, Held::by_view, Held::by_a_second_backward, Held::as_leaf}) {
    INFO("held " << static_cast<int>(held));
    Tensor logits = linear(x, w);
    const Tensor kept = held == Held::by_user   ? logits
                        : held == Held::by_view ? slice(logits.detach(), 0, 0, 1)
                                                : Tensor{};
    Tensor before = clone(logits.detach());
    if (held == Held::as_leaf) logits = before.requires_grad_();
    const Tensor leaf = held == Held::as_leaf ? logits : Tensor{};
    const Tensor loss = cross_entropy(logits, targets);
    logits = {};
    if (held == Held::by_a_second_backward) {
      loss.backward({}, true);
      w.set_grad({});
    }
    loss.backward();
    if (kept.defined())
      CHECK(kept.detach().to_vector<float>() == slice(before, 0, 0, kept.size(0)).to_vector<float>());
    if (leaf.defined())
      gradients.push_back(matmul(transpose(leaf.grad(), 0, 1), x));
    else
      gradients.push_back(w.grad());
    w.set_grad({});
    CHECK(gradients.back().to_vector<float>() == gradients.front().to_vector<float>());
  }
}

TEST_CASE("a bias's gradient is the sums of its layer's, whatever happens to that on its way") {
  enum class On { nothing, an_early_use, a_late_use, a_hook, a_target };
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16})
    for (const On on : {On::nothing, On::an_early_use, On::a_late_use, On::a_hook, On::a_target}) {
      manual_seed(11);
      const TensorOptions options{dtype};
      const Tensor h = randn({3, 4, 8}, options), w = randn({8, 8}, options),
                   stream = randn({3, 4, 8}, options);
      const Tensor b = randn({8}, options).requires_grad_(), scale = randn({8}, options);
      const Tensor made = linear(h, w, b, stream);
      const Subscription hook =
          on == On::a_hook ? register_hook(made, [](const Tensor& g) { return mul(g, -2); }) : Subscription{};
      const Tensor early = on == On::an_early_use ? square(made) : Tensor{};
      Tensor end = linear(layer_norm(made, scale, {}), w, {}, made);
      if (early.defined()) end = add(end, early);
      if (on == On::a_late_use) end = add(end, square(made));
      const Tensor inputs[] = {b, made};
      const std::size_t count = on == On::a_target ? 2 : 1;
      const Tensor loss = sum(square(end));
      const std::vector<Tensor> exact = grad(loss, inputs, {}, {.retain_graph = true});
      const Tensor bias = grad(loss, std::span(inputs, count))[0], sums = sum(exact[1], {0, 1});
      INFO(name_of(dtype) << ", " << static_cast<int>(on));
      const double bound = dtype == DType::f64 ? 1e-12 : dtype == DType::f32 ? 1e-4 : 0.02;
      CHECK(amax(abs(sub(to(bias, DType::f64), to(sums, DType::f64)))).item() <=
            bound * (1 + amax(abs(to(sums, DType::f64))).item()));
    }
}

TEST_CASE("a residual stream's gradient is the sum, whoever comes first") {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    manual_seed(10);
    const Tensor x = randn({3, 8}, {dtype}).requires_grad_(), w = randn({8}, {dtype}),
                 b = randn({8}, {dtype});
    const auto norm = [&](const Tensor& t) { return layer_norm(t, w, b); };
    const auto gradient = [&](const std::function<Tensor()>& body) {
      return to(grad(sum(body()), std::span(&x, 1))[0], DType::f64);
    };
    const Tensor alone = gradient([&] { return norm(x); }), straight = gradient([&] { return square(x); }),
                 both = gradient([&] { return add(norm(x), square(x)); }),
                 reversed = gradient([&] { return add(square(x), norm(x)); }),
                 twice = gradient([&] { return add(norm(x), add(square(x), norm(x))); });
    const double bound = dtype == DType::f64 ? 1e-14 : dtype == DType::f32 ? 1e-5 : 0.1;
    INFO(name_of(dtype));
    CHECK(amax(abs(sub(both, add(alone, straight)))).item() <= bound);
    CHECK(amax(abs(sub(reversed, add(alone, straight)))).item() <= bound);
    CHECK(amax(abs(sub(twice, add(add(alone, alone), straight)))).item() <= 2 * bound);
  }
}
