#include "autograd/capture/capture.h"

#include <cstring>
#include <optional>
#include <random>
#include <sstream>
#include <thread>

#include "autograd/autograd.h"
#include "autograd/capture/packing.h"
#include "autograd/recompute.h"
#include "nn/layers.h"
#include "nn/optimizer.h"
#include "runtime/apply.h"
#include "runtime/backend.h"
#include "runtime/kernel.h"
#include "runtime/late_value.h"
#include "runtime/ops.h"
#include "runtime/ops/elementwise_list.h"
#include "runtime/ops/optimizer_steps.h"
#include "tests/catch.h"
#include "tests/last_first.h"

using namespace sherd;
using Catch::Matchers::ContainsSubstring;

namespace {

bool same_bits(const Tensor& a, const Tensor& b) {
  if (a.shape() != b.shape() || a.dtype() != b.dtype()) return false;
  const Tensor x = contiguous(a.detach()), y = contiguous(b.detach());
  return std::memcmp(x.raw(), y.raw(), static_cast<std::size_t>(x.numel() * size_of(x.dtype()))) == 0;
}

/// A two-layer perceptron with AdamW, all of whose state lives in tensors.
struct Perceptron {
  struct Slot {
    Tensor parameter, m, v, step;
  };
  std::vector<Slot> slots;
  Tensor lr = Tensor::scalar(1e-2, {DType::f64});
  bool recomputed = false;

