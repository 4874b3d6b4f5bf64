// `plan_gathers`: what stays gathered and how far ahead others are, by the bytes that whole parameters may
// take.
#include "shard/gather_plan.h"

#include <algorithm>
#include <functional>

#include "autograd/autograd.h"
#include "autograd/capture/capture.h"
#include "autograd/recompute.h"
#include "collectives/observe.h"
#include "nn/compile.h"
#include "nn/optimizer.h"
#include "shard/engine.h"
#include "shard/fully_shard.h"
#include "shard/unit.h"
#include "tests/shard/compiles.h"
#include "tests/shard/twins.h"

using namespace sherd;
using namespace sherd::test;

namespace {

struct Block final : nn::Layer<Block> {
  nn::Linear in, out;
  const std::function<void()>* look = nullptr;
  explicit Block(std::int64_t inner) : in(6, inner), out(inner, 6) {}
  Tensor forward(const Tensor& x) const {
    if (look != nullptr) (*look)();
    return add(x, out(gelu(in(x))));
  }
  void visit(auto&& on) {
    on("in", in);
    on("out", out);
  }
};

/// How its forward uses the blocks.
enum class Uses { once, first_twice, recomputed, read_outside, only_read };

struct Stack final : nn::Layer<Stack> {
  nn::Linear stem{6, 6};
  nn::ModuleList<Block> blocks;
  nn::Linear head{6, 3};
  Uses uses;
  explicit Stack(Uses how = Uses::once) : uses(how) {
    for (const std::int64_t inner : {24, 12, 40, 8, 16, 30}) blocks.emplace_back(inner);
  }
  Tensor forward(const Tensor& x) const {
    Tensor y = stem(x);
    for (const Block& block : blocks) {
      if (uses == Uses::only_read && &block == &blocks[4]) {
        y = mul(y, add(mean(block.in.bias.tensor()), 1));
        continue;
      }
      if (uses == Uses::read_outside && &block == &blocks[3])
        y = mul(y, add(mean(blocks[1].in.bias.tensor()), 1));
      y = uses == Uses::recomputed && &block != &blocks[2] ? recompute([&] { return block(y); }) : block(y);
    }
    if (uses == Uses::first_twice) y = blocks[0](y);
    return head(y);
  }
  void visit(auto&& on) {
    on("stem", stem);
    on("blocks", blocks);
    on("head", head);
  }
};

/// The most bytes that whole parameters of a model took, as seen at every call among ranks, module and
/// gradient.
class Watch {
 public:
  explicit Watch(Stack& net) : net_(net) {
    for (Block& block : net.blocks) block.look = &looks_;
    for (nn::Parameter p : net.parameters())
      hooks_.push_back(register_hook(p.tensor(), [this](const Tensor&) -> Tensor {
        look();
        return {};
      }));
  }
  ~Watch() {
    for (Block& block : net_.blocks) block.look = nullptr;
  }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;
  void look() {
    std::int64_t bytes = 0;
    for (const shard::NamedUnit& u : shard::units_of(net_))
      for (const shard::Members& m : u.unit->members())
        m.group->each_gathered([&](shard::Gathered& gathered) {
          const bool whole = !gathered.is_shard_itself() && (gathered.here() || gathered.on_its_way());
          if (whole) bytes += m.group->spec().partition.gathered_numel() * size_of(gathered.dtype());
        });
    most = std::max(most, bytes);
  }
  std::int64_t most = 0;

