// The order-free norm of lists of tensors and its clipping, as calls on plain pointers. Safe to include in
// device code. Maxima and integer sums come out the same in any order, so they meet by atomic operations.
#pragma once

#include "runtime/cuda/kernels.h"

namespace sherd::cuda {

/// Stretches of values of one dtype that one launch takes; longer lists take several.
struct ValueList {
  static constexpr int most = 96;
  /// Elements that a block takes.
  static constexpr std::int64_t chunk = 1 << 15;
  DType dtype = DType::f32;
  int count = 0;
  void* data[most];
  std::int64_t n[most];
  std::int64_t first_chunk[most + 1] = {};  ///< of each stretch, and the number of all

  bool full() const { return count == most; }
  /// The stretch that chunk `i` of all lies in: the last one that begins at or before it.
  constexpr int of_chunk(std::int64_t i) const {
    int low = 0, high = count;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (first_chunk[middle] <= i ? low : high) = middle;
    }
    return low;
  }
  void add(void* values, std::int64_t elements) {
    data[count] = values;
    n[count] = elements;
    first_chunk[count + 1] = first_chunk[count] + (elements + chunk - 1) / chunk;
    ++count;
  }
};

/// Raises *largest, which starts as 0, to the largest magnitude; NaN is above all.
void launch_largest_magnitude(const ValueList& list, double* largest, cudaStream_t stream);
/// Adds the squares to `limbs`, which start as 0, as `ExactSquares` has them.
void launch_square_sums(const ValueList& list, std::int64_t* limbs, cudaStream_t stream);
void launch_norm_of_sums(const std::int64_t* limbs, double* norm, cudaStream_t stream);
/// values *= min(1, limit / (*norm + 1e-6)).
void launch_clip_scale(const ValueList& list, double limit, const double* norm, cudaStream_t stream);

}  // namespace sherd::cuda
