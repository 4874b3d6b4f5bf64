// Compiled calls with a budget: what fits, what it takes, and that its bits are those without one.
#include <charconv>
#include <cstring>
#include <optional>

#include "autograd/capture/effects.h"
#include "autograd/capture/passes/late.h"
#include "autograd/capture/program.h"
#include "autograd/compile.h"
#include "autograd/recompute.h"
#include "runtime/bytes_taken.h"
#include "tests/autograd/random_step.h"
#include "tests/catch.h"
#include "tests/runtime/op_cases.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr Executor executors[] = {Executor::replay, Executor::partition, Executor::fused};

/// Blocks that widen, whose weights are found outside, with dropout.
struct Net {
  struct Block {
    Tensor gain, up, bias, down;
  };
  std::vector<Block> blocks;
  double drop;
  explicit Net(int count, double drop = 0.25, DType dtype = DType::f32) : drop(drop) {
    manual_seed(5);
    const auto leaf = [&](const Shape& shape) { return to(mul(randn(shape), 0.3), dtype).requires_grad_(); };
    for (int i = 0; i < count; ++i) blocks.push_back({leaf({8}), leaf({32, 8}), leaf({32}), leaf({8, 32})});
  }
  std::vector<Tensor> operator()(std::span<const Tensor> in) const {
    Tensor x = in[0];
    for (const Block& b : blocks) {
      const Tensor normed = mul(mul(x, rsqrt(add(mean(square(x), {-1}, Keep::dims), 1e-5))), b.gain);
      x = add(x, linear(dropout(tanh(linear(normed, b.up, b.bias)), drop), b.down, {}));
    }
    return {mean(square(x))};
  }
  std::vector<Tensor> leaves() const {
    std::vector<Tensor> all;
    for (const Block& b : blocks)
      for (const Tensor& t : {b.gain, b.up, b.bias, b.down}) all.push_back(t);
    return all;
  }
  std::vector<Tensor> grads() const {
    std::vector<Tensor> all;
    for (const Tensor& t : leaves()) all.push_back(t.grad());
    return all;
  }
  void zero_grad() const {
    for (const Tensor& t : leaves()) t.set_grad({});
  }
};

Tensor input(int i, std::int64_t rows = 96) {
  manual_seed(100 + static_cast<std::uint64_t>(i));
  return randn({rows, 8});
}

/// What a message says is possible.
std::int64_t least_in(std::string_view message) {
  constexpr std::string_view before = "take ";
  std::int64_t bytes = 0;
  const std::size_t at = message.find(before);
  REQUIRE(at != message.npos);
  std::from_chars(message.data() + at + before.size(), message.data() + message.size(), bytes);
  return bytes;
}

/// A budget that is as small as it can be for `run`, which calls and goes back once.
template <class F>
MemoryBudget least_budget(const F& run) {
  try {
    run(MemoryBudget::bytes(1));
  } catch (const ValueError& e) {
    return MemoryBudget::bytes(least_in(e.what()));
  }
  return {};
}

}  // namespace

TEST_CASE("budget: the peak falls with it, fits it, and is what the ledger counts, to the byte") {
  for (const Executor executor : executors) {
    std::int64_t before = 0;
    for (const double part : {1.0, 0.8, 0.6, 0.45, 0.35}) {
      const Net net(6);
      const Compiled compiled = compile(net, {.executor = executor, .memory = MemoryBudget::part(part)});
      const auto step = [&](int call) {
        const Tensor x = input(call, 1000);
        net.zero_grad();
        manual_seed(3);
        std::vector<Tensor> y = compiled({x});
        y[0].backward();
      };
      for (int call = 0; call < 2; ++call) step(call);
      const CompileStats stats = compiled.stats();
      INFO("executor " << static_cast<int>(executor) << ", part " << part << ": " << stats.peak_bytes
                       << " of " << stats.eager_peak_bytes);
      CHECK(static_cast<double>(stats.peak_bytes) <= part * static_cast<double>(stats.eager_peak_bytes));
      CHECK((before == 0 || stats.peak_bytes < before));
      before = stats.peak_bytes;
      const Tensor x = input(7, 1000), gy = ones({});
      net.zero_grad();
      free_halves_workspace();
      MemoryLedger& ledger = Context::current().memory();
      const std::int64_t base = ledger.held(DeviceType::cpu).total();
      ledger.reset_peak(DeviceType::cpu);
      {
        std::vector<Tensor> y = compiled({x});
        y[0].backward(gy);
      }
      CHECK(compiled.stats().hits == 2);
      const std::int64_t measured = ledger.peak(DeviceType::cpu) - base;
      CHECK(measured == stats.peak_bytes);
    }
  }
}

