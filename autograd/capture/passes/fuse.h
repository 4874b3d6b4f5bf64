// The pass that makes one op of several.
#pragma once

#include "autograd/capture/recorded.h"

namespace sherd {

/// The program with elementwise ops, casts, sums of rows and sums of the columns of what they make, over one
/// space of rows and columns, run together (`ops::FusedRegion`), where the device has a kernel for that: to
/// the bit the same, with what nobody else reads never stored. A region takes ops in their order, and runs
/// where the last of them stood; it ends before an op that reads what it writes or writes what it uses, at
/// calls among ranks and at places where owners of memory do something.
Recorded fuse(Recorded program);

}  // namespace sherd