 private:
  Stack& net_;
  std::function<void()> looks_ = [this] { look(); };
  std::vector<Subscription> hooks_;
  Interception calls_{[this](const ObservedCall& call, const Interception::Proceed& proceed) {
    look();
    proceed(call.collective);
    look();
  }};
};

struct Way {
  shard::Options options;
  Uses uses = Uses::once;
};
std::vector<Way> ways(shard::GroupLayout layout) {
  const shard::Options plain{.layout = layout};
  std::vector<Way> all{{plain},
                       {plain, Uses::first_twice},
                       {plain, Uses::recomputed},
                       {plain, Uses::read_outside},
                       {plain, Uses::only_read}};
  all.push_back({plain});
  all.back().options.backward_prefetch = shard::BackwardPrefetch::post();
  all.push_back({plain});
  all.back().options.mixed_precision.param_dtype = bf16;
  return all;
}

void shard_all(Stack& net, const shard::Options& options) {
  for (Block& block : net.blocks) shard::fully_shard(block, options);
  shard::fully_shard(net, options);
}

struct Ran {
  std::vector<float> losses{};
  std::int64_t most = 0;
  std::ptrdiff_t gathers = 0;  ///< of the last step
  shard::GatherPlan plan{};
};

bool is_gather(const std::string& call) {
  return call.find("all_gather") != call.npos && call.find("channel 2") != call.npos;
}

/// Some steps, of which the first comes before the plan; 0 bytes: without one.
Ran train(World& world, const Way& way, std::int64_t bytes, Compiles who = Compiles::nobody) {
  manual_seed(1);
  Stack net(way.uses);
  shard_all(net, way.options);
  if (compiles_here(who, world)) nn::compile(net, {.sharding_hooks = ShardingHooks::inside});
  nn::Sgd optimizer(net.parameters(), {.lr = 0.1});
  Ran ran;
  const auto step = [&](int i) {
    manual_seed(static_cast<std::uint64_t>(10 * i + world.rank()));
    const Tensor loss = mean(square(net(randn({2, 6}))));
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    ran.losses.push_back(to(loss, f32).item<float>());
  };
  step(0);
  if (bytes > 0) ran.plan = shard::plan_gathers(net, bytes);
  step(1), step(2);  // of programs the second is replayed
  Watch watch(net);
  for (int i = 3; i < 6; ++i) {
    // Reads of what stays are places of its list, and not of a training forward's, which follows none then.
    if (way.uses != Uses::read_outside) {
      const NoGrad evaluation;
      net(ones({2, 6}));
    }
    OrderLog log;
    step(i);
    ran.gathers = std::ranges::count_if(log.lines(), is_gather);
  }
  ran.most = watch.most;
  return ran;
}

}  // namespace

TEST_CASE(
    "a plan of gathers changes no number, holds what it says, and gathers less the more there is room") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    for (const Way& way : ways(layout)) {
      const Ran without = train(world, way, 0);
      const Ran all = train(world, way, 1 << 30);
      expect(all.plan.staying.size() == 6 - (way.uses == Uses::only_read ? 1 : 0), "{} stay",
             all.plan.staying.size());
      std::int64_t least = 0;
      {
        Stack net(way.uses);
        shard_all(net, way.options);
        net(ones({2, 6}));
        std::string refused;
        try {
          shard::plan_gathers(net, 1);
        } catch (const ValueError& e) {
          refused = e.what();
        }
        expect(std::sscanf(refused.c_str(), "plan_gathers: 1 bytes, where whole parameters take %ld",
                           &least) == 1,
               "refused so: '{}'", refused);
      }
      expect(least < all.plan.peak_bytes, "least {}, most {}", least, all.plan.peak_bytes);
      std::ptrdiff_t gathers = 1 << 20;
      for (int part = 0; part <= 4; ++part) {
        const std::int64_t bytes = least + (all.plan.peak_bytes - least) * part / 4;
        const Ran ran = train(world, way, bytes);
        expect(ran.losses == without.losses, "other losses with {} bytes", bytes);
        expect(ran.plan.peak_bytes <= bytes, "{} of {} bytes", ran.plan.peak_bytes, bytes);
        expect(ran.most == ran.plan.peak_bytes, "{} bytes, said to be {}", ran.most, ran.plan.peak_bytes);
        // What was gathered ahead is read without notice, and so is no place of the next forward's list.
        const bool reads = way.uses == Uses::read_outside || way.uses == Uses::only_read;
        expect(reads || ran.gathers <= gathers, "{} gathers with more room, {} before", ran.gathers, gathers);
        gathers = ran.gathers;
      }
      expect(gathers < without.gathers, "{} gathers, {} without a plan", gathers, without.gathers);
    }
  });
}

