// Pass: what waits from one use to a later one while memory is short is made again for the later one.
#pragma once

#include <cstdint>

#include "autograd/capture/recorded.h"
#include "autograd/op_costs.h"

namespace sherd {

struct Copied {
  Recorded program;
  std::int64_t cost = 0;  ///< of the ops that run again, as `costs_of` counts
};

/// Where most is held, values that are not in use there are let go of until their next use, for which a copy
/// of the op that made them, and of those that made what it reads and is not held by then, makes them again:
/// what costs least by its bytes first, until `less` bytes less are held than before, or nothing helps. Ops
/// are copied that `late` would move and that may run again.
Copied copied_for_uses(Recorded program, const OpCosts& measured, std::int64_t less);

}  // namespace sherd
