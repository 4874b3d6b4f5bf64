// Passes: functions from a program to one that does the same by other ops.
#pragma once

#include <span>
#include <string_view>

#include "autograd/capture/recorded.h"

namespace sherd {

struct Pass {
  std::string_view name;
  Recorded (*run)(Recorded program);
};

/// The passes in turn. InternalError, which names the pass, where one changed the calls among ranks: other
/// ranks, whose programs may be others, make theirs in the order of the step.
Recorded run_passes(Recorded program, std::span<const Pass> passes);

}  // namespace sherd
