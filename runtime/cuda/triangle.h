// One side of a diagonal, as a call on plain pointers. Safe to include in device code.
#pragma once

#include "runtime/cuda/kernels.h"

namespace sherd::cuda {

/// Dense matrices of `bytes` an element: those whose column - row is at most `offset`, or at least where not
/// `lower`; zeros elsewhere.
struct TriangleCall {
  std::int64_t n = 0, rows = 0, columns = 0, offset = 0;
  bool lower = true;
  std::int64_t bytes = 4;
  const void* x = nullptr;
  void* y = nullptr;
  cudaStream_t stream = nullptr;
};
void launch_triangle(const TriangleCall& call);

}  // namespace sherd::cuda
