// Running sums and products along rows, as calls on plain pointers. Safe to include in device code.
#pragma once

#include "runtime/cuda/kernels.h"

namespace sherd::cuda {

/// h[i] = a[i] h[i - 1] + b[i] along each dense row of `columns`, from its end if `reverse`; without `a` it
/// is all ones, without `b` it is a[0] and then zeros. Floats, in their compute dtype, rounded once, and i64.
struct RecurrenceCall {
  /// What a stretch of a row does to the h before it: h becomes factor h + sum. 16 bytes.
  static constexpr std::int64_t bytes_of_stretch = 16;
  DType dtype = DType::f32;
  bool reverse = false;
  std::int64_t rows = 0, columns = 0;
  const void *b = nullptr, *a = nullptr;
  void* h = nullptr;
  cudaStream_t stream = nullptr;
  /// Stretches that rows are cut into, so that few rows keep many blocks busy.
  std::int64_t stretches() const;
  /// Room for rows stretches() of them where there is more than one stretch.
  void* partial = nullptr;
};
void launch_recurrence(const RecurrenceCall& call);

}  // namespace sherd::cuda