TEST_CASE("a plan of gathers is that of called and compiled steps alike, of shards with replicas too") {
  for (const bool replicas : {false, true})
    CHECK_NOTHROW(run_ranks(4, [&](World& world) {
      Way way{{.mesh = replicas ? world.mesh({2, 2}, {"replicas", "shards"}) : world.mesh()}};
      const std::int64_t all = train(world, way, 1 << 30).plan.peak_bytes;
      for (const std::int64_t bytes : {all, all * 3 / 4}) {
        const Ran eager = train(world, way, bytes);
        expect(eager.plan.peak_bytes <= bytes && !eager.plan.staying.empty(), "{} bytes of {}",
               eager.plan.peak_bytes, bytes);
        for (const Compiles who : somebody) {
          const Ran compiled = train(world, way, bytes, who);
          expect(compiled.losses == eager.losses, "other losses");
          expect(compiled.gathers == eager.gathers, "{} gathers compiled, {} called", compiled.gathers,
                 eager.gathers);
        }
      }
    }));
}

TEST_CASE("a plan of gathers counts what options keep, and what a later plan lets go of goes") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    manual_seed(1);
    Stack net;
    for (std::size_t i = 0; i < net.blocks.size(); ++i) {
      shard::Options options{.layout = layout};
      if (i == 1) options.strategy = shard::ShardingStrategy::shard_grad_op;
      if (i == 4) options.reshard_after_forward = false;
      shard::fully_shard(net.blocks[i], options);
    }
    shard::fully_shard(net, {.layout = layout});
    const auto step = [&] {
      Watch watch(net);
      for (int i = 0; i < 2; ++i) sum(net(ones({2, 6}))).backward();
      world.group().barrier();
      return watch.most;
    };
    step();
    const shard::GatherPlan all = shard::plan_gathers(net, 1 << 30);
    expect(all.staying == std::vector<std::string>{"blocks.5", "blocks.3", "blocks.2", "blocks.0"} ||
               all.staying == std::vector<std::string>{"blocks.0", "blocks.2", "blocks.3", "blocks.5"},
           "others stay");
    expect(step() == all.peak_bytes, "another peak with all");
    const shard::GatherPlan few = shard::plan_gathers(net, all.peak_bytes * 4 / 5);
    expect(few.staying.size() < all.staying.size(), "as many stay");
    expect(step() == few.peak_bytes, "another peak with less");
  });
}

TEST_CASE("a plan of gathers is refused within a step, before one, of a part, and where ranks differ") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    Stack net;
    expect_refused<StateError>([&] { shard::plan_gathers(net, 4096); }, "Stack is not sharded");
    shard_all(net, {.layout = layout});
    expect_refused<StateError>([&] { shard::plan_gathers(net, 4096); }, "has run no forward");
    {
      const NoGrad guard;
      net(ones({2, 6}));
    }
    expect_refused<StateError>([&] { shard::plan_gathers(net, 4096); }, "was one without gradients");
    {
      const GradMode some(world.rank() == 0);
      net(ones({2, 6}));
      expect_refused<StateError>([&] { shard::plan_gathers(net, 4096); },
                                 "was another one than that of rank ");
    }
    net(ones({2, 6}));
    net.blocks[1].to(f64), net.blocks[1].to(f32);
    expect_refused<StateError>([&] { shard::plan_gathers(net, 4096); },
                               "was cast, moved to a device or sharded");
    const Tensor y = net(ones({2, 6}));
    expect_refused<StateError>([&] { shard::plan_gathers(net.blocks[1], 4096); },
                               "is within a sharded model");
    expect_refused<ValueError>([&] { shard::plan_gathers(net, 100); },
                               "100 bytes, where whole parameters take");
    expect_refused<ValueError>([&] { shard::plan_gathers(net, 1 << 20 << world.rank()); },
                               fmt::format("rank 0 gives 1048576 bytes, rank {} {}; give all ranks the same",
                                           world.size() - 1, 1 << 20 << (world.size() - 1)));
    const Subscription hook = register_hook(y, [&](const Tensor&) -> Tensor {
      expect_refused<StateError>([&] { shard::plan_gathers(net, 4096); }, "is under way");
      return {};
    });
    sum(y).backward();
    const std::function<void()> within = [&] {
      expect_refused<StateError>([&] { shard::plan_gathers(net, 4096); }, "is under way");
    };
    net.blocks[0].look = &within;
    net(ones({2, 6}));
    net.blocks[0].look = nullptr;
    shard::plan_gathers(net, 1 << 20);
    world.group().barrier();
  });
}

