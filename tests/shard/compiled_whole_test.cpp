// A model with sharded modules below is one program, in which their gathers and frees are.
#include <algorithm>

#include "autograd/autograd.h"
#include "autograd/recompute.h"
#include "nn/compile.h"
#include "nn/optimizer.h"
#include "shard/fsdp.h"
#include "shard/fully_shard.h"
#include "shard/summon.h"
#include "tests/shard/compiles.h"
#include "tests/shard/twins.h"

using namespace sherd;
using namespace sherd::test;

namespace {

struct Residual final : nn::Layer<Residual> {
  nn::Linear in, out;
  explicit Residual(std::int64_t width = 6) : in(width, 4 * width), out(4 * width, width) {}
  Tensor forward(const Tensor& x) const { return add(x, out(gelu(in(x)))); }
  void visit(auto&& on) {
    on("in", in);
    on("out", out);
  }
};
struct Stack final : nn::Layer<Stack> {
  nn::ModuleList<Residual> blocks;
  std::function<void()> between{};                                           ///< blocks
  std::function<Tensor(const Residual& block, const Tensor& x)> of_block{};  ///< in place of its call

  explicit Stack(int count = 3, std::int64_t width = 6) {
    for (int i = 0; i < count; ++i) blocks.emplace_back(width);
  }
  Tensor forward(const Tensor& x) const {
    Tensor y = x;
    for (const Residual& block : blocks) {
      y = of_block ? of_block(block, y) : block(y);
      if (between) between();
    }
    return y;
  }
  void visit(auto&& on) { on("blocks", blocks); }
};

void shard_all(Stack& net, shard::GroupLayout layout) {
  for (Residual& block : net.blocks) shard::fully_shard(block, {.layout = layout});
  shard::fully_shard(net, {.layout = layout});
}

const CompileOptions whole{.sharding_hooks = ShardingHooks::inside};

/// A step's loss.
double step(Stack& net, nn::Optimizer& optimizer, int rank, int number) {
  manual_seed(static_cast<std::uint64_t>(10 * number + rank));
  const Tensor loss = mean(square(net(randn({2, 6}))));
  loss.backward();
  optimizer.step();
  optimizer.zero_grad();
  return loss.item();
}

}  // namespace

TEST_CASE("one program: forward and backward are a graph each, and name what the sharding does in them") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    manual_seed(1);
    Stack net(2);
    shard_all(net, layout);
    CompileOptions options = whole;
    options.full_graph = FullGraph::yes;
    nn::compile(net, options);
    nn::Sgd optimizer(net.parameters(), {.lr = 0.1});
    for (int i = 0; i < 3; ++i) step(net, optimizer, world.rank(), i);
    const CompileStats stats = nn::compiled_programs(net).stats();
    expect(stats.graphs == 2 && stats.hits == 2, "{} graphs, {} hits", stats.graphs, stats.hits);
    const std::string text = nn::compiled_programs(net).text();
    std::size_t at = 0;
    for (const char* mark : {"begin blocks.0", "end blocks.0", "begin blocks.1", "end blocks.1", "backward",
                             "back to end blocks.1", "back to begin blocks.1", "back to end blocks.0"}) {
      const std::size_t next = text.find(std::string("\n") + mark + "\n", at);
      expect(next != std::string::npos, "'{}' does not follow in:\n{}", mark, text);
      at = next;
    }
  });
}

