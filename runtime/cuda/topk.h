// The largest elements of very long rows, as a call on plain pointers. Safe to include in device code.
#pragma once

#include "runtime/cuda/sort.h"

namespace sherd::cuda {

/// The same for rows of any length, by as many passes over them as elements are asked for.
void launch_topk(const SortCall& call);

}  // namespace sherd::cuda
