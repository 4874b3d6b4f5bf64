// Parts of a recording that run beside each other: in a step of small ops most of the device idles, and every
// op waits for the one before it in the list though few of them read what that one made.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/device_recording.h"

namespace sherd::cuda {

class DeviceState;

/// Where a part goes: behind all that its lane has, and behind parts of other lanes.
struct InLane {
  int lane = 0;
  std::vector<std::uint32_t> behind{};  ///< that nothing before it in its lane has waited for
};

/// A lane for each part. A part that uses many bytes fills the device, so it goes in lane 0 with its kind.
/// Of small ones that follow the same part, the one with the longest way to the end goes on in its lane; the
/// others go where they can begin first and hold nobody up.
std::vector<InLane> place_in_lanes(const WorkInParts& work, int lanes);

/// Gives all parts to streams of a recording that is under way on the rank's own, which has them all behind
/// it at the end.
void give_in_lanes(const WorkInParts& work, DeviceState& state);

}  // namespace sherd::cuda
