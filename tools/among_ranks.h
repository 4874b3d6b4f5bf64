// What the ranks of a run tell each other beside gradients. Every rank of the group calls, in one order.
#pragma once

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

}  // namespace sherd::tools
