// Which ranks hold a value alike by `DataParallel`: of what it averages and of what it only shares.
#pragma once

#include <optional>

#include "collectives/group.h"
#include "nn/module.h"

namespace sherd::shard {

/// The ranks of the object that has it, trainable or frozen, of several the one made last; none: no object
/// does.
std::optional<Group> replicas_of(const nn::Parameter& p);
/// The same of a buffer, wherever its module is now.
std::optional<Group> replicas_of(const nn::Buffer& buffer);

}  // namespace sherd::shard