TEST_CASE("one program: a backward holds no more than an eager one, also while it is traced", "[memory]") {
  enum class Calls { eager, traced, replayed };
  struct Way {
    int runs;  ///< of each block in a forward
    DType dtype;
  };
  const auto peaks = [](Calls calls, Way way) {
    std::vector<std::int64_t> all;
    run_ranks(2, [&](World& world) {
      manual_seed(1);
      Stack net(8, 64);
      net.to(way.dtype);
      net.of_block = [&](const Residual& block, Tensor x) {
        for (int run = 0; run < way.runs; ++run) x = block(x);
        return x;
      };
      shard_all(net, shard::GroupLayout::per_parameter);
      if (calls != Calls::eager) nn::compile(net, whole);
      MemoryLedger& memory = Context::current().memory();
      for (int i = 0; i < 9; ++i) {
        if (calls == Calls::traced) nn::compiled_programs(net).reset();
        const Tensor loss = mean(square(net(ones({2, 64}, {.dtype = way.dtype}))));
        world.group().barrier();
        const std::int64_t before = memory.held(DeviceType::cpu).total();
        memory.reset_peak(DeviceType::cpu);
        loss.backward();
        if (world.rank() == 0 && i > 0) all.push_back(memory.peak(DeviceType::cpu) - before);
        for (nn::Parameter p : net.parameters()) p.set_grad({});
        world.group().barrier();
      }
    });
    return all;
  };
  // Of 16 bits a parameter that is used twice has its gradient by two edges.
  for (const Way way : {Way{1, f32}, Way{2, bf16}}) {
    INFO(way.runs << " runs");
    // Gradients that a late peer still reads are held a little longer, so the least of many counts, beside
    // what eager ones hold while peers are as late.
    std::int64_t most = std::ranges::max(peaks(Calls::eager, way));
    for (const Calls calls : {Calls::traced, Calls::replayed}) {
      std::int64_t least = std::ranges::min(peaks(calls, way));
      for (int again = 0; least > most && again < 20; ++again) {
        most = std::max(most, std::ranges::max(peaks(Calls::eager, way)));
        least = std::min(least, std::ranges::min(peaks(calls, way)));
      }
      CHECK(least <= most);
    }
    // What all groups and their gradients would hold at once.
    CHECK(most < 2 * 8 * (2 * 4 * 64 * 64 + 5 * 64) * static_cast<std::int64_t>(size_of(way.dtype)));
  }
}

TEST_CASE("one program: a call that a peer broke off leaves a model that trains as if it had not been",
          "[faults]") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    const auto losses = [&](bool compiles, int fault) {
      manual_seed(1);
      Stack net;
      shard_all(net, layout);
      if (compiles) nn::compile(net, whole);
      nn::Adam optimizer(net.parameters(), {.lr = 0.02});
      const Group meeting = world.group().blocks(world.size());
      std::vector<double> all;
      for (int i = 0; i < 5; ++i) {
        if (i == fault) {
          bool heard = world.rank() == 0;
          meeting.barrier();
          if (world.rank() != 0) try {
              step(net, optimizer, world.rank(), i);
            } catch (const CollectiveError&) {
              heard = true;
            }
          expect(heard, "rank {} heard nothing", world.rank());
          optimizer.zero_grad();
        }
        // Rank 0 renews when the others have begun, or before: they hear of it within the program.
        if (i == fault) world.mesh().renew();
        all.push_back(step(net, optimizer, world.rank(), i));
      }
      return all;
    };
    const std::vector<double> eager = losses(false, -1);
    for (const int fault : {1, 3})
      expect(losses(true, fault) == eager, "other losses after a fault at {}", fault);
  });
}

TEST_CASE("one program: a forward that asks for a group, or gives it back, by its module runs in parts") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    for (const bool unshards : {true, false}) {
      const auto losses = [&](bool compiles) {
        manual_seed(1);
        Stack net;
        shard_all(net, layout);
        net.between = [&] { unshards ? shard::unshard(net.blocks[2]) : shard::reshard(net.blocks[0]); };
        if (compiles) nn::compile(net, whole);
        nn::Sgd optimizer(net.parameters(), {.lr = 0.1});
        std::vector<double> all;
        for (int i = 0; i < 4; ++i) all.push_back(step(net, optimizer, world.rank(), i));
        if (compiles) {
          const CompileStats stats = nn::compiled_programs(net).stats();
          expect(stats.eager >= 3 && stats.hits > 0, "{} eager, {} hits", stats.eager, stats.hits);
          const std::string text = nn::compiled_programs(net).text();
          expect(text.find(unshards ? "unshard is called inside" : "reshard is called inside") != text.npos,
                 "{}", text);
        }
        return all;
      };
      expect(losses(true) == losses(false), "unshards {}: other losses", unshards);
    }
  });
}

