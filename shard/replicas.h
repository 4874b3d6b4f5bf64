// Which ranks hold a value alike by `DataParallel`: of what it averages and of what it only shares.
#pragma once

#include <optional>
#include <unordered_map>

#include "collectives/group.h"
#include "nn/module.h"

namespace sherd::shard {

/// The ranks of the object that has it, trainable or frozen, of several the one made last; none: no object
/// does.
std::optional<Group> replicas_of(const nn::Parameter& p);
/// The same of all buffers that some object has, wherever their modules are now.
std::unordered_map<const nn::Buffer*, Group> replicated_buffers();

}  // namespace sherd::shard
