// Who is told during a backward, in which order, and what holds when one of them throws.
#include <map>
#include <optional>

#include "autograd/autograd.h"
#include "runtime/apply.h"
#include "runtime/ops.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::test;

namespace {

Tensor leaf(const Shape& shape, unsigned seed = 1) { return numbers(shape, f64, seed).requires_grad_(); }

/// Writes down what it is told; throws where asked.
struct Recorder final : GradSink {
  void begin(PassInfo pass, Leaf& leaf) override {
    log += "b" + leaf.name;
    runs.insert(pass.number);
    if (throw_at == "begin") fail<StateError>("recorder: begin");
  }
  void accept(PassInfo pass, Leaf& leaf, Tensor gradient) override {
    log += "a" + leaf.name;
    runs.insert(pass.number);
    if (throw_at == "accept" + leaf.name) fail<StateError>("recorder: accept");
    gradients[leaf.name] = gradient;
  }
  void finish(PassInfo) override {
    log += "f";
    if (throw_at == "finish") fail<StateError>("recorder: finish");
  }
  void abort(PassInfo) noexcept override { log += "x"; }
  std::string log, throw_at;
  std::set<std::uint64_t> runs;
  std::map<std::string, Tensor> gradients;
};

Tensor named(const std::string& name, const std::shared_ptr<GradSink>& sink, unsigned seed) {
  const Tensor x = leaf({3}, seed);
  set_leaf_name(x, name);
  set_sink(x, sink);
  return x;
}

/// The identity; its gradient queues a callback.
struct Queueing {
  static constexpr std::string_view name = "queueing";
  int* calls;
  Specs infer(SpecSpan in) const { return {in[0]}; }
  void run(Inputs in, Outputs out) const { copy_(alias(out[0], out[0].layout()), in[0]); }
  Reads reads(Mask) const { return {}; }
  Tensors grad(const GradArgs& args) const {
    queue_backward_callback([calls = calls] { ++*calls; });
    return {args.gy[0]};
  }
  bool operator==(const Queueing&) const = default;
};

/// The same, with its reference's gradient.
struct Referred {
  static constexpr std::string_view name = "referred";
  Queueing inner;
  Specs infer(SpecSpan in) const { return {in[0]}; }
  Tensors reference(Inputs in) const { return {apply(inner, in[0])}; }
  bool operator==(const Referred&) const = default;
};

}  // namespace

TEST_CASE("hooks: see complete gradients, in the order they came, and may replace them") {
  const Tensor x = leaf({2});
  std::string order;
  const Subscription one = register_hook(x, [&](const Tensor& g) {
    order += "1";
    CHECK(same_bits(g, full({2}, 5, {f64})));
    return mul(g, 2.0);
  });
  const Subscription two = register_hook(x, [&](const Tensor& g) {
    order += "2";
    CHECK(same_bits(g, full({2}, 10, {f64})));
    return Tensor{};
  });
  sum(add(mul(x, 2.0), mul(x, 3.0))).backward();
  CHECK(order == "12");
  CHECK(same_bits(x.grad(), full({2}, 10, {f64})));
}

TEST_CASE("hooks: on a tensor between, before its node's gradient runs") {
  const Tensor x = leaf({2});
  const Tensor h = mul(x, 3.0);
  const Subscription hook = register_hook(h, [](const Tensor& g) { return mul(g, 0.0); });
  sum(add(h, h)).backward();
  CHECK(same_bits(x.grad(), zeros({2}, {f64})));
}

TEST_CASE("hooks: grad() runs those of what it passes and of what it is asked for") {
  const Tensor x = leaf({2});
  int calls = 0;
  const Subscription hook = register_hook(x, [&](const Tensor& g) {
    ++calls;
    return mul(g, 2.0);
  });
  CHECK(same_bits(grad(sum(x), std::span(&x, 1))[0], full({2}, 2, {f64})));
  CHECK(calls == 1);
  const Tensor h = mul(x, 3.0);
  const Subscription on_h = register_hook(h, [](const Tensor& g) { return mul(g, 5.0); });
  CHECK(same_bits(grad(sum(h), std::span(&h, 1))[0], full({2}, 5, {f64})));
}

