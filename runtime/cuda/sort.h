// The largest elements of rows in order, as a call on plain pointers. Safe to include in device code.
#pragma once

#include "runtime/cuda/kernels.h"

namespace sherd::cuda {

/// Dense rows of at most 2^31 columns; the `k` largest of each and their places, largest first, NaN before
/// all, equal ones by place.
struct SortCall {
  DType dtype = DType::f32;
  std::int64_t rows = 0, columns = 0, k = 0;
  const void* x = nullptr;
  void* values = nullptr;
  std::int64_t* places = nullptr;
  cudaStream_t stream = nullptr;
  void* scratch = nullptr;  ///< `scratch_bytes()`, aligned to 256

  std::int64_t scratch_bytes() const;
  /// Whether elements are 16-bit floats, whose keys and places fit one word, and rows fit a block.
  bool in_words() const;
  /// Whether a block finds the few that are asked for in a row, of at most four bytes each.
  bool selects() const;
};
void launch_sort(const SortCall& call);
void launch_sort_words(const SortCall& call);
void launch_select(const SortCall& call);

/// Keys, and the number that goes along with each.
template <class Key>
struct Pairs {
  Key* keys;
  std::uint32_t* places;
};
/// Sorts `n` < 2^32 pairs by bits [0, bits) of their keys, stably, from pairs[0] to pairs[0]: both are room
/// for as many, and change their places. `room` has `sort_pairs_bytes(n)`.
std::size_t sort_pairs_bytes(std::int64_t n);
void launch_sort_pairs(Pairs<std::uint32_t> (&pairs)[2], std::int64_t n, int bits, void* room,
                       cudaStream_t stream);

}  // namespace sherd::cuda