TEST_CASE("one program: sharded models below a module that is none are refused by name, and run in parts") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    manual_seed(1);
    Stack net;
    shard::fully_shard(net.blocks[1], {.layout = layout});
    const Tensor x = randn({2, 6}), before = net(x);
    CompileOptions strict = whole;
    strict.full_graph = FullGraph::yes;
    nn::compile(net, strict);
    expect_refused<StateError>([&] { net(x); }, "a Residual below begins a sharded model inside");
    world.group().barrier();
    Stack other = net.clone();
    nn::compile(other, whole);
    for (int i = 0; i < 3; ++i)
      expect(other(x).to_vector<float>() == before.to_vector<float>(), "other values");
    expect(nn::compiled_programs(other).stats().hits > 0, "no part is a program");
  });
}

namespace {

struct Outer final : nn::Layer<Outer> {
  Stack inner;
  nn::Linear head{6, 6};
  Tensor forward(const Tensor& x) const { return head(inner(x)); }
  void visit(auto&& on) {
    on("inner", inner);
    on("head", head);
  }
};

/// Comes before the model is compiled; what it gives is held until it was trained.
using Prepare = std::function<std::shared_ptr<void>(Stack&)>;

/// A new model that is trained: its losses, and its parameters in the end.
std::vector<std::vector<double>> trained(World& world, shard::GroupLayout layout, Compiles who,
                                         const Prepare& prepare, CompileOptions options = whole) {
  manual_seed(1);
  Stack net;
  shard_all(net, layout);
  const std::shared_ptr<void> held = prepare(net);
  if (compiles_here(who, world)) nn::compile(net, options);
  nn::Adam optimizer(net.parameters(), {.lr = 0.02});
  std::vector<std::vector<double>> all;
  for (int i = 0; i < 4; ++i) all.push_back({step(net, optimizer, world.rank(), i)});
  for (const auto& [name, tensor] : shard::full_state_dict(net))
    all.push_back(to(tensor, f64).to_vector<double>());
  {
    const auto scope = shard::summon_full_params(net);
  }  // no forward is under way
  return all;
}

/// `prepare` makes the same of a model, whoever compiles it.
void expect_alike(const Prepare& prepare, CompileOptions options = whole) {
  on_ranks([&](World& world, shard::GroupLayout layout) {
    const auto eager = trained(world, layout, Compiles::nobody, prepare, options);
    for (const Compiles who : somebody)
      expect(trained(world, layout, who, prepare, options) == eager, "other bits where {} compiles",
             who == Compiles::everybody ? "everybody" : "rank 0");
  });
}

}  // namespace

TEST_CASE("one program: hooks on parameters may run programs, and come in the order of an eager backward") {
  expect_alike([](Stack& net) -> std::shared_ptr<void> {
    const auto hooks = std::make_shared<std::vector<Subscription>>();
    const Compiled small = compile(
        [](std::span<const Tensor> in) -> std::vector<Tensor> { return {mul(tanh(add(in[0], 1)), 0.5)}; });
    const auto number = std::make_shared<int>(0);
    for (nn::Parameter p : net.parameters())
      hooks->push_back(register_hook(p.tensor(), [small, number](const Tensor& g) -> Tensor {
        return mul(small({g})[0], 1 + 0.1 * (++*number % 7));
      }));
    return hooks;
  });
}

TEST_CASE("one program: a block's exception that the forward catches ends the block") {
  expect_alike([](Stack& net) -> std::shared_ptr<void> {
    net.of_block = [&net](const Residual& block, const Tensor& x) -> Tensor {
      if (&block != &net.blocks[1]) return block(x);
      try {
        return block(reshape(x, {-1, 3}));
      } catch (const ShapeError&) {
        return mul(x, 2);
      }
    };
    return nullptr;
  });
}

TEST_CASE("one program: what it reads of a group and does not use is asked for as eagerly") {
  for (const CommonSubexpressions common : {CommonSubexpressions::each, CommonSubexpressions::once}) {
    CompileOptions options = whole;
    options.common_subexpressions = common;
    expect_alike(
        [](Stack& net) -> std::shared_ptr<void> {
          net.of_block = [&net](const Residual& block, const Tensor& x) {
            const Tensor unused = sum(square(net.blocks[1].in.weight.tensor()));
            const Tensor used = sum(square(net.blocks[2].out.weight.tensor()));
            return add(block(x), mul(used, 0.01));
          };
          return nullptr;
        },
        options);
  }
}