TEST_CASE("hooks: end with their handle, unless kept") {
  const Tensor x = leaf({1});
  int calls = 0;
  const auto count = [&](const Tensor&) {
    ++calls;
    return Tensor{};
  };
  {
    const Subscription hook = register_hook(x, count);
    sum(x).backward();
    CHECK(calls == 1);
  }
  sum(x).backward();
  CHECK(calls == 1);
  Subscription first = register_hook(x, count);
  Subscription moved = std::move(first);
  first.reset();
  sum(x).backward();
  CHECK(calls == 2);
  moved = Subscription{};
  sum(x).backward();
  CHECK(calls == 2);
  register_hook(x, count).keep();
  sum(x).backward();
  CHECK(calls == 3);
  std::optional<Subscription> orphan;
  {
    const Tensor gone = leaf({1});
    orphan = register_hook(gone, count);
  }
  orphan.reset();  // the tensor went first
  CHECK_THROWS_AS(register_hook(zeros({1}), count), StateError);
}

TEST_CASE("hooks: may remove themselves and add others while they run") {
  const Tensor x = leaf({1});
  Subscription self, after;
  std::vector<Subscription> added;
  int calls = 0;
  const std::string shared = "a closure that is used after the hook was removed";
  self = register_hook(x, [&, shared](const Tensor&) {
    self.reset();
    for (int i = 0; i < 20; ++i)
      added.push_back(register_hook(x, [&](const Tensor&) { return ++calls, Tensor{}; }));
    CHECK(shared.starts_with("a closure"));
    return Tensor{};
  });
  after = register_post_accumulate_hook(x, [&, shared](Leaf&) {
    after.reset();
    added.push_back(register_post_accumulate_hook(x, [&](Leaf&) { ++calls; }));
    CHECK(shared.starts_with("a closure"));
  });
  sum(x).backward();
  calls = 0;
  sum(x).backward();
  CHECK(calls == 21);
}

TEST_CASE("hooks: after accumulation .grad is there, once a backward") {
  const Tensor x = leaf({2}), w = leaf({2}, 2);
  std::string order;
  const Subscription a = register_post_accumulate_hook(x, [&](Leaf& l) {
    order += "x";
    CHECK(l.grad.defined());
    l.grad = {};  // as an optimizer fused into backward does
  });
  const Subscription b = register_post_accumulate_hook(w, [&](Leaf&) { order += "w"; });
  sum(add(mul(x, w), x)).backward();
  CHECK(order.size() == 2);
  CHECK_FALSE(x.grad().defined());
  CHECK(w.grad().defined());
  CHECK_THROWS_AS(register_post_accumulate_hook(mul(x, 2.0), [](Leaf&) {}), StateError);
  order.clear();
  grad(sum(x), std::span(&x, 1));
  CHECK(order.empty());
}

TEST_CASE("hooks: a gradient of another shape, dtype or device is refused by name, wherever the hook hangs") {
  const Tensor x = leaf({2, 3});
  set_leaf_name(x, "layers.0.weight");
  const auto refused = [&](const Tensor& on, const std::string& who, const Tensor& other, auto kind,
                           const std::function<void()>& run) {
    using Kind = typename decltype(kind)::type;
    const Subscription hook = register_hook(on, [&](const Tensor&) { return other; });
    const std::string text = message_of<Kind>(run);
    INFO(text);
    CHECK(one_line_about(text, "register_hook"));
    CHECK(one_line_about(text, who));
    CHECK_FALSE(in_backward());
  };
  for (const bool of_leaf : {true, false})
    for (const bool by_grad : {false, true}) {
      const Tensor y = mul(x, 2.0);
      const Tensor& on = of_leaf ? x : y;
      const std::string who = of_leaf ? "layers.0.weight" : "mul";
      const auto run = [&] {
        if (by_grad)
          grad(sum(y), std::span(&x, 1), {}, {.retain_graph = true});
        else
          sum(y).backward({}, true);
      };
      refused(on, who, zeros({3}, {f64}), std::type_identity<ShapeError>{}, run);
      refused(on, who, zeros({2, 1}, {f64}), std::type_identity<ShapeError>{}, run);
      refused(on, who, zeros({2, 3}, {f32}), std::type_identity<DTypeError>{}, run);
      refused(on, who, zeros({2, 3}, {f64, Device::meta()}), std::type_identity<DeviceError>{}, run);
      CHECK_NOTHROW(run());
    }
}

