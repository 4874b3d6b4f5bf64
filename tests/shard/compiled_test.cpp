// Modules that are compiled within sharded ones train with eager's bits, whichever ranks compile them.
#include "autograd/recompute.h"
#include "collectives/observe.h"
#include "nn/compile.h"
#include "nn/gpt.h"
#include "nn/optimizer.h"
#include "shard/fully_shard.h"
#include "shard/step_in_backward.h"
#include "tests/shard/compiles.h"
#include "tests/shard/twins.h"

using namespace sherd;
using namespace sherd::test;

namespace {

struct Block final : nn::Layer<Block> {
  nn::LayerNorm norm{6};
  nn::Linear in{6, 10}, out{10, 6};
  nn::Dropout dropout{0.1};
  Tensor forward(const Tensor& x) const { return add(x, dropout(out(gelu(in(norm(x)))))); }
  void visit(auto&& on) {
    on("norm", norm);
    on("in", in);
    on("out", out);
    on("dropout", dropout);
  }
};
struct Stack final : nn::Layer<Stack> {
  nn::ModuleList<Block> blocks;
  nn::Linear head{6, 3};
  bool recomputes = false;
  Stack() {
    for (int i = 0; i < 3; ++i) blocks.emplace_back();
  }
  Tensor forward(const Tensor& x) const {
    Tensor y = x;
    for (const auto& block : blocks) y = recomputes ? recompute([&] { return block(y); }) : block(y);
    return head(y);
  }
  void visit(auto&& on) {
    on("blocks", blocks);
    on("head", head);
  }
};

struct Way {
  const char* name;
  shard::Options options{};
  bool recomputes = false, steps_within = false, inner_part = false;
  std::optional<ManagedParameters> model{};  ///< the whole of it is compiled, split at its sharded modules
  ShardingHooks hooks = ShardingHooks::around;
  Executor executor = Executor::replay;
  MemoryBudget memory{};
};
std::vector<Way> ways() {
  std::vector<Way> all{{"plain", {}},
                       {"kept", {.reshard_after_forward = false}},
                       {"bf16", {.mixed_precision = {.param_dtype = bf16, .reduce_dtype = f32}}},
                       {"recompute", {}, true},
                       {"steps within", {}, false, true},
                       {"a part of a block", {}, false, false, true},
                       {"in parts", {}, false, false, false, ManagedParameters::guarded},
                       {"in parts, trusted", {}, false, false, false, ManagedParameters::trusted}};
  Way other = all.back();
  other.name = "in parts, trusted, evaluated in full";
  other.options = all[2].options;
  other.options.mixed_precision.evaluation = shard::Precision::full;
  all.push_back(other);
  for (const Way& whole : std::vector<Way>(all)) {
    if (whole.inner_part || whole.model == ManagedParameters::guarded) continue;
    other = whole;
    other.model = whole.model.value_or(ManagedParameters::guarded);
    other.hooks = ShardingHooks::inside;
    all.push_back(other);
  }
  for (std::size_t i = 0; i < all.size(); ++i) all[i].executor = static_cast<Executor>(i % 3);
  for (std::size_t i = 0, n = all.size(); i < n; ++i) {
    all.push_back(all[i]);
    all.back().memory = MemoryBudget::least();
  }
  return all;
}

std::vector<std::vector<double>> train(World& world, shard::GroupLayout layout, const Way& way,
                                       Compiles compiles) {
  manual_seed(1);
  Stack net;
  net.recomputes = way.recomputes;
  shard::Options options = way.options;
  options.layout = layout;
  const bool here = compiles_here(compiles, world);
  for (Block& block : net.blocks) {
    shard::fully_shard(block, options);
    if (!here || way.model) continue;
    if (way.inner_part)
      nn::compile(block.in, {.executor = way.executor, .memory = way.memory});
    else
      nn::compile(block, {.executor = way.executor, .memory = way.memory});
  }
  shard::fully_shard(net, options);
  net.head.eval();  // whose call is the same in both modes of the model
  if (here && way.model)
    nn::compile(net, {.executor = way.executor,
                      .managed_parameters = *way.model,
                      .sharding_hooks = way.hooks,
                      .memory = way.memory});
  nn::Adam optimizer(net.parameters(), {.lr = 0.02});
  std::optional<shard::StepInBackward> within;
  if (way.steps_within) within.emplace(optimizer);
  std::vector<std::vector<double>> losses;
  for (int step = 0; step < 6; ++step) {
    manual_seed(static_cast<std::uint64_t>(10 * step + world.rank()));
    const Tensor x = randn({step == 3 ? 4 : 2, 6});
    const auto loss = [&] { return mean(square(net(x))); };
    if (step == 2 && !way.steps_within) {
      const auto scope = shard::no_sync(net);
      loss().backward();
    }
    if (step == 4) {
      net.eval();
      const NoGrad guard;
      losses.push_back(to(net(x), f64).to_vector<double>());
      net.train();
    }
    const Tensor l = loss();
    l.backward();
    losses.push_back({l.item()});
    if (!way.steps_within) {
      losses.push_back({shard::clip_grad_norm_(net.parameters(), 1).item()});
      optimizer.step();
      optimizer.zero_grad();
    }
  }
  if (compiles == Compiles::everybody && way.hooks == ShardingHooks::inside) {
    const CompileStats stats = nn::compiled_programs(net).stats();
    expect(way.recomputes || (stats.hits >= 3 && stats.eager == 0), "{}, one program: {} hits, {} eager\n{}",
           way.name, stats.hits, stats.eager, nn::compiled_programs(net).text());
  } else if (compiles == Compiles::everybody && way.model) {
    const CompileStats stats = nn::compiled_programs(net).stats();
    // The three blocks and the head, the blocks in training and in evaluation, for two sizes of batch.
    expect(stats.hits > 15 && stats.eager == 0 && stats.graphs >= 12, "{}: {} hits, {} eager, {} graphs\n{}",
           way.name, stats.hits, stats.eager, stats.graphs, nn::compiled_programs(net).text());
    expect(nn::compiled_programs(net).drawings().size() == stats.graphs, "{}: a drawing a graph", way.name);
  } else if (compiles == Compiles::everybody) {
    for (Block& block : net.blocks) {
      const nn::Module& compiled = way.inner_part ? static_cast<const nn::Module&>(block.in) : block;
      const CompileStats stats = nn::compiled_programs(compiled).stats();
      expect(way.recomputes || (stats.hits > 0 && stats.eager == 0), "{}: {} hits, {} eager\n{}", way.name,
             stats.hits, stats.eager, nn::compiled_programs(compiled).text());
    }
  }
  within.reset();
  for (const auto& [name, tensor] : shard::full_state_dict(net))
    losses.push_back(to(tensor, f64).to_vector<double>());
  return losses;
}

}  // namespace

