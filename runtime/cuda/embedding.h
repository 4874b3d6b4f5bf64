// Rows of a table by index, as calls on plain pointers. Safe to include in device code.
#pragma once

#include "runtime/cuda/faults.h"
#include "runtime/cuda/kernels.h"

namespace sherd::cuda {

/// out[i] = table[index[i]], rows of `row_bytes`. An index outside of [0, rows) is reported, and gives bytes
/// of 0xff: NaN in floating dtypes.
struct EmbeddingCall {
  std::int64_t rows = 0, row_bytes = 0, count = 0;
  const void* table = nullptr;
  const std::int64_t* index = nullptr;
  void* out = nullptr;
  FaultSlot faults{};
  cudaStream_t stream = nullptr;
};
void launch_embedding(const EmbeddingCall& call);

/// table[r] = sum of gy[i] where index[i] == r, in order of i in a tree that depends on the index alone.
/// Positions whose index is out of range take no part.
struct EmbeddingGradCall {
  DType dtype = DType::f32;
  std::int64_t rows = 0, width = 0, count = 0;
  const void* gy = nullptr;
  const std::int64_t* index = nullptr;
  void* table = nullptr;
  cudaStream_t stream = nullptr;
  /// Bytes of scratch memory; some of it is the sort's.
  std::size_t scratch_bytes() const;
  void* scratch = nullptr;
};
void launch_embedding_grad(const EmbeddingGradCall& call);

}  // namespace sherd::cuda
