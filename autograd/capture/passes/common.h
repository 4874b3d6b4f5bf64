// The pass that computes once what is the same.
#pragma once

#include "autograd/capture/recorded.h"

namespace sherd {

/// Common-subexpression elimination: of two ops that are equal (`==` and as text, since 0 is -0), with equal
/// inputs and precision, the first one's results serve for both, where no op writes the inputs between them,
/// and none the results of either after it. Never ops that write or draw random numbers, nor calls among
/// ranks; and no two results of which the caller gets one and keeps or gets the other, since it may write it.
Recorded common(Recorded program);

}  // namespace sherd