TEST_CASE("one program: a step between forward and backward is refused as eagerly, and training goes on") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    const auto losses = [&](Compiles who) {
      manual_seed(1);
      Stack net;
      shard_all(net, layout);
      if (compiles_here(who, world)) nn::compile(net, whole);
      nn::Adam optimizer(net.parameters(), {.lr = 0.02});
      std::vector<double> all;
      for (int i = 0; i < 4; ++i) {
        all.push_back(step(net, optimizer, world.rank(), i));
        const Tensor loss = mean(square(net(ones({2, 6}))));
        for (nn::Parameter p : net.parameters()) p.set_grad(zeros_like(p.local().detach()));
        optimizer.step();
        expect_refused<StateError>([&] { loss.backward(); }, "was changed in place");
        optimizer.zero_grad();
      }
      return all;
    };
    const std::vector<double> eager = losses(Compiles::nobody);
    for (const Compiles who : somebody) expect(losses(who) == eager, "other losses");
  });
}

TEST_CASE("one program: a module that ran within its model and then alone is right in both") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    const auto losses = [&](Compiles who) {
      manual_seed(1);
      Outer net;
      for (Residual& block : net.inner.blocks) shard::fully_shard(block, {.layout = layout});
      shard::fully_shard(net, {.layout = layout});
      if (compiles_here(who, world)) nn::compile(net.inner, whole);
      nn::Adam optimizer(net.parameters(), {.lr = 0.02});
      std::vector<double> all;
      for (int i = 0; i < 6; ++i) {
        const Tensor x = mul(ones({2, 6}), 0.1 * (i + 1 + world.rank()));
        const bool alone = i % 3 == 2;
        const Tensor loss = mean(square(alone ? std::as_const(net.inner)(x) : net(x)));
        loss.backward();
        optimizer.step();
        optimizer.zero_grad();
        all.push_back(loss.item());
      }
      return all;
    };
    const std::vector<double> eager = losses(Compiles::nobody);
    for (const Compiles who : somebody) expect(losses(who) == eager, "other losses");
  });
}

TEST_CASE(
    "one program: casts of its inputs and results are ops of it, and its hooks around it while observed") {
  struct Observer final : nn::ModuleObserver {
    std::vector<DType> seen;
    void before_forward(nn::Module&, std::span<Tensor* const> inputs) override {
      seen.push_back(inputs[0]->dtype());
    }
    void after_forward(nn::Module&, std::span<Tensor* const> outputs) override {
      seen.push_back(outputs[0]->dtype());
    }
  };
  on_ranks([](World& world, shard::GroupLayout layout) {
    const auto losses = [&](bool compiles) {
      manual_seed(1);
      Residual net;
      shard::fully_shard(net, {.layout = layout,
                               .mixed_precision = {.param_dtype = bf16,
                                                   .output_dtype = f32,
                                                   .cast_forward_inputs = true,
                                                   .cast_root_forward_inputs = true}});
      if (compiles) nn::compile(net, whole);
      Observer observer;
      nn::Adam optimizer(net.parameters(), {.lr = 0.02});
      std::vector<std::vector<double>> all;
      for (int i = 0; i < 6; ++i) {
        const auto observes = i < 3 ? Subscription() : net.observe(observer);
        Tensor x = mul(ones({2, 6}), 0.1 * (i + 1 + world.rank()));
        x.requires_grad_();
        const Tensor loss = mean(square(net(x)));
        loss.backward();
        all.push_back(to(x.grad(), f64).to_vector<double>());
        optimizer.step();
        optimizer.zero_grad();
        all.push_back({loss.item()});
        if (!compiles) continue;
        const CompileStats stats = nn::compiled_programs(net).stats();
        // Observed, the same sharding is done around a program of its own.
        const std::size_t ops = stats.ops[0], hooks = stats.sharding_hooks;
        const bool casts =
            nn::compiled_programs(net).text().find("cast[dtype=bf16](%x0)") != std::string::npos;
        expect(hooks == 3 && stats.eager == 0 && ops > 0, "call {}: {} hooks, {} eager", i, hooks,
               stats.eager);
        expect(stats.programs == (i < 3 ? 1u : 2u), "call {}: {} programs", i, stats.programs);
        expect(casts, "no cast of the input in:\n{}", nn::compiled_programs(net).text());
      }
      expect(observer.seen == std::vector<DType>({bf16, f32, bf16, f32, bf16, f32}), "other dtypes observed");
      return all;
    };
    const auto eager = losses(false), compiled = losses(true);
    expect(compiled == eager, "other bits");
  });
}

