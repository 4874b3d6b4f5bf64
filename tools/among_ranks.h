// What the ranks of a run tell each other beside gradients. Every rank of the group calls, in one order.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "collectives/group.h"

namespace sherd::tools {

/// Rank 0's argument, on every rank; that of the others is not looked at.
std::string first_ones(const Group& group, std::string bytes);

/// Of all ranks' values.
double mean(const Group& group, double value);
bool any(const Group& group, bool value);
/// All ranks' values, in rank order.
std::vector<double> everyones(const Group& group, double value);
/// `value_of` 0 to `count` - 1, each computed on one rank, on all of them. All ranks are at it equally often,
/// as those that run a sharded model must be: one without a number left repeats the last.
std::vector<double> shared_out(const Group& group, std::int64_t count,
                               const std::function<double(std::int64_t)>& value_of);

}  // namespace sherd::tools