TEST_CASE("blocks that are sharded and compiled train with eager's bits, on the ranks that compile them",
          "[threads meet]") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    for (const Way& way : ways()) {
      const auto eager = train(world, layout, way, Compiles::nobody);
      for (const Compiles compiles : somebody)
        expect(train(world, layout, way, compiles) == eager, "{}{}: other bits", way.name,
               way.hooks == ShardingHooks::inside ? ", one program" : "");
    }
  });
}

TEST_CASE("a compiled module is sharded later, and a model with sharded modules below is no full graph") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    manual_seed(1);
    nn::Linear layer(4, 4), by_hand(4, 4);
    shard::fully_shard(layer, {.layout = layout});
    Stack net;
    shard::fully_shard(net.blocks[0], {.layout = layout});
    expect_refused<StateError>([&] { nn::compile(net, {.full_graph = FullGraph::yes}); },
                               "has a Block below that is sharded");
    nn::compile(net.head);
    nn::compile(net);
    expect_refused<StateError>([&] { nn::compile(net); }, "is compiled already");
    nn::compiled_programs(net).reset();
    manual_seed(1);
    nn::Linear later(4, 4);
    nn::compile(later);
    const Tensor x = ones({2, 4});
    const Tensor before = later(x);
    shard::fully_shard(later, {.layout = layout});
    for (int i = 0; i < 3; ++i) {
      const Tensor y = later(x);
      expect(y.to_vector<float>() == before.to_vector<float>(), "rank {}: other values", world.rank());
      sum(y).backward();
    }
    expect(nn::compiled_programs(later).stats().hits > 0, "no hit");
  });
}