  explicit Perceptron(std::uint64_t seed = 11) {
    manual_seed(seed);
    for (const Shape& shape : {Shape{16, 4}, Shape{16}, Shape{3, 16}, Shape{3}}) {
      Slot slot{mul(randn(shape), 0.3), zeros(shape), zeros(shape), zeros({}, {DType::f64})};
      slot.parameter.requires_grad_();
      slots.push_back(std::move(slot));
    }
  }
  const Tensor& parameter(std::size_t i) const { return slots[i].parameter; }
  Tensor forward(const Tensor& x) const {
    const auto hidden = [&] { return gelu(linear(x, parameter(0), parameter(1))); };
    return linear(recomputed ? recompute(hidden) : hidden(), parameter(2), parameter(3));
  }
  void update() const {
    Tensors in{lr};
    for (const Slot& slot : slots)
      for (const Tensor& t : {slot.parameter.detach(), slot.parameter.grad(), slot.m, slot.v, slot.step})
        in.push_back(t);
    apply_many(ops::AdamStep{.weight_decay = 0.01, .decoupled = true}, in);
  }
  void zero_grad() const {
    for (const Slot& slot : slots) slot.parameter.set_grad({});
  }
  /// One whole step: forward, backward, AdamW.
  std::vector<Tensor> step(std::span<const Tensor> batch) const {
    const Tensor loss = cross_entropy(forward(batch[0]), batch[1]);
    loss.backward();
    update();
    zero_grad();
    return {loss};
  }
  Step as_step() const {
    return [this](std::span<const Tensor> batch) { return step(batch); };
  }
};

std::vector<Tensor> batch_of(int step) {
  manual_seed(1000 + static_cast<std::uint64_t>(step));
  return {randn({8, 4}), randint(0, 3, {8})};
}

void check_equal(const Perceptron& a, const Perceptron& b) {
  for (std::size_t i = 0; i < a.slots.size(); ++i) {
    INFO("parameter " << i);
    CHECK(same_bits(a.slots[i].parameter, b.slots[i].parameter));
    CHECK(same_bits(a.slots[i].m, b.slots[i].m));
    CHECK(same_bits(a.slots[i].v, b.slots[i].v));
    CHECK(same_bits(a.slots[i].step, b.slots[i].step));
  }
}

/// The same perceptron in the library's layers, with its AdamW and clipping.
struct TwoLayers final : nn::Layer<TwoLayers> {
  nn::Linear hidden{4, 16}, out{16, 3};
  Tensor forward(const Tensor& x) const { return out(gelu(hidden(x))); }
  void visit(auto&& on) {
    on("hidden", hidden);
    on("out", out);
  }
};

std::vector<std::string> lines_of(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

/// The ops that a call applies, as text.
class Heard final : public Listener {
 public:
  void after(const AnyOp& op, Inputs, Outputs) override { ops.push_back(op.text()); }
  std::vector<std::string> ops;
};

}  // namespace

TEST_CASE("a captured step of a perceptron replays to the bit for 20 steps") {
  for (const bool recomputed : {false, true}) {
    Perceptron eager, captured;
    captured.recomputed = recomputed;
    Program program = capture(captured.as_step(), batch_of(0));
    CHECK(same_bits(program.outputs()[0], eager.step(batch_of(0))[0]));
    for (int step = 1; step <= 20; ++step) {
      for (const Perceptron* p : {&eager, &captured})
        fill_(p->lr, 1e-2 / step);  // a schedule writes the tensor
      const auto batch = batch_of(step);
      const Tensor expected = eager.step(batch)[0], loss = program.replay(batch)[0];
      INFO("step " << step << ", recomputed " << recomputed);
      CHECK(same_bits(loss, expected));
    }
    check_equal(eager, captured);
    for (const auto& slot : captured.slots) CHECK_FALSE(slot.parameter.grad().defined());
    // Eager code goes on from where the program left.
    CHECK(same_bits(eager.step(batch_of(50))[0], captured.step(batch_of(50))[0]));
    check_equal(eager, captured);
  }
}

TEST_CASE("layers, clipping and AdamW of the library replay to the bit for 20 steps") {
  struct Training {
    TwoLayers model;
    nn::AdamW optimizer{model.parameters(), {.lr = 1e-2}};
    std::vector<Tensor> step(std::span<const Tensor> batch) {
      const Tensor loss = cross_entropy(model(batch[0]), batch[1]);
      loss.backward();
      const Tensor norm = nn::clip_grad_norm_(model.parameters(), 0.5);
      optimizer.step();
      optimizer.zero_grad();
      return {loss, norm};
    }
  };
  manual_seed(4);
  Training eager;
  manual_seed(4);
  Training captured;
  const auto step = [&](std::span<const Tensor> batch) { return captured.step(batch); };
  CHECK_THAT(test::message_of<StateError>([&] { capture(step, batch_of(0)); }),
             ContainsSubstring("run one step before capturing"));  // this was that step
  eager.step(batch_of(0));
  Program program = capture(step, batch_of(1));
  eager.step(batch_of(1));
  for (int i = 2; i < 22; ++i) {
    for (Training* t : {&eager, &captured}) t->optimizer.set_lr(1e-2 / i);
    const auto batch = batch_of(i);
    const auto expected = eager.step(batch), got = program.replay(batch);
    INFO("step " << i);
    CHECK(same_bits(expected[0], got[0]));
    CHECK(same_bits(expected[1], got[1]));
  }
  const auto a = eager.model.parameters(), b = captured.model.parameters();
  for (std::size_t i = 0; i < a.size(); ++i) CHECK(same_bits(a[i].local(), b[i].local()));
  const auto states = std::pair{eager.optimizer.state_dict(), captured.optimizer.state_dict()};
  REQUIRE(states.first.size() == states.second.size());
  for (std::size_t i = 0; i < states.first.size(); ++i)
    CHECK(same_bits(states.first[i].second, states.second[i].second));
}

TEST_CASE("watching changes neither the ops nor the results") {
  Perceptron plain, watched;
  Heard eager, captured;
  const auto batch = batch_of(0);
  const auto heard_by = [&](Heard& listener, auto&& call) {
    const Listening listening(listener);
    return call();
  };
  const Tensor expected = heard_by(eager, [&] { return plain.step(batch)[0]; });
  const Program program = heard_by(captured, [&] { return capture(watched.as_step(), batch); });
  CHECK(eager.ops == captured.ops);
  CHECK(program.size() == eager.ops.size());
  CHECK(same_bits(program.outputs()[0], expected));
}

TEST_CASE("a program prints one line an op") {
  const Tensor w = full({3, 2}, 0.5), bias = zeros({3});
  const auto step = [&](std::span<const Tensor> in) -> std::vector<Tensor> {
    const Tensor y = tanh(add(matmul(in[0], transpose(w, 0, 1)), bias));
    add_(bias, 1.0);
    return {sum(y), y};
  };
  const Program program = capture(step, {ones({4, 2})});
  const auto lines = lines_of(to_string(program));
  const std::vector<std::string> shape = {"inputs %x0 : f32 (4, 2)", "outside %p0 : f32 (3, 2)",
                                          "outside %p1 : f32 (3)"};
  REQUIRE(lines.size() == shape.size() + program.size() + 1);
  for (std::size_t i = 0; i < shape.size(); ++i) CHECK(lines[i] == shape[i]);
  CHECK_THAT(lines[3], ContainsSubstring("%0 = ") && ContainsSubstring("(%p0) : f32 (2, 3)"));
  CHECK_THAT(lines[4], ContainsSubstring("%1 = matmul") && ContainsSubstring("(%x0, %0) : f32 (4, 3)"));
  CHECK(lines[5] == "%2 = add(%1, %p1) : f32 (4, 3)");
  CHECK(lines[6] == "%3 = tanh(%2) : f32 (4, 3)");
  CHECK_THAT(lines[7], ContainsSubstring("%p1 = add_") && ContainsSubstring("(%p1) : f32 (3)"));
  CHECK_THAT(lines[8], ContainsSubstring("%4 = sum") && ContainsSubstring("(%3) : f32 ()"));
  CHECK(lines[9] == "return %4, %3");
}

TEST_CASE("the text of a step is stable, and names what it updates") {
  Perceptron a(1), b(2);
  const std::string text = to_string(capture(a.as_step(), batch_of(0)));
  CHECK(text == to_string(capture(b.as_step(), batch_of(1))));
  const auto lines = lines_of(text);
  CHECK(lines.front() == "inputs %x0 : f32 (8, 4), %x1 : i64 (8)");
  CHECK(lines.back().starts_with("return %"));
  const auto update = std::find_if(lines.begin(), lines.end(), [](const std::string& line) {
    return line.find("= adam_step_[") != std::string::npos;
  });
  REQUIRE(update != lines.end());
  CHECK(update->starts_with("%p0, "));
}

TEST_CASE("outputs are fresh, and may be views, inputs or tensors from outside") {
  const Tensor w = full({2}, 3.0), other = full({1}, 7.0);
  const auto step = [&](std::span<const Tensor> in) -> std::vector<Tensor> {
    const Tensor y = mul(in[0], w);
    return {y, select(y, 0, 1), in[0], w, other};
  };
  Program program = capture(step, {ones({3, 2})});
  const Tensor x = full({3, 2}, 2.0);
  const auto first = program.replay({x});
  const auto second = program.replay({full({3, 2}, 4.0)});
  CHECK(first[0].to_vector<float>() == std::vector<float>(6, 6.0f));
  CHECK(first[1].to_vector<float>() == std::vector<float>(2, 6.0f));
  CHECK(second[0].to_vector<float>() == std::vector<float>(6, 12.0f));
  CHECK(first[1].storage_ref() == first[0].storage_ref());
  CHECK(first[2].storage_ref() == x.storage_ref());
  CHECK(first[3].storage_ref() == w.storage_ref());
  CHECK(first[4].storage_ref() == other.storage_ref());
}

TEST_CASE("inputs may lie anywhere in their memory, and may be written") {
  const auto step = [](std::span<const Tensor> in) -> std::vector<Tensor> {
    add_(in[0], 1.0);
    return {sum(narrow(in[0], 0, 1, 1))};
  };
  const Tensor all = arange(0, 12, 1, {DType::f32});
  const Tensor rows = reshape(all, {6, 2});
  Program program = capture(step, {clone(narrow(rows, 0, 0, 2))});
  for (const int at : {0, 2, 4}) {
    const Tensor row = narrow(rows, 0, at, 2);
    const double expected = static_cast<double>(2 * at + 2 + 2 * at + 3 + 2);
    CHECK(program.replay({row})[0].item() == expected);
  }
  CHECK(all.to_vector<float>().back() == 12.0f);
}

TEST_CASE("values between the ops share memory, and a replay allocates nothing new") {
  const auto step = [](std::span<const Tensor> in) -> std::vector<Tensor> {
    Tensor h = in[0];
    for (int i = 0; i < 20; ++i) h = tanh(mul(h, 0.9));
    return {sum(h)};
  };
  const Tensor x = randn({64, 64});
  Program program = capture(step, {x});
  const auto bytes = static_cast<std::size_t>(x.numel()) * 4;
  CHECK(program.workspace_bytes() <= 2 * bytes);
  CHECK(same_bits(program.replay({x})[0], step({&x, 1})[0]));
  const auto before = Context::current().cpu_pool().system_allocations();
  for (int i = 0; i < 5; ++i) program.replay({x});
  if (test::skip_if(Context::current().cpu_pool().cached_bytes() == 0,
                    "the pool caches nothing in sanitizer builds"))
    return;
  CHECK(Context::current().cpu_pool().system_allocations() == before);
}

TEST_CASE("a captured step with recomputed regions holds no more than the step does, and has its bits") {
  using Block = std::function<Tensor(const Tensor&, const Tensor&, const Tensor&)>;
  const Block plain = [](const Tensor& h, const Tensor& a, const Tensor& b) {
    return linear(gelu(linear(h, a)), b);
  };
  const Block dropped = [](const Tensor& h, const Tensor& a, const Tensor& b) {
    return add(h, linear(dropout(relu(linear(layer_norm(h, {}, {}), a)), 0.3), b));
  };
  const Block products = [](const Tensor& h, const Tensor& a, const Tensor& b) {
    return matmul(tanh(matmul(h, transpose(a, 0, 1))), transpose(b, 0, 1));
  };
  const Block within = [&](const Tensor& h, const Tensor& a, const Tensor& b) {
    return recompute([&] { return plain(h, a, b); });
  };
  int kind = 0;
  for (const Block& block : {plain, dropped, products, within}) {
    ++kind;
    for (const int blocks : {2, 3, 4, 6, 12})
      for (const int every : {1, 2}) {  // which of them are regions
        manual_seed(3);
        struct Net {
          std::vector<Tensor> a, b;
        };
        const auto net_of = [&] {
          Net net;
          manual_seed(4);
          for (int i = 0; i < blocks; ++i) {
            net.a.push_back(mul(randn({512, 64}), 0.1).requires_grad_());
            net.b.push_back(mul(randn({64, 512}), 0.1).requires_grad_());
          }
          return net;
        };
        const auto step_of = [&](const Net& net) {
          return [&](std::span<const Tensor> in) -> std::vector<Tensor> {
            Tensor h = in[0];
            for (int i = 0; i < blocks; ++i) {
              const auto at = static_cast<std::size_t>(i);
              const auto run = [&] { return block(h, net.a[at], net.b[at]); };
              h = i % every == 0 ? recompute(run) : run();
            }
            const Tensor loss = mean(square(h));
            h = {};
            loss.backward();
            const NoGrad guard;
            for (const auto* list : {&net.a, &net.b})
              for (const Tensor& w : *list) {
                add_(w, mul(w.grad(), -0.1));
                w.set_grad({});
              }
            return {loss.detach()};
          };
        };
        const Tensor x = randn({256, 64});
        const Net net = net_of(), twin = net_of();
        const auto eager = step_of(twin), step = step_of(net);
        MemoryLedger& ledger = Context::current().memory();
        const auto held = [&] { return ledger.held(DeviceType::cpu).total(); };
        const auto peak_of = [&](const auto& run) {
          ledger.reset_peak(DeviceType::cpu);
          run();
          return ledger.peak(DeviceType::cpu);
        };
        manual_seed(9);
        std::vector<Tensor> losses;
        const std::int64_t before = held();
        const std::int64_t own = peak_of([&] { losses.push_back(eager({&x, 1})[0]); }) - before;
        for (int i = 0; i < 2; ++i) losses.push_back(eager({&x, 1})[0]);
        manual_seed(9);
        const std::int64_t base = held();
        Program program = capture(step, {x});
        CHECK(same_bits(program.outputs()[0], losses[0]));
        const std::int64_t captured =
            peak_of([&] { CHECK(same_bits(program.replay({x})[0], losses[1])); }) - base;
        CHECK(same_bits(program.replay({x})[0], losses[2]));
        INFO("kind " << kind << ", " << blocks << " blocks, every " << every << ": " << captured
                     << " against " << own);
        // The packed memory is at most one block's result above a tenth more.
        CHECK(captured <= own + own / 10 + x.spec().bytes());
        for (std::size_t i = 0; i < net.a.size(); ++i)
          CHECK((same_bits(net.a[i], twin.a[i]) && same_bits(net.b[i], twin.b[i])));
      }
  }
}

TEST_CASE("what lives for a while is packed: no two at a time overlap, and what follows takes their place") {
  std::mt19937 random(5);
  const auto below = [&](std::uint32_t n) { return static_cast<std::uint32_t>(random() % n); };
  for (int round = 0; round < 200; ++round) {
    const std::size_t alignment = std::size_t{1} << below(10);
    std::vector<Lifetime> lives(below(60));
    for (Lifetime& life : lives) {
      life.bytes = below(4) == 0 ? 0 : below(5000);
      life.begin = below(40);
      life.end = life.begin + below(20);
    }
    const Packing packing = pack(lives, alignment);
    std::size_t most = 0, all = 0;  // that live at a time, and that there are
    for (std::uint32_t step = 0; step < 60; ++step) {
      std::size_t now = 0;
      for (const Lifetime& life : lives) now += life.begin <= step && step <= life.end ? life.bytes : 0;
      most = std::max(most, now);
    }
    for (std::size_t i = 0; i < lives.size(); ++i) {
      all += (lives[i].bytes + alignment - 1) / alignment * alignment;
      REQUIRE(packing.offsets[i] % alignment == 0);
      REQUIRE(packing.offsets[i] + lives[i].bytes <= packing.bytes);
      for (std::size_t j = 0; j < i; ++j)
        REQUIRE((lives[i].end < lives[j].begin || lives[j].end < lives[i].begin ||
                 packing.offsets[i] + lives[i].bytes <= packing.offsets[j] ||
                 packing.offsets[j] + lives[j].bytes <= packing.offsets[i]));
    }
    REQUIRE((packing.bytes >= most && packing.bytes <= all));
  }
  CHECK(pack({}, 64).bytes == 0);
  // Many that are small give their place to one that is large, and back.
  std::vector<Lifetime> turns{{800, 3, 4}};
  for (std::uint32_t i = 0; i < 8; ++i) turns.insert(turns.end(), {{100, 0, 2}, {100, 5, i + 5}});
  CHECK(pack(turns, 4).bytes == 800);
}

TEST_CASE("what lies between the elements of an input is memory beside it") {
  const Tensor base = randn({4, 4}), beside = base[{Slice{0, 3}, 1}], within = base[{Slice{1, 3}, 0}];
  const Tensor in = base[{Slice{}, 0}];
  const auto step = [&](const Tensor& other) {
    return capture([&](std::span<const Tensor> x) { return std::vector{add(x[0], 1), add(other, 1)}; }, {in});
  };
  CHECK_THAT(test::message_of<StateError>([&] { step(beside); }), ContainsSubstring("beside input 0"));
  Program program = step(within);
  const Tensor other = randn({4, 4});
  CHECK(same_bits(program.replay({select(other, 1, 2).detach()})[1], add(other[{Slice{1, 3}, 2}], 1)));
}

TEST_CASE("a value takes the place of several that are not used any more") {
  const auto step = [](std::span<const Tensor> in) -> std::vector<Tensor> {
    std::vector<Tensor> parts;
    for (int i = 0; i < 8; ++i) parts.push_back(mul(in[0], i));
    const Tensor all = cat(parts, 0);
    parts.clear();
    return {sum(tanh(all))};
  };
  const Tensor x = randn({1024});
  Program program = capture(step, {x});
  CHECK(program.workspace_bytes() == 2 * 8 * 4096);  // the parts and all, then all and its tanh
  CHECK(same_bits(program.replay({x})[0], step({&x, 1})[0]));
}

TEST_CASE("a replay counts as a write for graphs that kept what it writes") {
  Perceptron p;
  Program program = capture(p.as_step(), batch_of(0));
  const Tensor loss = cross_entropy(p.forward(batch_of(1)[0]), batch_of(1)[1]);
  program.replay(batch_of(2));
  CHECK_THAT(test::message_of<StateError>([&] { loss.backward(); }), ContainsSubstring("changed in place"));
}

TEST_CASE("the program outlives what it was captured from") {
  Perceptron eager;
  auto program = [] {
    Perceptron p;
    return capture(p.as_step(), batch_of(0));
  }();
  eager.step(batch_of(0));
  CHECK(same_bits(program.replay(batch_of(1))[0], eager.step(batch_of(1))[0]));
}

TEST_CASE("a replay takes only inputs like the captured ones") {
  Program program =
      capture([](std::span<const Tensor> in) -> std::vector<Tensor> { return {add(in[0], in[1])}; },
              {ones({2, 3}), ones({2, 3})});
  const Tensor x = ones({2, 3});
  CHECK_THAT(test::message_of<ValueError>([&] { program.replay({x}); }),
             ContainsSubstring("replay: 1 inputs"));
  CHECK_THAT(test::message_of<ShapeError>([&] { program.replay({x, ones({3, 2})}); }),
             ContainsSubstring("replay: input 1 has shape (3, 2)") && ContainsSubstring("(2, 3)"));
  CHECK_THAT(test::message_of<ShapeError>([&] { program.replay({x, transpose(ones({3, 2}), 0, 1)}); }),
             ContainsSubstring("strides"));
  CHECK_THAT(test::message_of<DTypeError>([&] { program.replay({x, ones({2, 3}, {DType::f64})}); }),
             ContainsSubstring("f64"));
  CHECK_THAT(
      test::message_of<DeviceError>([&] { program.replay({ones({2, 3}, {DType::f32, Device::cpu(1)}), x}); }),
      ContainsSubstring("cpu:1"));
  CHECK(program.replay({x, x})[0].to_vector<float>() == std::vector<float>(6, 2.0f));
  CHECK_THAT(test::message_of<StateError>([&] {
               capture([](std::span<const Tensor> in) -> std::vector<Tensor> { return {add(in[0], in[1])}; },
                       {x, x});
             }),
             ContainsSubstring("share memory"));
}

TEST_CASE("a tensor that the step leaves behind is refused, with the way out") {
  const Tensor x = randn({4});
  Tensor state;
  const auto lazy = [&](std::span<const Tensor> in) -> std::vector<Tensor> {
    if (!state.defined()) state = zeros({4});  // like optimizer state made at the first step
    add_(state, in[0]);
    return {sum(state)};
  };
  CHECK_THAT(
      test::message_of<StateError>([&] { capture(lazy, {x}); }),
      ContainsSubstring("capture: the result of full of shape (4)") && ContainsSubstring("one step before"));
  Program program = capture(lazy, {x});  // the state exists now
  const auto before = state.to_vector<float>();
  program.replay({x});
  CHECK(state.to_vector<float>() != before);

  Tensor w = randn({4});
  w.requires_grad_();
  const auto leaves_grad = [&](std::span<const Tensor> in) -> std::vector<Tensor> {
    const Tensor loss = sum(mul(in[0], w));
    loss.backward();
    return {loss};
  };
  CHECK_THAT(test::message_of<StateError>([&] { capture(leaves_grad, {x}); }),
             ContainsSubstring("zero_grad"));
}

TEST_CASE("gradients that persist are accumulated in place") {
  Tensor w = randn({4});
  w.requires_grad_();
  const auto step = [&](std::span<const Tensor> in) -> std::vector<Tensor> {
    sum(mul(in[0], w)).backward();
    return {};
  };
  w.set_grad(zeros({4}));
  Program program = capture(step, {ones({4})});
  program.replay({full({4}, 2.0)});
  CHECK(w.grad().to_vector<float>() == std::vector<float>(4, 3.0f));
}

TEST_CASE("a replay that writes a computed tensor is refused before anything is written") {
  Tensor total = zeros({4});
  const auto step = [&](std::span<const Tensor> in) -> std::vector<Tensor> {
    add_(total, 1.0);
    add_(in[0], total);
    return {exp(in[0])};
  };
  Program program = capture(step, {ones({4})});
  const Tensor x = ones({4}).requires_grad_(), y = mul(x, 2.0);
  const std::vector<float> before = total.to_vector<float>();
  CHECK_THAT(test::message_of<StateError>([&] { program.replay({y}); }),
             ContainsSubstring("replay: the program writes") && ContainsSubstring("(4)"));
  CHECK(total.to_vector<float>() == before);
  CHECK(y.to_vector<float>() == std::vector<float>(4, 2.0f));
  CHECK_NOTHROW(program.replay({clone(y.detach())}));
  const NoGrad guard;
  CHECK_NOTHROW(program.replay({y}));
}

TEST_CASE("a step over more tensors than a mask has bits replays to the bit") {
  constexpr std::size_t count = 20;  // a hundred and one inputs of one op
  const auto run = [&](bool replayed) {
    manual_seed(3);
    std::vector<Tensor> parameters;
    Tensors state{Tensor::scalar(0.1, {DType::f64})};
    for (std::size_t i = 0; i < count; ++i) {
      parameters.push_back(randn({3}).requires_grad_());
      for (const Tensor& t : {parameters[i].detach(), randn({3}), zeros({3}), zeros({3})}) state.push_back(t);
      state.push_back(zeros({}, {DType::f64}));
    }
    const auto step = [&](std::span<const Tensor> in) -> std::vector<Tensor> {
      apply_many(ops::AdamStep{}, state);
      return {mul(in[0], 1.0)};
    };
    const Tensor x = ones({1});
    if (replayed) {
      Program program = capture(step, {x});
      for (int i = 0; i < 3; ++i) program.replay({x});
    } else {
      for (int i = 0; i < 4; ++i) step(std::span(&x, 1));
    }
    return parameters;
  };
  const auto plain = run(false), again = run(true);
  for (std::size_t i = 0; i < count; ++i) CHECK(same_bits(plain[i], again[i]));
}

TEST_CASE("a replay draws the random numbers that the step would draw now") {
  const Tensor x = randn({2, 3, 5, 8}).requires_grad_(), weights = ones({4, 6});
  const std::pair<const char*, std::function<Tensor()>> steps[] = {
      {"nothing", [&] { return mul(x.detach(), 2.0); }},
      {"randn and rand", [] { return add(randn({5}), rand({5})); }},
      {"randperm", [] { return randperm(7); }},
      {"integers", [] { return randint(-9, 9, {17}); }},
      {"other dtypes", [] { return rand({9}, {DType::bf16}); }},
      {"places", [&] { return multinomial(weights); }},
      {"many places", [&] { return multinomial(weights, 5); }},
      {"different places", [&] { return multinomial(weights, 5, Replacement::without); }},
      {"attention", [&] { return attention(x, x, x, {.causal = true, .dropout = 0.3}); }},
      {"gradients",
       [&] {
         const Tensor y = dropout(attention(dropout(x, 0.5), x, x, {.dropout = 0.3}), 0.2);
         return grad(sum(y), std::span(&x, 1))[0];
       }},
      {"a region",
       [&] { return grad(sum(recompute([&] { return square(dropout(x, 0.5)); })), std::span(&x, 1))[0]; }},
  };
  for (const auto& [name, body] : steps) {
    INFO(name);
    const auto run = [&, &body = body](bool replayed) {
      manual_seed(7);
      randn({3});  // the step does not begin at 0
      std::vector<Tensor> results;
      const Step step = [&](std::span<const Tensor>) { return std::vector{body().detach()}; };
      std::optional<Program> program;
      for (int i = 0; i < 4; ++i) {
        if (i == 2) manual_seed(8);
        if (replayed && !program)
          results.push_back((program = capture(step, {}))->outputs()[0]);
        else
          results.push_back(replayed ? program->replay({})[0] : step({})[0]);
        randn({i + 1});  // others draw between
      }
      results.push_back(randn({3}));
      return results;
    };
    const auto eager = run(false), replayed = run(true);
    for (std::size_t i = 0; i < eager.size(); ++i) CHECK(same_bits(eager[i], replayed[i]));
    CHECK(same_bits(eager[0], eager[1]) == (std::string_view(name) == "nothing"));
  }
}

TEST_CASE("what could not change on replay is refused by name") {
  const Tensor x = randn({4});
  Tensor rate = ones({1});
  const auto refused = [&](auto body) {
    return [&x, body] {
      capture([&](std::span<const Tensor> in) -> std::vector<Tensor> { return {body(in[0])}; }, {x});
    };
  };
  CHECK_THAT(test::message_of<StateError>(refused([](const Tensor& t) { return mul(t, sum(t).item()); })),
             ContainsSubstring("the host reads"));
  CHECK_THAT(
      test::message_of<StateError>(refused([](const Tensor& t) { return mul(t, t.to_vector<float>()[0]); })),
      ContainsSubstring("the host reads"));
  CHECK_THAT(test::message_of<StateError>(refused([](const Tensor& t) { return mul(t, *t.data<float>()); })),
             ContainsSubstring("the host reads"));
  const std::pair<std::string, std::function<Tensor(const Tensor&)>> picks[] = {
      {"index", [](const Tensor& t) { return Tensor(t[greater(t, 0)]); }},
      {"index", [](const Tensor& t) { return masked_select(t, greater(t, 0)); }},
      {"nonzero", [](const Tensor& t) { return nonzero(t); }}};
  for (const auto& [name, pick] : picks) {
    const std::string message = test::message_of<StateError>(refused(pick));
    INFO(message);
    CHECK(message.starts_with(name + ": how many elements are picked"));
    CHECK_THAT(message, ContainsSubstring("where(mask, x, 0)"));
  }
  const LateValue earlier(sum(x));
  CHECK_THAT(test::message_of<StateError>(refused([&](const Tensor& t) { return mul(t, earlier.read()); })),
             ContainsSubstring("the host reads"));
  CHECK_THAT(
      test::message_of<StateError>(refused([](const Tensor& t) { return mul(t, LateValue(sum(t)).read()); })),
      ContainsSubstring("the host reads"));
  for (const bool before : {true, false})  // or after what an op draws
    CHECK_THAT(test::message_of<StateError>(refused([&](const Tensor& t) {
                 Generator& generator = Context::current().generator();
                 if (before) generator.reserve(4);
                 const Tensor y = dropout(t, 0.5);
                 if (!before) generator.reserve(4);
                 return y;
               })),
               ContainsSubstring("capture: the host drew random numbers"));
  CHECK_THAT(test::message_of<StateError>(refused([&](const Tensor& t) {
               manual_seed(5);
               return dropout(t, 0.5);
             })),
             ContainsSubstring("capture: the step seeds the generator"));
  CHECK_THAT(test::message_of<StateError>(refused([&](const Tensor& t) {
               const Tensor y = mul(t, rate);
               rate.mutable_data<float>()[0] = 2;
               return mul(y, rate);
             })),
             ContainsSubstring("past the ops"));
  CHECK_THROWS_AS(
      refused([](const Tensor& t) -> Tensor { throw std::runtime_error(std::to_string(t.rank())); })(),
      std::runtime_error);
  Program inner =
      capture([](std::span<const Tensor> in) -> std::vector<Tensor> { return {exp(in[0])}; }, {x});
  CHECK_THAT(test::message_of<StateError>(refused([&](const Tensor& t) { return inner.replay({t})[0]; })),
             ContainsSubstring("replay: called inside"));
  CHECK_THAT(test::message_of<StateError>([&] { recompute([&] { return inner.replay({x})[0]; }); }),
             ContainsSubstring("replay: called inside"));
  CHECK_THAT(test::message_of<ValueError>([&] { inner.replay({Tensor{}}); }),
             ContainsSubstring("empty handle"));
  CHECK_THAT(test::message_of<ValueError>(refused([](const Tensor&) { return Tensor{}; })),
             ContainsSubstring("empty handle"));
  // The rank is usable, and nobody listens any more.
  CHECK(mul(x, 1.0).to_vector<float>() == x.to_vector<float>());
}

TEST_CASE("a replay uses the memory that it may, and says so where it may not") {
  const auto with_op = [](std::span<const Tensor> in) {
    const Tensor total = zeros({});
    for (int i = 0; i < 3; ++i) add_(total, sum(in[0]));
    return std::vector{total};
  };
  Program program = capture(with_op, {ones({3})});
  for (int i = 0; i < 3; ++i) CHECK(program.replay({ones({3})})[0].item() == 9);

  // What the step made of numbers it would not make again; read alone, it is a constant.
  const auto refused = [](const std::function<Tensor()>& make) {
    const auto step = [&](std::span<const Tensor>) { return std::vector{add_(make(), 1)}; };
    CHECK_THROWS_WITH(capture(step, {}), ContainsSubstring("of the host's values"));
  };
  refused([] { return Tensor::scalar(0); });
  refused([] { return Tensor::from({1.0F, 2.0F}, {2}); });
  Tensor held;  // who holds it makes no difference
  refused([&] { return held = Tensor::scalar(0); });
  const Tensor outside = Tensor::scalar(0);
  Program counting = capture(
      [&](std::span<const Tensor>) { return std::vector{add(add_(outside, 1), Tensor::scalar(0.5))}; }, {});
  CHECK(counting.replay({})[0].item() == 2.5);
  CHECK(outside.item() == 2);

  // Beside an input in its storage lies what another input does not bring.
  const Tensor all = arange(0, 8, 1, {f32}), input = narrow(all, 0, 0, 4);
  const auto beside = [&](std::span<const Tensor> in) {
    return std::vector{add(in[0], narrow(all, 0, 4, 4))};
  };
  CHECK_THROWS_WITH(capture(beside, {input}), ContainsSubstring("beside input 0"));

  // Overlaps are refused in a replay as they are in the call.
  const auto add_in_place = [](std::span<const Tensor> in) { return std::vector{add_(in[0], in[1])}; };
  Program adding = capture(add_in_place, {ones({4}), ones({4})});
  CHECK_THROWS_WITH(adding.replay({narrow(all, 0, 0, 4), narrow(all, 0, 1, 4)}),
                    ContainsSubstring("share memory"));
  const Tensor kept = ones({4});
  Program writing =
      capture([&](std::span<const Tensor> in) { return std::vector{add_(kept, in[0])}; }, {ones({4})});
  CHECK_THROWS_WITH(writing.replay({view(kept, {4})}), ContainsSubstring("shares memory"));
  CHECK(same_bits(kept, full({4}, 2)));
}

TEST_CASE("memory without values is the program's own, once an op has written it") {
  Program program = capture(
      [](std::span<const Tensor> in) -> std::vector<Tensor> {
        const Tensor both = empty({4}), given = empty({4}), constant = empty({2});
        copy_(narrow(both, 0, 0, 2), in[0]);
        copy_(narrow(both, 0, 2, 2), mul(in[0], 10));
        copy_(given, both);
        constant.mutable_data<float>()[0] = 3;
        constant.mutable_data<float>()[1] = 4;
        return {mul(both, 2), given, add(in[0], constant)};
      },
      {ones({2})});
  const std::vector<Tensor> two = program.replay({full({2}, 2)}), three = program.replay({full({2}, 3)});
  CHECK(two[0].to_vector<float>() == std::vector<float>{4, 4, 40, 40});
  CHECK(two[1].to_vector<float>() == std::vector<float>{2, 2, 20, 20});
  CHECK(three[1].to_vector<float>() == std::vector<float>{3, 3, 30, 30});
  CHECK(three[2].to_vector<float>() == std::vector<float>{6, 7});

  const auto unwritten = [](std::span<const Tensor> in) { return std::vector{add(in[0], empty({2}))}; };
  CHECK_THROWS_WITH(capture(unwritten, {ones({2})}),
                    ContainsSubstring("capture: add reads") && ContainsSubstring("no op wrote"));
  Tensor kept;
  const auto keeping = [&](std::span<const Tensor> in) {
    kept = empty({2});
    return std::vector{mul(copy_(kept, in[0]), 2)};
  };
  CHECK_THROWS_WITH(capture(keeping, {ones({2})}), ContainsSubstring("still alive"));
}

TEST_CASE("what the host writes within a step is refused, whenever") {
  const Tensor x = ones({2}), outside = ones({2});
  const auto refused = [&](const std::function<void(const Tensor&)>& write) {
    const auto step = [&](std::span<const Tensor> in) {
      Tensor y = mul(add(in[0], outside), 2.0);
      write(y);
      return std::vector{y};
    };
    CHECK_THROWS_WITH(capture(step, {x}), ContainsSubstring("host pointer"));
  };
  refused([](const Tensor& y) { y.mutable_data<float>()[0] = 100; });
  refused([&](const Tensor&) { x.mutable_data<float>()[0] = 100; });
  refused([&](const Tensor&) { outside.mutable_data<float>()[0] = 100; });
}

TEST_CASE("a program that was moved from says so") {
  Program one = capture([](std::span<const Tensor> in) { return std::vector{exp(in[0])}; }, {ones({2})});
  Program two = std::move(one);
  CHECK_THROWS_AS(one.replay({ones({2})}), StateError);
  CHECK_THROWS_AS(one.outputs(), StateError);
  CHECK_THROWS_AS(one.size(), StateError);
  CHECK_THROWS_AS(one.workspace_bytes(), StateError);
  CHECK_THROWS_AS(to_string(one), StateError);
  CHECK(two.replay({zeros({2})})[0].to_vector<float>() == std::vector<float>{1, 1});
}

TEST_CASE("an empty function is no step") {
  CHECK_THROWS_AS(capture(Step{}, {}), ValueError);
  CHECK_THROWS_WITH(capture(Step{}, {}), ContainsSubstring("capture: an empty function"));
}

TEST_CASE("strides that no element uses do not matter to a replay") {
  Program program = capture([](std::span<const Tensor> in) { return std::vector{exp(in[0])}; },
                            {transpose(zeros({3, 1}), 0, 1)});
  const Tensor x = zeros({1, 3});
  CHECK(same_bits(program.replay({x})[0], exp(x)));
}

namespace {

/// The host's memory as a device that records: what its ops do is noted, and done when the recording runs.
class Recorder final : public Backend {
 public:
  using Work = test::Tasks;
  class Recording final : public DeviceRecording {
   public:
    Recording(Work work) : work_(std::move(work)) {}
    void run(RandomKey) override {
      CHECK(std::this_thread::get_id() == thread_);
      for (const auto& task : work_) task();
    }

