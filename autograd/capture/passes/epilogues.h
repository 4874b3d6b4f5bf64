// Pass: a small product and what is computed of each element of its result are one op.
#pragma once

#include "autograd/capture/recorded.h"

namespace sherd {

/// Joins products for which the device has a kernel that goes on with a region (`ops::takes_region`) to the
/// region, or elementwise op, that alone reads their result, at its place: where that writes none of what it
/// is given, and the product may run there.
Recorded epilogues(Recorded program);

}  // namespace sherd
