// Writing rows by their numbers, as a call on plain pointers. Safe to include in device code.
#pragma once

#include <cstdint>

#include "runtime/cuda/faults.h"
#include "runtime/cuda/kernels.h"

namespace sherd::cuda {

/// Row index[i] of a dense table becomes row i of `values`; of equal ones the last counts.
struct WriteRowsCall {
  std::int64_t rows = 0, row_bytes = 0, count = 0;
  const std::int64_t* index = nullptr;
  const void* values = nullptr;
  void* table = nullptr;
  long long* last = nullptr;  ///< one for each row, all -1
  FaultSlot faults;
  cudaStream_t stream = nullptr;
};
void launch_write_rows(const WriteRowsCall& call);

}  // namespace sherd::cuda