TEST_CASE("hooks: one that writes the gradient it is given is refused while others use it") {
  const Tensor a = leaf({2}), b = leaf({2}, 2);
  const Subscription hook = register_hook(a, [](const Tensor& g) { return mul_(g, 2.0), Tensor{}; });
  const Tensor up = numbers({2}, f64, 5);
  CHECK(one_line_about(message_of<StateError>([&] { add(a, b).backward(clone(up)); }), "register_hook"));
  CHECK_FALSE(b.grad().defined());
  mul(a, 3.0).backward(ones({2}, {f64}));  // alone with it, a hook may write
  CHECK(same_bits(a.grad(), full({2}, 6, {f64})));
}

TEST_CASE("hooks: each handle ends its own, whatever was registered and ended around it") {
  const Tensor x = leaf({1});
  std::string told;
  std::vector<Subscription> handles;
  const auto add = [&](char name) {
    handles.push_back(register_hook(x, [&told, name](const Tensor&) { return told += name, Tensor{}; }));
  };
  const auto hear = [&] {
    told.clear();
    sum(x).backward();
    return told;
  };
  for (const char name : {'a', 'b', 'c', 'b'}) add(name);
  CHECK(hear() == "abcb");
  handles[1].reset();
  CHECK(hear() == "acb");
  handles[1].reset();  // again: nothing
  add('d');
  CHECK(hear() == "acbd");
  handles[0] = std::move(handles[4]);  // ends a, keeps d
  CHECK(hear() == "cbd");
  handles.clear();
  CHECK(hear().empty());
}

TEST_CASE(
    "hooks: one that is ended while they are told is not told, and its closure lives until it returned") {
  const Tensor x = leaf({1});
  std::string told;
  Subscription second;
  const Subscription first = register_hook(x, [&](const Tensor&) {
    told += '1';
    second.reset();
    return Tensor{};
  });
  // Ending a hook lets go of its closure, which ends another hook of the same list.
  auto third =
      std::make_shared<Subscription>(register_hook(x, [&](const Tensor&) { return told += '3', Tensor{}; }));
  second = register_hook(x, [&told, third](const Tensor&) { return told += '2', Tensor{}; });
  third.reset();
  sum(x).backward();
  CHECK(told == "13");  // the third was told before the second's closure, which keeps it, went
  sum(x).backward();
  CHECK(told == "131");
}

TEST_CASE("listeners: one that was added twice hears twice, and each scope ends its own") {
  struct Count final : Listener {
    void after(const AnyOp&, Inputs, Outputs) override { ++calls; }
    int calls = 0;
  } count;
  const auto hear = [&] {
    count.calls = 0;
    zeros({1});
    return count.calls;
  };
  const Listening outer(count);
  {
    const Listening inner(count);
    CHECK(hear() == 2);
  }
  CHECK(hear() == 1);
}

TEST_CASE("callbacks: run once at the end, before backward returns; outside there is none") {
  CHECK_THROWS_AS(queue_backward_callback([] {}), StateError);
  CHECK_FALSE(in_backward());
  const Tensor x = leaf({1});
  std::string order;
  const Subscription hook = register_post_accumulate_hook(x, [&](Leaf&) {
    order += "h";
    CHECK(in_backward());
    queue_backward_callback([&] {
      order += "c";
      queue_backward_callback([&] { order += "d"; });
    });
  });
  sum(x).backward();
  CHECK(order == "hcd");
  CHECK_FALSE(in_backward());
  sum(x).backward();
  CHECK(order == "hcdhcd");
}

TEST_CASE("callbacks: those of a gradient that is computed from a reference run too") {
  int calls = 0;
  const Tensor x = leaf({2});
  const Tensor y = apply(Referred{{&calls}}, x);
  sum(y).backward();
  CHECK(calls == 1);
  CHECK(x.grad().to_vector<double>() == std::vector<double>{1, 1});
}

TEST_CASE("callbacks: may queue any number of others, and grad() runs them too") {
  const Tensor x = leaf({1});
  int calls = 0;
  const std::string kept = "a text that is too long to lie inside the closure itself";
  std::function<void()> again = [&, kept] {
    if (++calls < 50) queue_backward_callback(again);
    CHECK(kept.starts_with("a text"));
  };
  const Subscription hook =
      register_hook(x, [&](const Tensor&) { return queue_backward_callback(again), Tensor{}; });
  sum(x).backward();
  CHECK(calls == 50);
  calls = 0;
  grad(sum(x), std::span(&x, 1));
  CHECK(calls == 50);
}

