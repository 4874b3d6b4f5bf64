// Picks along the last axis and their inverse, as calls on plain pointers. Safe to include in device code.
#pragma once

#include "runtime/cuda/faults.h"
#include "runtime/cuda/kernels.h"

namespace sherd::cuda {

/// Dense rows: `picks` positions of each row of `columns` elements.
struct PickCall {
  DType dtype = DType::f32;
  std::int64_t rows = 0, columns = 0, picks = 0;
  const void* x = nullptr;
  const std::int64_t* index = nullptr;
  void* y = nullptr;
  FaultSlot faults{};
  cudaStream_t stream = nullptr;
};
/// y[row, j] = x[row, index[row, j]]. A position out of range is reported, and gives bytes of 0xff: NaN in
/// floating dtypes.
void launch_gather(const PickCall& call);
/// The same of (outer, columns, inner) and (outer, picks, inner): `rows` are outer.
void launch_gather_along(const PickCall& call, std::int64_t inner);
/// y[row, index[row, j]] += x[row, j] in order of j, rounding after each; y is zero before.
void launch_scatter(const PickCall& call);
/// y[outer, index[outer, j, inner], inner] = x[outer, j, inner] for positions that differ along each line.
void launch_scatter_apart(const PickCall& call, std::int64_t inner);

}  // namespace sherd::cuda