   private:
    Work work_;
    std::thread::id thread_ = std::this_thread::get_id();
  };

  void* allocate(Device, std::size_t bytes) override { return std::aligned_alloc(64, (bytes / 64 + 1) * 64); }
  void deallocate(Device, void* data, std::size_t) noexcept override { std::free(data); }
  void copy(void* to, Device, const void* from, Device, std::size_t bytes) override {
    std::memcpy(to, from, bytes);
  }
  void synchronize(Device) override {}
  std::unique_ptr<DeviceRecording> record(Device, const WorkInParts& work) override {
    Work noted;
    noting_ = &noted;
    test::record_last_first(work, noted);
    noting_ = nullptr;
    ++made;
    return std::make_unique<Recording>(std::move(noted));
  }
  template <class O>
  static void kernel(const void* op, Inputs in, Outputs out) {
    const auto task = [op = *static_cast<const O*>(op), addresses = addresses_of(in, out), in = copies(in),
                       out = copies(out)]() mutable {
      std::size_t i = 0;
      for (auto* list : {&in, &out})
        for (Tensor& t : *list) t = from_address(addresses[i++], t);
      kernel_row<O>().on(DeviceType::cpu)(&op, in, out);
    };
    auto now = task;
    if (noting_ != nullptr)
      noting_->push_back(task);
    else
      now();
  }