TEST_CASE("one program: an exception in its own forward leaves a model that trains as if it had not been") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    const auto losses = [&](bool compiles) {
      manual_seed(1);
      Stack net(2);
      shard_all(net, layout);
      if (compiles) nn::compile(net, whole);
      nn::Adam optimizer(net.parameters(), {.lr = 0.02});
      std::vector<double> all;
      for (int i = 0; i < 6; ++i) {
        if (i == 0 || i == 3) {
          // Of another size, so that it is traced.
          net.between = [] { throw std::runtime_error("by the test"); };
          bool thrown = false;
          try {
            net(ones({i + 4, 6}));
          } catch (const std::runtime_error&) {
            thrown = true;
          }
          expect(thrown, "no exception");
          net.between = {};
        }
        all.push_back(step(net, optimizer, world.rank(), i));
      }
      return all;
    };
    const std::vector<double> eager = losses(false);
    expect(losses(true) == eager, "other losses");
  });
}

TEST_CASE("one program: what asks for a group within recompute is refused by name, and runs in parts") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    for (const bool reads : {false, true}) {
      const auto make = [&](Stack& net) {
        manual_seed(1);
        net = Stack();
        shard_all(net, layout);
        net.of_block = [reads, &net](const Residual& block, const Tensor& x) {
          if (!reads) return recompute([&] { return block(x); });
          return block(recompute([&] { return mul(x, add(mean(net.blocks[2].in.bias.tensor()), 1)); }));
        };
      };
      Stack strict;
      make(strict);
      CompileOptions options = whole;
      options.full_graph = FullGraph::yes;
      nn::compile(strict, options);
      expect_refused<StateError>(
          [&] { strict(ones({2, 6})); },
          reads ? "recompute reads a group outside its module" : "a sharded module runs within recompute");
      world.group().barrier();
      const auto losses = [&](bool compiles) {
        Stack net;
        make(net);
        if (compiles) nn::compile(net, whole);
        nn::Sgd optimizer(net.parameters(), {.lr = 0.1});
        std::vector<double> all;
        for (int i = 0; i < 4; ++i) all.push_back(step(net, optimizer, world.rank(), i));
        return all;
      };
      expect(losses(true) == losses(false), "reads {}: other losses", reads);
    }
  });
}

TEST_CASE("one program: blocks that had ended when it throws do not end again") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    const auto losses = [&](Compiles who) {
      manual_seed(1);
      Stack net;
      shard_all(net, layout);
      const Tensor rows = Tensor::from<std::int64_t>({0, 1}, {2}, Device::cpu());
      net.of_block = [&](const Residual& block, const Tensor& x) {
        return block(&block == &net.blocks[2] ? index_select(x, 0, rows) : x);
      };
      if (compiles_here(who, world)) nn::compile(net, whole);
      nn::Adam optimizer(net.parameters(), {.lr = 0.02});
      std::vector<double> all;
      for (int i = 0; i < 6; ++i) {
        if (i == 3) {
          fill_(rows, 7);
          bool thrown = false;
          try {
            net(ones({2, 6}));
          } catch (const Error&) {
            thrown = true;
          }
          expect(thrown, "no exception");
          copy_(rows, Tensor::from<std::int64_t>({0, 1}, {2}, Device::cpu()));
        }
        all.push_back(step(net, optimizer, world.rank(), i));
      }
      return all;
    };
    const std::vector<double> eager = losses(Compiles::nobody);
    for (const Compiles who : somebody) expect(losses(who) == eager, "other losses");
  });
}

