// Values of one rank for all ranks.
#pragma once

#include <vector>

#include "collectives/group.h"

namespace sherd::shard {

/// The values of rank `source` to all, into the tensors as they lie: one call for each dtype and device, in
/// the order of their first tensor. What is listed twice, as the buffers of a module that two others share
/// are, goes once.
void share(std::vector<Tensor> tensors, const Group& group, const CallOptions& options, int source = 0);

}  // namespace sherd::shard
