#include "tools/sharding.h"

#include "shard/fully_shard.h"

namespace sherd::tools {
namespace {

using shard::ShardingStrategy;

ShardingStrategy strategy_of(const TrainOptions& o) {
  return o.strategy == "shard_grad_op" ? ShardingStrategy::shard_grad_op
         : o.strategy == "zero1"       ? ShardingStrategy::zero1
         : o.strategy == "no_shard"    ? ShardingStrategy::no_shard
                                       : ShardingStrategy::full_shard;
}

shard::MixedPrecisionPolicy precision_of(const TrainOptions& o) {
  const DType param = dtype_named(o.param_dtype), reduce = dtype_named(o.reduce_dtype);
  if (param == f32 && reduce == f32) return {};
  return {.param_dtype = param, .reduce_dtype = reduce};
}

}  // namespace

std::unique_ptr<shard::DataParallel> shard_model(nn::Gpt& model, const TrainOptions& o, const World& world) {
  std::vector<nn::Module*> blocks;
  for (nn::GptBlock& block : model.blocks) blocks.push_back(&block);
  return shard_model(model, blocks, o, world);
}

std::unique_ptr<shard::DataParallel> shard_model(nn::Module& model, const std::vector<nn::Module*>& blocks,
                                                 const TrainOptions& o, const World& world) {
  const shard::MixedPrecisionPolicy precision = precision_of(o);
  if (world.size() == 1 && !precision.param_dtype) return {};
  if (o.strategy == "data_parallel") return std::make_unique<shard::DataParallel>(model, world.group());
  shard::Options options{
      .mesh = world.mesh(),
      .layout = o.layout == "flat" ? shard::GroupLayout::flat : shard::GroupLayout::per_parameter,
      .strategy = strategy_of(o),
      .reshard_after_forward = reshard_of(o),
      .mixed_precision = precision,
  };
  for (nn::Module* block : blocks) shard::fully_shard(*block, options);
  shard::fully_shard(model, options);
  return {};
}

}  // namespace sherd::tools
