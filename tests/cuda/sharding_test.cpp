// A world of one on a GPU: the engine's groups, gathers, reductions and mixed precision, without peers.
#include "collectives/world.h"
#include "nn/gpt.h"
#include "nn/optimizer.h"
#include "shard/fully_shard.h"
#include "tests/cuda/agree.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::test;

namespace {

constexpr nn::GptOptions small{.layers = 2, .heads = 4, .width = 128, .context = 32, .vocab = 256};

/// Losses of five steps, and how the model was cut.
std::vector<double> losses(const std::optional<shard::Options>& options) {
  manual_seed(3);
  nn::Gpt model(small);
  model.to(gpu);
  if (options) {
    for (nn::GptBlock& block : model.blocks) shard::fully_shard(block, *options);
    shard::fully_shard(model, *options);
  }
  nn::AdamW optimizer(model.parameters(), {.lr = 1e-2});
  const Tensor tokens = to(randint(0, 256, {4, 32}, {i64}), gpu),
               targets = to(randint(0, 256, {128}, {i64}), gpu);
  std::vector<double> all;
  for (int i = 0; i < 5; ++i) {
    const Tensor loss =
        cross_entropy(flatten(model(tokens), 0, 1), targets, {.precision = LossPrecision::wide});
    loss.backward();
    for (const nn::Parameter& p : model.parameters()) {
      CHECK(p.local().device() == gpu);
      CHECK(p.local().dtype() == f32);
    }
    shard::clip_grad_norm_(model.parameters(), 1);
    optimizer.step();
    optimizer.zero_grad();
    all.push_back(loss.item());
  }
  return all;
}

}  // namespace

TEST_CASE(
    "cuda: a world of one trains sharded to the bits of the plain model, in every layout and strategy") {
  if (no_gpu()) return;
  run_ranks(1, [](World& world) {
    const std::vector<double> plain = losses({});
    CHECK(plain.back() < plain.front());
    for (const auto layout : {shard::GroupLayout::flat, shard::GroupLayout::per_parameter})
      for (const auto strategy : {shard::ShardingStrategy::full_shard, shard::ShardingStrategy::shard_grad_op,
                                  shard::ShardingStrategy::zero1, shard::ShardingStrategy::no_shard}) {
        INFO("layout " << static_cast<int>(layout) << " strategy " << static_cast<int>(strategy));
        CHECK(losses(shard::Options{.mesh = world.mesh(), .layout = layout, .strategy = strategy}) == plain);
      }
  });
}

TEST_CASE("cuda: a world of one computes in halves over f32 masters") {
  if (no_gpu()) return;
  run_ranks(1, [](World& world) {
    const std::vector<double> plain = losses({});
    for (const DType dtype : {bf16, f16})
      for (const auto layout : {shard::GroupLayout::flat, shard::GroupLayout::per_parameter}) {
        INFO(name_of(dtype));
        const std::vector<double> mixed = losses(shard::Options{
            .mesh = world.mesh(), .layout = layout, .mixed_precision = {.param_dtype = dtype}});
        for (std::size_t i = 0; i < plain.size(); ++i) CHECK(std::abs(mixed[i] - plain[i]) < 0.05 * plain[i]);
        CHECK(mixed != plain);
      }
  });
}

TEST_CASE("cuda: tensors on a GPU do not travel between ranks, and are refused by name") {
  if (no_gpu()) return;
  run_ranks(2, [](World& world) {
    const Tensor x = ones({4}, {f32, gpu});
    CHECK(one_line_about(
        message_of<NotImplementedError>([&] { world.group().all_reduce(x, ReduceOp::average(), {}); }),
        "cuda:0"));
  });
}
