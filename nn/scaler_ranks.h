// Which ranks a GradScaler agrees with, and what their scalers have come to.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "collectives/group.h"
#include "nn/optimizer.h"

namespace sherd::nn {

/// Who has a parameter of it, in parts or whole: each group once, whether or not a parameter has a gradient
/// here. Smaller ones first, so that after a call of each all ranks know what any one did where a group holds
/// the others or they are axes of one mesh; else in the order of the parameters, the same on all ranks.
std::vector<Group> sharers_of(const Optimizer& optimizer);
/// The same of parameters that an owner keeps, whoever sums their gradients.
std::vector<Group> owners_of(std::span<const Parameter> parameters);
/// Who is in any of the groups, in order; of axes of a mesh all ranks that these span. None where there is no
/// other rank. Smaller groups come first.
std::vector<int> ranks_in(std::span<const Group> groups);
/// As a message has them.
std::string name_of(const std::vector<int>& ranks);

/// In place: the largest of any rank's, 0-d.
void tell_all(const Tensor& found, std::span<const Group> groups);

/// What a rank's scaler has come to, or of several ranks' the one with most updates.
struct ScalerStanding {
  double updates, scale, tracker;
  double least_updates;  ///< of any of them
  bool unlike = false;
};
/// Of a group's, each with its own. Collective, and waits for it.
ScalerStanding foremost_of(const Group& group, const ScalerStanding& mine);

}  // namespace sherd::nn
