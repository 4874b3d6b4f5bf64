// What a captured step does beside its ops.
#pragma once

#include <functional>

namespace sherd {

/// Every replay of what this rank captures now calls `again` at this place of the step: for what code around
/// the ops must know of them, such as that kept copies of a tensor are old. Nothing where nothing is
/// captured.
void repeat_in_replays(const std::function<void()>& again);

}  // namespace sherd