TEST_CASE("one program: a block that runs alone casts its input, and within a model it does not") {
  run_ranks(2, [](World& world) {
    for (const bool compiles : {false, true}) {
      Stack net(1);
      net.of_block = [](const Residual& block, const Tensor& x) {
        const Tensor wide = to(x, f32);
        return block(wide);
      };
      shard::FullyShardedDataParallel(
          net, {.mesh = world.mesh(),
                .auto_wrap = shard::wrap_classes({"Residual"}),
                .mixed_precision = {.param_dtype = bf16, .cast_root_forward_inputs = true}});
      if (compiles) nn::compile(net.blocks[0], whole);
      const Tensor x = ones({2, 6});
      const NoGrad guard;  // so that the block is called alike
      for (int i = 0; i < 3; ++i) {
        expect(std::as_const(net.blocks[0])(x).dtype() == bf16, "not cast");
        expect_refused<DTypeError>([&] { net(x); }, "must have the same dtype");
        world.group().barrier();
      }
    }
  });
  SUCCEED();
}

TEST_CASE("one program: what it reads of a group without gradients its backward does not gather") {
  expect_alike([](Stack& net) -> std::shared_ptr<void> {
    net.of_block = [&net](const Residual& block, const Tensor& x) {
      Tensor scale;
      {
        const NoGrad guard;
        if (&block == &net.blocks[0]) scale = mul(mean(net.blocks[2].in.bias.tensor()), 0.1);
      }
      return scale.defined() ? block(add(x, scale)) : block(x);
    };
    return nullptr;
  });
}

TEST_CASE("one program: what it views of a group and reads later is asked for as eagerly") {
  expect_alike([](Stack& net) -> std::shared_ptr<void> {
    const auto view = std::make_shared<Tensor>();
    net.of_block = [&net, view](const Residual& block, const Tensor& x) {
      if (&block == &net.blocks[0]) *view = transpose(net.blocks[2].in.weight.tensor(), 0, 1);
      const Tensor y = block(x);
      return &block == &net.blocks[2] ? add(y, mul(mean(std::exchange(*view, {})), 0.01)) : y;
    };
    return nullptr;
  });
}

namespace {

struct UsedTwice final : nn::Layer<UsedTwice> {
  nn::Linear of{6, 6};
  Tensor forward(const Tensor& x) const { return of(tanh(of(x))); }
  void visit(auto&& on) { on("of", of); }
};

}  // namespace

TEST_CASE(
    "one program: a block's parameters that are used more than once are reduced where the block began") {
  expect_alike([](Stack& net) -> std::shared_ptr<void> {
    net.of_block = [](const Residual& block, const Tensor& x) { return add(block(x), block(mul(x, 0.5))); };
    return nullptr;
  });
  on_ranks([](World& world, shard::GroupLayout layout) {
    const auto losses = [&](Compiles who, std::optional<DType> dtype) {
      manual_seed(1);
      nn::Sequential net(UsedTwice{}, UsedTwice{}, UsedTwice{});
      const shard::Options options{
          .layout = layout,
          .mixed_precision = {
              .param_dtype = dtype, .output_dtype = f32, .cast_forward_inputs = dtype.has_value()}};
      for (std::size_t i = 0; i < 3; ++i) shard::fully_shard(net[i], options);
      shard::fully_shard(net, options);
      std::vector<Subscription> hooks;
      for (nn::Parameter p : net.parameters())
        hooks.push_back(register_hook(p.tensor(), [](const Tensor& g) { return mul(g, 2); }));
      if (compiles_here(who, world)) nn::compile(net, whole);
      nn::Adam optimizer(net.parameters(), {.lr = 0.02});
      std::vector<double> all;
      for (int i = 0; i < 5; ++i) {
        const Tensor loss = mean(square(net(mul(ones({2, 6}), 0.1 * (i + 1 + world.rank())))));
        loss.backward();
        optimizer.step();
        optimizer.zero_grad();
        all.push_back(loss.item());
      }
      return all;
    };
    for (const std::optional<DType> dtype : {std::optional<DType>(), std::optional(bf16)}) {
      const std::vector<double> eager = losses(Compiles::nobody, dtype);
      for (const Compiles who : somebody) expect(losses(who, dtype) == eager, "other losses");
    }
  });
}
