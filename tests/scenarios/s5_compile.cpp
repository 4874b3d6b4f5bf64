// S5.1: a model whose layers are units, compiled, beside the same one run eagerly.
#include "nn/compile.h"
#include "runtime/ops.h"
#include "tests/scenarios/s5_models.h"

namespace sherd::scenarios {
namespace {

struct Trained {
  TransformerWithSharedParams model = make_transformer(compute);
  nn::Adam optim;

  Trained(const Rank& rank, ShardingStrategy strategy)
      : optim(sharded(model, rank, strategy), {.lr = 1e-2}) {}
  Tensor step() {
    const Tokens tokens;
    optim.zero_grad();
    const Tensor loss = sum(model(tokens.src, tokens.tgt));
    loss.backward();
    optim.step();
    return loss;
  }

 private:
  static std::vector<nn::Parameter> sharded(TransformerWithSharedParams& model, const Rank& rank,
                                            ShardingStrategy strategy) {
    const shard::FullyShardedDataParallel wrapped(model,
                                                  {.mesh = rank.mesh,
                                                   .strategy = strategy,
                                                   .auto_wrap = wrap_layers(),
                                                   .use_orig_params = true,
                                                   .backward_prefetch = shard::BackwardPrefetch::pre()});
    return model.parameters();
  }
};

void fsdp_compile(Rank& rank, ShardingStrategy strategy, bool skip_fsdp_guards) {
  for (const Executor executor : {Executor::replay, Executor::partition, Executor::fused}) {
    Trained reference(rank, strategy), compiled(rank, strategy);
    nn::compile(compiled.model, {.executor = executor,
                                 .managed_parameters = skip_fsdp_guards ? ManagedParameters::trusted
                                                                        : ManagedParameters::guarded});
    for (int i = 0; i < 10; ++i) {
      const Tensor expected = reference.step();
      rank.check.same(compiled.step(), expected,
                      fmt::format("executor {}, loss {}", static_cast<int>(executor), i));
    }
    check_parameters(rank, reference.model, compiled.model);
    const CompileStats stats = nn::compiled_programs(compiled.model).stats();
    rank.check.eq(stats.eager, 0u, "calls that ran eagerly");
    // Whatever is called meets its program once and hits it nine times.
    rank.check.eq(stats.hits, 9 * stats.frames, "calls by programs");
    // Both halves of each of the four layers at least.
    rank.check.eq(stats.graphs >= 8, true, "forwards and backwards of the layers");
  }
}

}  // namespace

std::vector<Scenario> s5_compile() {
  const Grid grid(Axis<ShardingStrategy>{"sharding_strategy",
                                         {ShardingStrategy::full_shard, ShardingStrategy::shard_grad_op,
                                          ShardingStrategy::no_shard}},
                  Axis<bool>{"skip_fsdp_guards", {true, false}});
  return {scenario("S5.1", "test_fsdp_compile", Harness::processes, {2}, grid, fsdp_compile)};
}

}  // namespace sherd::scenarios