TEST_CASE("sinks: begin for all, each complete sum once, then finish") {
  const auto sink = std::make_shared<Recorder>();
  const Tensor a = named("A", sink, 1), b = named("B", sink, 2), far = named("C", sink, 3),
               plain = leaf({3}, 4);
  const auto loss = [&] { return sum(mul(add(add(a, b), a), plain)); };
  loss().backward();
  CHECK((sink->log == "bAbBaAaBf" || sink->log == "bBbAaBaAf" || sink->log == "bAbBaBaAf" ||
         sink->log == "bBbAaAaBf"));
  CHECK(distance(sink->gradients["A"], mul(plain.detach(), 2.0)) < 1e-15);
  CHECK(distance(sink->gradients["B"], plain.detach()) < 1e-15);
  CHECK_FALSE(a.grad().defined());
  CHECK(plain.grad().defined());
  loss().backward();
  CHECK(sink->runs.size() == 2);
  sink->log.clear();
  const Tensor inputs[] = {a};
  CHECK(grad(loss(), inputs)[0].defined());
  CHECK(sink->log.empty());
  set_sink(a, nullptr);
  sink->log.clear();
  loss().backward();
  CHECK(sink->log == "bBaBf");
  CHECK(a.grad().defined());
}

TEST_CASE("sinks: a backward that throws anywhere aborts them all, and the next one works") {
  const auto sink = std::make_shared<Recorder>(), other = std::make_shared<Recorder>();
  const Tensor a = named("A", sink, 1), b = named("B", sink, 2), o = named("O", other, 3),
               plain = leaf({3}, 4);
  const auto step = [&] { sum(mul(mul(a, b), mul(o, plain))).backward(); };
  for (const char* place : {"begin", "acceptA", "acceptB", "finish"}) {
    INFO(place);
    sink->log.clear();
    other->log.clear();
    sink->throw_at = place;
    CHECK_THROWS_AS(step(), StateError);
    CHECK_FALSE(in_backward());
    CHECK(sink->log.back() == 'x');
    CHECK(std::count(sink->log.begin(), sink->log.end(), 'x') == 1);
    sink->throw_at.clear();
    sink->log.clear();
    step();
    CHECK(sink->log.back() == 'f');
    CHECK(other->log.back() == 'f');
    CHECK(distance(sink->gradients["A"], mul(mul(b.detach(), o.detach()), plain.detach())) < 1e-15);
  }
}

TEST_CASE("sinks: a gradient rule, a hook or a callback that throws leaves the rank usable") {
  const auto sink = std::make_shared<Recorder>();
  const Tensor a = named("A", sink, 1);
  const Tensor h = mul(a, 2.0);
  struct Broken : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  for (int place = 0; place < 3; ++place) {
    sink->log.clear();
    const Tensor y = mul(a, 2.0);
    Subscription hook, after;
    if (place == 0) hook = register_hook(y, [](const Tensor&) -> Tensor { throw Broken("hook"); });
    if (place == 1)
      hook = register_hook(y, [](const Tensor&) { return zeros({7}, {f64}); });  // of a wrong shape
    if (place == 2)
      hook = register_hook(y, [](const Tensor&) {
        queue_backward_callback([] { throw Broken("callback"); });
        return Tensor{};
      });
    if (place == 1)
      CHECK_THROWS_AS(sum(y).backward(), ShapeError);
    else
      CHECK_THROWS_AS(sum(y).backward(), Broken);  // as it is, not wrapped
    CHECK_FALSE(in_backward());
    CHECK(sink->log.back() == 'x');
    sum(mul(a, 2.0)).backward();
    CHECK(same_bits(sink->gradients["A"], full({3}, 2, {f64})));
  }
}

TEST_CASE("a backward inside a backward: one that is refused leaves the outer one's reads announced") {
  struct Counting final : StorageOwner {
    void need(Storage&) override {}
    void expect_reads(Storage&, int reads) override { expected += reads; }
    void read_done(Storage&) override { ++done; }
    void forget_reads(Storage&) noexcept override { ++forgotten; }
    int expected = 0, done = 0, forgotten = 0;
  };
  const Tensor x = leaf({2}), w = leaf({2}, 2);
  const auto owner = std::make_shared<Counting>();
  w.storage().set_owner(owner);
  const Tensor h = mul(x, w), y = sum(exp(h));
  const Subscription hook = register_hook(h, [&](const Tensor&) {
    const GradMode recording(true);
    CHECK_THROWS_AS(sum(mul(h, 2.0)).backward(), StateError);
    return Tensor{};
  });
  y.backward();
  CHECK(owner->expected == 1);
  CHECK(owner->done == 1);
  CHECK(owner->forgotten == 0);
  CHECK(x.grad().defined());
}

