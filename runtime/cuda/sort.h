// Rows in order, as a call on plain pointers. Safe to include in device code.
#pragma once

#include <cstdint>

#include "runtime/cuda/topk.h"

namespace sherd::cuda {

/// What `TopKCall` asks for where `k` is large: whole rows are sorted. At most 2^31 columns.
struct SortCall {
  TopKCall rows;
  void* scratch = nullptr;  ///< `scratch_bytes()`, aligned to 8

  /// Columns with padding to a power of two.
  std::int64_t padded() const {
    std::int64_t n = 2;
    while (n < rows.columns) n *= 2;
    return n;
  }
  std::int64_t scratch_bytes() const { return rows.rows * padded() * 12; }
};
void launch_sort(const SortCall& call);

}  // namespace sherd::cuda