TEST_CASE("a plan of gathers is that of captured steps") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    const auto trained = [&](bool captures, std::ptrdiff_t& gathers) {
      manual_seed(1);
      Stack net;
      shard_all(net, {.layout = layout});
      nn::Sgd optimizer(net.parameters(), {.lr = 0.1});
      const Step step = [&](std::span<const Tensor> in) {
        const Tensor loss = mean(square(net(in[0])));
        loss.backward();
        optimizer.step();
        optimizer.zero_grad();
        return std::vector{loss};
      };
      const Tensor x = full({2, 6}, 0.1 * (world.rank() + 1));
      step({&x, 1});
      shard::plan_gathers(net, 6000);
      std::vector<float> losses;
      for (int i = 0; i < 2; ++i) losses.push_back(step({&x, 1})[0].item<float>());
      std::optional<Program> program;
      if (captures) program.emplace(capture(step, {x}));  // the first of them
      losses.push_back((captures ? program->outputs() : step({&x, 1}))[0].item<float>());
      for (int i = 0; i < 3; ++i) {
        OrderLog log;
        losses.push_back((captures ? program->replay({x}) : step({&x, 1}))[0].item<float>());
        gathers = std::ranges::count_if(log.lines(), is_gather);
      }
      return losses;
    };
    std::ptrdiff_t called = 0, captured = 0;
    const std::vector<float> a = trained(false, called), b = trained(true, captured);
    expect(a == b, "other losses");
    expect(called == captured && called < 12, "{} gathers called, {} captured", called, captured);
  });
}

TEST_CASE("ranks of shards with replicas that give a plan other bytes all hear of two of them") {
  CHECK_NOTHROW(run_ranks(4, [](World& world) {
    Stack net;
    shard_all(net, {.mesh = world.mesh({2, 2}, {"replicas", "shards"})});
    const auto step = [&] { sum(net(ones({2, 6}))).backward(); };
    step();
    expect_refused<ValueError>([&] { shard::plan_gathers(net, world.rank() == 3 ? 5000 : 6000); },
                               "rank 3 gives 5000 bytes, rank ");
    expect_refused<ValueError>([&] { shard::plan_gathers(net, world.rank() == 1 ? -5 : 6000); },
                               "rank 1 gives -5 bytes, rank ");
    step();
    shard::plan_gathers(net, 6000);
    step();
  }));
}

TEST_CASE("a plan of gathers leaves gradients as they are where evaluations in full precision come between") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    for (const bool keeps_low : {false, true})
      for (const bool gradients : {false, true}) {
        const auto gradient = [&](bool plans) {
          manual_seed(1);
          Stack net;
          shard_all(net, {.layout = layout,
                          .mixed_precision = {.param_dtype = bf16,
                                              .keep_low_precision_grads = keeps_low,
                                              .cast_forward_inputs = true,
                                              .evaluation = shard::Precision::full}});
          const auto loss = [&](int i) { return mean(square(to(net(full({2, 6}, 0.1 * i)), f32))); };
          loss(1).backward();
          net.zero_grad();
          if (plans) shard::plan_gathers(net, 1 << 20);
          net.eval();
          {
            const GradMode mode(gradients);
            net(ones({2, 6}));
          }
          net.train();
          const Tensor read = to(mean(mul(net.blocks[1].in.weight.tensor(), 0.37)), f32);
          add(read, loss(2)).backward();
          world.group().barrier();
          return shard::grad_norm(net.parameters());
        };
        expect(gradient(true).item() == gradient(false).item(), "another norm, gradients {}", gradients);
      }
  });
}
