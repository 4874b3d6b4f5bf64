// Pass: an addition that one op alone reads is done where that op reads its parts.
#pragma once

#include "autograd/capture/recorded.h"

namespace sherd {

/// Gives ops whose device has a kernel that reads an input in two parts (`ops::in_parts`) the parts of a sum
/// in place of the sum, where nobody else reads it: gradients that meet are written and read once less.
Recorded additions(Recorded program);

}  // namespace sherd
