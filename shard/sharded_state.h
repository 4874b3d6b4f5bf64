// States of sharded models and optimizers without whole tensors: every rank's own runs of their elements.
#pragma once

#include <string>
#include <vector>

#include "nn/optimizer.h"

namespace sherd::shard {

/// A run of elements that this rank has of a whole tensor.
struct ShardedTensor {
  std::string name;
  Shape shape;             ///< of the whole
  std::int64_t begin = 0;  ///< of `values`, among the whole's elements in row-major order
  Tensor values;           ///< in one dimension; empty where this rank has none
  /// Which one this rank is of those that hold the same run, and how many these are. 0: all ranks hold the
  /// whole, and rank 0's counts.
  int replica = 0, replicas = 1;
  std::int64_t steps = 0;  ///< that optimizers took of a parameter, as `steps_taken`
};
/// In the order of members.
using ShardedStateDict = std::vector<ShardedTensor>;

/// Of parameters, and saved buffers in their own dtype, what this rank has: nothing is copied or sent, values
/// share memory with the module. Names are those of `full_state_dict`. DeviceError on `meta`.
SHERD_API ShardedStateDict sharded_state_dict(nn::Module& module);
/// The same of an optimizer's state, under the names of `full_optimizer_state`; collective over the
/// parameters' groups, which agree on counts of steps.
SHERD_API ShardedStateDict sharded_optimizer_state(const nn::Optimizer& optimizer);
/// By the names of the parameters in `model` (`optimizer_state.h`).
SHERD_API ShardedStateDict sharded_optimizer_state(nn::Module& model, const nn::Optimizer& optimizer);

/// Takes this rank's part of what the ranks of `ranks` hold together: of as many ranks as `state` was made
/// on, in any layout and strategy. Collective over `ranks`; one tensor at a time is whole on every rank.
/// Of what groups of ranks hold each for itself, in meshes of several dimensions, each group takes its own.
/// ValueError where no rank has some elements, and for runs of unlike steps; other errors, and what is
/// returned, are those of `load_full_state_dict` and `load_full_optimizer_state`. Nothing is changed when it
/// throws.
SHERD_API nn::Mismatch load_sharded_state_dict(nn::Module& module, const ShardedStateDict& state,
                                               const Group& ranks, nn::Strict strict = nn::Strict::yes);
SHERD_API void load_sharded_optimizer_state(nn::Optimizer& optimizer, const ShardedStateDict& state,
                                            const Group& ranks);
SHERD_API void load_sharded_optimizer_state(nn::Module& model, nn::Optimizer& optimizer,
                                            const ShardedStateDict& state, const Group& ranks);

}  // namespace sherd::shard