TEST_CASE("budget: a leaf of 16 bits that is used often is counted in f32, and as it is rounded") {
  const auto beyond = [](DType dtype, int uses) {
    const Tensor w = to(randn({256, 256}), dtype).requires_grad_(), x = to(randn({8, 256}), dtype),
                 gy = ones({});
    const Step step = [&](std::span<const Tensor> in) {
      Tensor y = in[0];
      for (int i = 0; i < uses; ++i) y = tanh(linear(y, w, {}));
      return std::vector<Tensor>{mean(to(square(y), f32))};
    };
    const Compiled compiled = compile(step, {.memory = MemoryBudget::least()});
    MemoryLedger& ledger = Context::current().memory();
    std::int64_t taken = 0;
    for (int call = 0; call < 3; ++call) {
      Tensor(w).set_grad({});
      free_halves_workspace();
      const std::int64_t before = ledger.held(DeviceType::cpu).total();
      ledger.reset_peak(DeviceType::cpu);
      compiled({x})[0].backward(gy);
      taken = ledger.peak(DeviceType::cpu) - before;
    }
    return taken - compiled.stats().peak_bytes;
  };
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const int uses : {1, 2, 3, 4}) {
      INFO(name_of(dtype) << ", " << uses << " uses");
      CHECK(beyond(dtype, uses) <= 64);  // the loss itself
    }
}

TEST_CASE("budget: what a leaf copies of a gradient that is no dense memory of its own is counted") {
  for (const int which : {0, 1, 2}) {
    INFO("step " << which);
    const Tensor w = zeros({64, 1000}).requires_grad_(), gy = ones({});
    const Compiled compiled = compile(
        [&](std::span<const Tensor> in) {
          const Tensor total = which == 0   ? sum(w)
                               : which == 1 ? sum(transpose(mul(w, in[0]), 0, 1))
                                            : sum(mul(narrow(w, 0, 0, 32), in[0]));
          return std::vector<Tensor>{mul(total, 2.0)};
        },
        {.memory = MemoryBudget::least()});
    for (int call = 0; call < 3; ++call) {
      const Tensor x = ones({});
      w.set_grad({});
      free_halves_workspace();
      MemoryLedger& ledger = Context::current().memory();
      const std::int64_t held = ledger.held(DeviceType::cpu).total();
      ledger.reset_peak(DeviceType::cpu);
      compiled({x})[0].backward(gy);
      const std::int64_t taken = ledger.peak(DeviceType::cpu) - held;
      const auto result =
          static_cast<std::int64_t>(bytes_taken(Device::cpu(), sizeof(float)));  // the caller's
      if (call > 1) CHECK(taken - result <= compiled.stats().peak_bytes);
    }
  }
}

TEST_CASE("budget: values, gradients and the generator are as eager at any budget") {
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const Executor executor : executors) {
      const Net eager(4, 0.25, dtype);
      const auto run = [&](const Step& fn, const Net& of, int call) {
        of.zero_grad();
        Tensor x = to(input(call), dtype);
        manual_seed(static_cast<std::uint64_t>(call));
        x.requires_grad_();
        std::vector<Tensor> seen = fn({&x, 1});
        seen[0].backward();
        seen.push_back(x.grad());
        for (const Tensor& t : of.grads()) seen.push_back(t);
        seen.push_back(randn({3}));
        return seen;
      };
      const MemoryBudget least = least_budget([&](const MemoryBudget& budget) {
        const Net net(4, 0.25, dtype);
        run(compile(net, {.executor = executor, .memory = budget}), net, 0);
      });
      REQUIRE(least.limited());
      for (const MemoryBudget& budget :
           {MemoryBudget::part(1), MemoryBudget::part(0.8), MemoryBudget::part(0.7), least}) {
        const Net net(4, 0.25, dtype);
        const Compiled compiled = compile(net, {.executor = executor, .memory = budget});
        for (int call = 0; call < 3; ++call) {
          INFO("executor " << static_cast<int>(executor) << ", call " << call);
          check_same(run(compiled, net, call), run(eager, eager, call));
        }
        CHECK(compiled.stats().hits == 2);
        CHECK(compiled.stats().frames == 1);
      }
    }
}

