// Copies and sums of peers' memory, as kernels over many pieces at once: a launch costs more than a small
// piece takes. Safe to include in device code.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "runtime/forward.h"
#include "runtime/reduce_op.h"

namespace sherd::cuda {

/// Pieces of memory that one launch copies.
struct CopyTable {
  static constexpr int most = 128;
  int count = 0;
  struct {
    std::byte* to;
    const std::byte* from;
    std::int64_t bytes;
  } piece[most];
};
void launch_copies(const CopyTable& table, cudaStream_t stream);

/// Pieces that one launch combines: `sources` pointers for each, in rank order.
struct CombineTable {
  static constexpr int most = 64, most_pointers = 256;
  int sources = 0, count = 0;
  struct {
    std::byte* out;
    std::int64_t count;
  } piece[most];
  const std::byte* source[most_pointers];
  bool has_room() const { return count < most && (count + 1) * sources <= most_pointers; }
};
void launch_combine(DType dtype, ReduceOp reduction, const CombineTable& table, cudaStream_t stream);

}  // namespace sherd::cuda