  int made = 0;

 private:
  static std::vector<void*> addresses_of(Inputs in, Outputs out) {
    std::vector<void*> all;
    for (const Tensor& t : in) all.push_back(t.storage().data());
    for (const Tensor& t : out) all.push_back(t.storage().data());
    return all;
  }
  /// Handles of their own: a replay puts other memory behind those of the program.
  template <class List>
  static std::vector<Tensor> copies(const List& list) {
    std::vector<Tensor> all;
    for (const Tensor& t : list)
      all.push_back(Tensor(make_ref<TensorImpl>(t.storage_ref(), sherd::Layout(t.layout()), t.dtype())));
    return all;
  }
  static Tensor from_address(void* address, const Tensor& t) {
    return Tensor(make_ref<TensorImpl>(Storage::wrap(Device::cpu(), address, t.storage().bytes()),
                                       sherd::Layout(t.layout()), t.dtype()));
  }
  static inline thread_local Work* noting_ = nullptr;
};

Recorder& recorder() {
  static Recorder instance;
  return instance;
}

Device recording_device() {
  static const DeviceType type = [] {
    const DeviceType made = register_backend("recorder", recorder());
    ops::ArithmeticOps::for_each([&]<class O>() { kernel_row<O>().set(made, &Recorder::kernel<O>); });
    return made;
  }();
  return {type, 0};
}

}  // namespace

TEST_CASE("a recording runs on the thread that made it alone: another one makes its own") {
  const NoGrad guard;
  const auto on_device = [](double value) { return to(full({5}, value), recording_device()); };
  const Tensor factor = on_device(3);
  Program program = capture([&](std::span<const Tensor> in) { return std::vector{in[0] * factor + in[0]}; },
                            {on_device(1)});
  int value = 1;
  const auto replay = [&] {
    ++value;
    CHECK(program.replay({on_device(value)})[0].to_vector<float>() == std::vector<float>(5, 4.f * value));
    CHECK(program.is_device_graph());
  };
  const int before = recorder().made;
  for (int i = 0; i < 3; ++i) replay();
  CHECK(recorder().made == before + 1);
  for (int thread = 2; thread < 5; ++thread) {  // one after another: the system may give each the same id
    std::thread([&] {
      const NoGrad also_here;
      for (int i = 0; i < 3; ++i) replay();
    }).join();
    CHECK(recorder().made == before + thread);
  }
  replay();
  CHECK(recorder().made == before + 5);
}
