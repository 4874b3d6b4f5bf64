// Who is told during a backward, in which order, and what holds when one of them throws.
#include <map>
#include <optional>

#include "autograd/autograd.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::test;

namespace {

Tensor leaf(const Shape& shape, unsigned seed = 1) { return numbers(shape, f64, seed).requires_grad_(); }

/// Writes down what it is told; throws where asked.
struct Recorder final : GradSink {
  void begin(RunInfo run, Leaf& leaf) override {
    log += "b" + leaf.name;
    runs.insert(run.run);
    if (throw_at == "begin") fail<StateError>("recorder: begin");
  }
  void accept(RunInfo run, Leaf& leaf, Tensor gradient) override {
    log += "a" + leaf.name;
    runs.insert(run.run);
    if (throw_at == "accept" + leaf.name) fail<StateError>("recorder: accept");
    gradients[leaf.name] = gradient;
  }
  void finish(RunInfo) override {
    log += "f";
    if (throw_at == "finish") fail<StateError>("recorder: finish");
  }
  void abort(RunInfo) noexcept override { log += "x"; }
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

}  // namespace

TEST_CASE("hooks: see complete gradients, in the order they came, and may replace them") {
  const Tensor x = leaf({2});
  std::string order;
  const HookHandle one = register_hook(x, [&](const Tensor& g) {
    order += "1";
    CHECK(same_bits(g, full({2}, 5, {f64})));
    return mul(g, 2.0);
  });
  const HookHandle two = register_hook(x, [&](const Tensor& g) {
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
  const HookHandle hook = register_hook(h, [](const Tensor& g) { return mul(g, 0.0); });
  sum(add(h, h)).backward();
  CHECK(same_bits(x.grad(), zeros({2}, {f64})));
}

TEST_CASE("hooks: grad() runs those of what it passes and of what it is asked for") {
  const Tensor x = leaf({2});
  int calls = 0;
  const HookHandle hook = register_hook(x, [&](const Tensor& g) {
    ++calls;
    return mul(g, 2.0);
  });
  CHECK(same_bits(grad(sum(x), std::span(&x, 1))[0], full({2}, 2, {f64})));
  CHECK(calls == 1);
  const Tensor h = mul(x, 3.0);
  const HookHandle on_h = register_hook(h, [](const Tensor& g) { return mul(g, 5.0); });
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
    const HookHandle hook = register_hook(x, count);
    sum(x).backward();
    CHECK(calls == 1);
  }
  sum(x).backward();
  CHECK(calls == 1);
  HookHandle first = register_hook(x, count);
  HookHandle moved = std::move(first);
  first.reset();
  sum(x).backward();
  CHECK(calls == 2);
  moved = HookHandle{};
  sum(x).backward();
  CHECK(calls == 2);
  register_hook(x, count).keep();
  sum(x).backward();
  CHECK(calls == 3);
  std::optional<HookHandle> orphan;
  {
    const Tensor gone = leaf({1});
    orphan = register_hook(gone, count);
  }
  orphan.reset();  // the tensor went first
  CHECK_THROWS_AS(register_hook(zeros({1}), count), StateError);
}

TEST_CASE("hooks: may remove themselves and add others while they run") {
  const Tensor x = leaf({1});
  HookHandle self, after;
  std::vector<HookHandle> added;
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
  const HookHandle a = register_post_accumulate_hook(x, [&](Leaf& l) {
    order += "x";
    CHECK(l.grad.defined());
    l.grad = {};  // as an optimizer fused into backward does
  });
  const HookHandle b = register_post_accumulate_hook(w, [&](Leaf&) { order += "w"; });
  sum(add(mul(x, w), x)).backward();
  CHECK(order.size() == 2);
  CHECK_FALSE(x.grad().defined());
  CHECK(w.grad().defined());
  CHECK_THROWS_AS(register_post_accumulate_hook(mul(x, 2.0), [](Leaf&) {}), StateError);
  order.clear();
  grad(sum(x), std::span(&x, 1));
  CHECK(order.empty());
}

TEST_CASE("callbacks: run once at the end, before backward returns; outside there is none") {
  CHECK_THROWS_AS(queue_backward_callback([] {}), StateError);
  CHECK_FALSE(in_backward());
  const Tensor x = leaf({1});
  std::string order;
  const HookHandle hook = register_post_accumulate_hook(x, [&](Leaf&) {
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
    HookHandle hook, after;
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

TEST_CASE("a backward inside a backward: on another graph it works, on the same one it is refused") {
  const Tensor x = leaf({2}), other = leaf({2}, 2);
  {
    const HookHandle hook = register_hook(x, [&](const Tensor&) {
      const GradMode recording(true);
      sum(exp(other)).backward();
      return Tensor{};
    });
    sum(x).backward();
    CHECK(distance(other.grad(), exp(other.detach())) < 1e-12);
  }
  x.set_grad({});
  const Tensor h = exp(x), y = sum(h);
  const HookHandle hook = register_hook(h, [&](const Tensor&) {
    const GradMode recording(true);
    sum(mul(h, 2.0)).backward();
    return Tensor{};
  });
  CHECK(one_line_about(message_of<StateError>([&] { y.backward(); }), "inside a backward"));
  CHECK_FALSE(in_backward());
  sum(x).backward();
  CHECK(same_bits(x.grad(), ones({2}, {f64})));
}