TEST_CASE("budget: forwards from before the first backward, other needs and second derivatives are right") {
  for (const Executor executor : executors)
    for (const bool tight : {false, true}) {
      const Net eager(3), net(3);
      const MemoryBudget budget =
          !tight ? MemoryBudget::part(0.8) : least_budget([&](const MemoryBudget& tried) {
            const Tensor z = input(9).requires_grad_();
            const Tensor y = compile(net, {.executor = executor, .memory = tried})({z})[0];
            grad(y, {z}, {}, {.retain_graph = true});
          });
      const Compiled compiled = compile(net, {.executor = executor, .memory = budget});
      for (int round = 0; round < 3; ++round) {
        const auto run = [&](const Step& fn, const Net& of) {
          of.zero_grad();
          manual_seed(static_cast<std::uint64_t>(round));
          Tensor x = input(round).requires_grad_(), z = input(9).requires_grad_();
          const Tensor a = fn({&x, 1})[0], b = fn({&z, 1})[0], c = fn({&z, 1})[0];
          std::vector<Tensor> seen;
          const auto see = [&](const std::vector<Tensor>& more) {
            seen.insert(seen.end(), more.begin(), more.end());
          };
          see(grad(b, {z}, {}, {.retain_graph = true}));
          see(grad(a, {x, of.blocks[1].up}, {}, {.retain_graph = true}));
          const std::vector<Tensor> twice = grad(c, {z, of.blocks[0].gain}, {}, {.create_graph = true});
          see(twice);
          see(grad(sum(square(twice[0])), {z, of.blocks[2].down}));
          b.backward();
          a.backward();
          see(of.grads());
          return seen;
        };
        INFO("executor " << static_cast<int>(executor) << ", tight " << tight << ", round " << round);
        check_same(run(compiled, net), run(eager, eager));
      }
    }
}

TEST_CASE("budget: a first backward of a replayed call makes that call's dropout again") {
  for (const Executor executor : executors) {
    const Net eager(4), net(4);
    const Compiled compiled = compile(net, {.executor = executor, .memory = MemoryBudget::least()});
    for (int call = 0; call < 4; ++call) {
      const auto run = [&](const Step& fn, const Net& of) {
        of.zero_grad();
        const Tensor x = input(call, 1000);
        manual_seed(static_cast<std::uint64_t>(20 + call));
        const Tensor y = fn({&x, 1})[0];
        if (call > 0) y.backward();
        return of.grads();
      };
      check_same(run(compiled, net), run(eager, eager));
    }
    CHECK(2 * compiled.stats().peak_bytes < compiled.stats().eager_peak_bytes);
  }
}

TEST_CASE("budget: random functions have eager's bits at the least that is possible") {
  std::size_t tight = 0;
  for (unsigned seed = 0; seed < 150; ++seed) {
    RandomStep eager(seed, Writes::never), own(seed, Writes::never), tried_first(seed, Writes::never);
    const Step function = [&](std::span<const Tensor> in) { return own(in); };
    const CompileOptions options{.executor = executors[seed % 3], .full_graph = FullGraph::yes};
    CompileOptions least = options;
    least.memory = least_budget([&](const MemoryBudget& budget) {
      CompileOptions tried = options;
      tried.memory = budget;
      gradients_of(tried_first, compile([&](std::span<const Tensor> in) { return tried_first(in); }, tried),
                   0);
    });
    const Compiled compiled = compile(function, least);
    for (unsigned call = 0; call < 4; ++call) {
      INFO("function " << seed << ", call " << call);
      check_same(gradients_of(own, compiled, call), gradients_of(eager, eager, call));
    }
    CHECK(compiled.stats().hits == 3);
    tight += compiled.stats().peak_bytes < compiled.stats().eager_peak_bytes ? 1 : 0;
  }
  CHECK(tight > 5);  // of so few numbers most take less than one place of the workspace
}

TEST_CASE("budget: regions of recompute in the function stay what they are") {
  const Net inner(2);
  for (const Executor executor : executors) {
    Tensor w = randn({8, 8}).requires_grad_();
    const Step step = [&](std::span<const Tensor> in) {
      const Tensor x = tanh(linear(in[0], w, {}));
      const Tensor y = recompute([&] { return mul(exp(x), dropout(tanh(linear(x, w, {})), 0.5)); });
      return std::vector<Tensor>{mean(square(tanh(linear(y, w, {}))))};
    };
    const auto run = [&](const Step& fn) {
      w.set_grad({});
      const Tensor x = input(2);
      manual_seed(4);
      const Tensor y = fn({&x, 1})[0];
      y.backward();
      return std::vector<Tensor>{y, w.grad()};
    };
    const auto expected = run(step);
    const MemoryBudget least = least_budget(
        [&](const MemoryBudget& budget) { run(compile(step, {.executor = executor, .memory = budget})); });
    REQUIRE(least.limited());
    const Compiled compiled = compile(step, {.executor = executor, .memory = least});
    for (int call = 0; call < 3; ++call) check_same(run(compiled), expected);
  }
}

