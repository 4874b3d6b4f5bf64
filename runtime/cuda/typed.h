// Kernels that take their op by type.
#pragma once

#include "runtime/cuda/kernels.h"

namespace sherd::cuda {

namespace detail {
template <class O>
O op_of(void (*)(const O&, Inputs, Outputs));
}  // namespace detail

/// Adds `run`, a function `(const Op&, Inputs, Outputs)`, as the kernel of its op.
template <auto run>
void add_kernel(KernelTable& table) {
  using O = decltype(detail::op_of(run));
  table.add<O>([](const void* op, Inputs in, Outputs out) { run(*static_cast<const O*>(op), in, out); });
}

}  // namespace sherd::cuda
