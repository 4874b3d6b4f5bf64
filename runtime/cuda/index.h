// Places where bools hold, and elements written by a mask, as calls on plain pointers. Safe to include in
// device code.
#pragma once

#include <cstdint>

#include "runtime/cuda/kernels.h"

namespace sherd::cuda {

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