TEST_CASE("budget: a weight written before the backward is refused where it makes a product again") {
  const Net net(10);
  const MemoryBudget least = least_budget(
      [&](const MemoryBudget& budget) { compile(net, {.memory = budget})({input(1, 1000)})[0].backward(); });
  const Compiled compiled = compile(net, {.memory = least});
  for (int call = 0; call < 2; ++call) compiled({input(1, 1000)})[0].backward();
  const Tensor loss = compiled({input(1, 1000)})[0];
  {
    const NoGrad guard;
    for (const Net::Block& b : net.blocks) add_(b.bias, 1.0);  // which no eager backward reads
  }
  INFO(compiled.text());
  CHECK_THROWS_AS(loss.backward(), StateError);
  compiled({input(1, 1000)})[0].backward();
}

TEST_CASE("budget: the least is what a message says is possible, and no byte less is") {
  for (const Executor executor : executors) {
    const Net net(5);
    const auto step = [&](const MemoryBudget& budget) {
      const Compiled compiled = compile(net, {.executor = executor, .memory = budget});
      for (int call = 0; call < 2; ++call) compiled({input(call, 1000)})[0].backward();
      return compiled.stats();
    };
    const CompileStats stats = step(MemoryBudget::least());
    CHECK(2 * stats.peak_bytes < stats.eager_peak_bytes);
    CHECK(step(MemoryBudget::bytes(stats.peak_bytes)).peak_bytes <= stats.peak_bytes);
    CHECK_THROWS_WITH(step(MemoryBudget::bytes(stats.peak_bytes - 1)),
                      ContainsSubstring(fmt::format("take {} bytes at the least", stats.peak_bytes)));
  }
}

