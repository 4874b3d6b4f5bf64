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

/// Where bools hold, in two calls; between them the counts become running sums.
struct PlacesCall {
  static constexpr std::int64_t chunk = 4096;  ///< elements that a block takes
  const bool* mask = nullptr;
  std::int64_t n = 0;
  std::int64_t* counts = nullptr;  ///< of the chunks
  std::int64_t* places = nullptr;
  cudaStream_t stream = nullptr;
  std::int64_t chunks() const { return blocks_of(n, chunk); }
};
void launch_count_places(const PlacesCall& call);
void launch_write_places(const PlacesCall& call);

/// x[i] = *value where mask[i]; dense, elements of `bytes`.
struct FillWhereCall {
  const bool* mask = nullptr;
  std::int64_t n = 0;
  std::int64_t bytes = 4;
  const void* value = nullptr;
  void* x = nullptr;
  cudaStream_t stream = nullptr;
};
void launch_fill_where(const FillWhereCall& call);

}  // namespace sherd::cuda
