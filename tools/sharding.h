// How a run's model lies on its ranks.
#pragma once

#include <memory>
#include <vector>

#include "collectives/world.h"
#include "nn/gpt.h"
#include "shard/data_parallel.h"
#include "tools/train_options.h"

namespace sherd::tools {

/// Shards every block and then the rest of the model, as the options say. One rank that computes in f32 has
/// nothing to share and keeps a plain model. What it returns, if anything, lives as long as the model trains.
std::unique_ptr<shard::DataParallel> shard_model(nn::Gpt& model, const TrainOptions& options,
                                                 const World& world);
/// The same of any model with these blocks.
std::unique_ptr<shard::DataParallel> shard_model(nn::Module& model, const std::vector<nn::Module*>& blocks,
                                                 const TrainOptions& options, const World& world);

}  // namespace sherd::tools