TEST_CASE("a backward inside a backward: on another graph it works, on the same one it is refused") {
  const Tensor x = leaf({2}), other = leaf({2}, 2);
  {
    const Subscription hook = register_hook(x, [&](const Tensor&) {
      const GradMode recording(true);
      sum(exp(other)).backward();
      return Tensor{};
    });
    sum(x).backward();
    CHECK(distance(other.grad(), exp(other.detach())) < 1e-12);
  }
  x.set_grad({});
  const Tensor h = exp(x), y = sum(h);
  const Subscription hook = register_hook(h, [&](const Tensor&) {
    const GradMode recording(true);
    sum(mul(h, 2.0)).backward();
    return Tensor{};
  });
  CHECK(one_line_about(message_of<StateError>([&] { y.backward(); }), "is in a backward that is under way"));
  CHECK_FALSE(in_backward());
  sum(x).backward();
  CHECK(same_bits(x.grad(), ones({2}, {f64})));
}

TEST_CASE("hooks: of two leaves that share them, each runs what was registered with either") {
  const Tensor a = leaf({3}), b = leaf({3}, 2);
  int first = 0, second = 0, after = 0;
  const auto count = [](int& calls) {
    return [&calls](const Tensor&) {
      ++calls;
      return Tensor{};
    };
  };
  Subscription of_a = register_hook(a, count(first));
  share_hooks(a, b);
  share_hooks(a, a);
  share_post_accumulate_hooks(a, b);
  const Subscription of_b = register_hook(b, count(second)),
                     after_a = register_post_accumulate_hook(a, [&](Leaf&) { ++after; });
  sum(b).backward();
  CHECK((first == 1 && second == 1 && after == 1));
  sum(a).backward();
  CHECK((first == 2 && second == 2 && after == 2));
  of_a.reset();
  sum(b).backward();
  CHECK((first == 2 && second == 3 && after == 3));
  const Tensor computed = mul(a, 2.0);
  for (const auto& share : {share_hooks, share_post_accumulate_hooks}) {
    CHECK(one_line_about(message_of<StateError>([&] { share(computed, b); }), "share_"));
    CHECK(one_line_about(message_of<StateError>([&] { share(a, computed); }), "share_"));
  }
}

TEST_CASE("hooks: a leaf may refuse them, and says why") {
  const Tensor x = leaf({3});
  refuse_hooks(x, "ask another");
  CHECK(message_of<StateError>([&] { const auto hook = register_hook(x, {}); }) ==
        "register_hook: ask another");
  const Subscription after = register_post_accumulate_hook(x, [](Leaf&) {});
  sum(x).backward();
  CHECK(x.grad().defined());
  CHECK(one_line_about(message_of<StateError>([&] { refuse_hooks(mul(x, 2.0), "never"); }), "refuse_hooks"));
}

TEST_CASE("hooks: a leaf that is read in two dtypes has one gradient, in the one that holds both") {
  for (const DType before : {bf16, f16, f32, f64})
    for (const DType now : {bf16, f16, f32, f64}) {
      CAPTURE(name_of(before), name_of(now));
      const DType both = before == now                     ? now
                         : size_of(before) == size_of(now) ? f32
                         : size_of(before) > size_of(now)  ? before
                                                           : now;
      const Tensor x = numbers({5}, before), y = numbers({5}, now, 2);
      Tensor old = numbers({5}, before, 3).requires_grad_(), cast = to(old.detach(), now);
      int calls = 0;
      const Subscription hook = register_hook(old, [&](const Tensor& gradient) {
        ++calls;
        CHECK(gradient.dtype() == both);
        return Tensor{};
      });
      continue_leaf(old, cast);
      cast.requires_grad_();
      // Each of two terms a dtype, in turn: sums in a dtype are made in it.
      const Tensor terms = add(add(to(sum(mul(old, x)), f64), to(sum(mul(cast, y)), f64)),
                               add(to(sum(mul(old, x)), f64), to(sum(mul(cast, y)), f64)));
      terms.backward();
      CHECK(calls == 1);
      const Tensor expected = add(to(add(x, x), both), to(add(y, y), both));
      if (before != now) CHECK(same_bits(cast.grad(), expected));
      CHECK(cast.grad().dtype() == both);
    }
}