TEST_CASE("budget: what cannot be one is refused, and what cannot fit says what can") {
  for (const std::int64_t bytes : {std::int64_t{0}, std::int64_t{-1}})
    CHECK_THROWS_WITH(MemoryBudget::bytes(bytes), ContainsSubstring("give it some"));
  for (const double part : {0.0, -0.5, 1.5, std::numeric_limits<double>::quiet_NaN()})
    CHECK_THROWS_WITH(MemoryBudget::part(part), ContainsSubstring("more than 0 and at most 1"));
  const Net net(3);
  const Compiled compiled = compile(net, {.memory = MemoryBudget::bytes(100)});
  for (int call = 0; call < 2; ++call)
    CHECK_THROWS_WITH(compiled({input(1)})[0].backward(),
                      ContainsSubstring("the budget is 100; give them as much, or MemoryBudget::least()") &&
                          ContainsSubstring("with all that eager code keeps"));
  const auto within = [&](double part, std::int64_t rows) {
    const Compiled other = compile(net, {.memory = MemoryBudget::part(part)});
    try {
      other({input(1, rows)})[0].backward();
    } catch (const ValueError& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  const std::string text = within(0.01, 10);
  CHECK_THAT(text,
             ContainsSubstring("a call of (10, ") && ContainsSubstring("give them MemoryBudget::part("));
  CHECK(within(std::stod(text.substr(text.find("part(") + 5)), 10).empty());
}

// ---- late ----

namespace {

std::string text_of_late(const Step& step, const std::vector<Tensor>& in) {
  std::vector<Tensor> outputs;
  return Program::Impl(late(record(step, in, outputs)), {}).text();
}

}  // namespace

TEST_CASE("late: an op runs just before the first that reads it, unless more would wait for it") {
  const std::vector<Tensor> in{ones({4}), ones({4})};
  CHECK(text_of_late(
            [](std::span<const Tensor> x) {
              const Tensor a = exp(x[0]), b = tanh(a), first = add(x[1], 1.0);
              return std::vector<Tensor>{mul(first, b)};
            },
            in) ==
        "inputs %x0 : f32 (4), %x1 : f32 (4)\n"
        "%0 = add[right=1](%x1) : f32 (4)\n"
        "%1 = exp(%x0) : f32 (4)\n"
        "%2 = tanh(%1) : f32 (4)\n"
        "%3 = mul(%0, %2) : f32 (4)\n"
        "return %3\n");
  CHECK(text_of_late(
            [](std::span<const Tensor> x) {
              const Tensor a = exp(x[0]), first = tanh(x[1]), second = tanh(first);
              return std::vector<Tensor>{mul(second, a)};
            },
            in) ==
        "inputs %x0 : f32 (4), %x1 : f32 (4)\n"
        "%0 = tanh(%x1) : f32 (4)\n"
        "%1 = tanh(%0) : f32 (4)\n"
        "%2 = exp(%x0) : f32 (4)\n"
        "%3 = mul(%1, %2) : f32 (4)\n"
        "return %3\n");
}

TEST_CASE("late: an op stays where what it reads would wait, and take more than what it gives") {
  CHECK(text_of_late(
            [](std::span<const Tensor> x) {
              const Tensor small = sum(exp(x[0])), other = tanh(x[1]);
              return std::vector<Tensor>{mul(other, small)};
            },
            {ones({40}), ones({4})}) ==
        "inputs %x0 : f32 (40), %x1 : f32 (4)\n"
        "%0 = exp(%x0) : f32 (40)\n"
        "%1 = sum[axes=1, keep=false, mean=false](%0) : f32 ()\n"
        "%2 = tanh(%x1) : f32 (4)\n"
        "%3 = mul(%2, %1) : f32 (4)\n"
        "return %3\n");
}

TEST_CASE("late: what others may change is read before they do") {
  const NoGrad guard;
  std::vector<float> memory(4, 1.0F);
  const Tensor one = from_blob(memory.data(), {4}, f32, nullptr),
               same = from_blob(memory.data(), {4}, f32, nullptr);
  const Step steps[] = {[&](std::span<const Tensor> x) {
                          const Tensor read = exp(one);
                          add_(same, 1.0);
                          return std::vector<Tensor>{mul(x[0], read)};
                        },
                        [&](std::span<const Tensor> x) {
                          const Tensor read = exp(one);
                          repeat_in_replays([&] { memory[0] += 1.0F; });
                          return std::vector<Tensor>{mul(x[0], read)};
                        }};
  for (const Step& step : steps) {
    std::vector<Tensor> outputs;
    const Tensor x = numbers({4}, f32);
    Program::Impl after(late(record(step, {x}, outputs)), {});
    for (int call = 0; call < 2; ++call) {
      const std::vector<float> before = memory;
      const std::vector<Tensor> got = after.replay({x});
      memory = before;
      check_same(got, step({&x, 1}));
    }
  }
}

TEST_CASE("late: what throws for what it is given throws before later writes that others see") {
  const NoGrad guard;
  const Tensor count = zeros({});
  const Step step = [&](std::span<const Tensor> in) {
    const Tensor table = mul(in[0], 2.0), rows = embedding(table, add(in[1], 0));
    add_(count, 1.0);
    return std::vector<Tensor>{mul(rows, 2.0)};
  };
  const Tensor table = numbers({4, 8}, f32, 1), good = zeros({100}, {DType::i64}),
               bad = full({100}, 7, {DType::i64});
  for (const Executor executor : {Executor::replay, Executor::partition, Executor::fused}) {
    INFO("executor " << static_cast<int>(executor));
    const Compiled compiled = compile(step, {.executor = executor});
    for (int call = 0; call < 2; ++call) compiled({table, good});
    CHECK(compiled.stats().hits == 1);
    const double before = count.item();
    CHECK_THROWS_AS(compiled({table, bad}), ValueError);
    CHECK(count.item() == before);
  }
}

TEST_CASE("late: random programs give the bits of the step, and write and draw what it does") {
  std::size_t moved = 0;
  for (unsigned seed = 0; seed < 300; ++seed) {
    INFO("program " << seed);
    const RandomStep step(seed, Writes::sometimes);
    const Step& as_step = step;
    const NoGrad guard;
    std::vector<Tensor> outputs;
    manual_seed(0);
    const Recorded whole = record(as_step, inputs_of(0), outputs);
    Program::Impl before(whole, {}), after(late(whole), {});
    CHECK(after.steps.size() == before.steps.size());
    moved += before.text() != after.text() ? 1 : 0;
    for (unsigned call = 1; call < 4; ++call)
      check_same(effects_of(
                     step, [&](const std::vector<Tensor>& in) { return after.replay(in); }, call),
                 effects_of(step, as_step, call));
  }
  CHECK(moved > 50);
}
