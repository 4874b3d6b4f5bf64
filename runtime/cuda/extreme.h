// Largest and smallest values along an axis, as calls on plain pointers. Safe to include in device code.
#pragma once

#include "runtime/cuda/kernels.h"

namespace sherd::cuda {

/// Of a dense (outer, reduce, inner) array over its middle axis, which is not empty: the value, its first
/// place, or both. NaN wins. Of equal zeros of both signs a value without a place may be either.
struct ExtremeCall {
  DType dtype = DType::f32;
  bool largest = true;
  std::int64_t outer = 1, reduce = 1, inner = 1;
  const void* x = nullptr;
  void* values = nullptr;
  std::int64_t* places = nullptr;
  cudaStream_t stream = nullptr;
  /// Pieces that the reduced axis is cut into so that few results keep many blocks busy.
  std::int64_t pieces() const;
  /// Room for 16 bytes for each of pieces() outer inner candidates where there is more than one piece.
  void* partial = nullptr;
};
void launch_extreme(const ExtremeCall& call);

}  // namespace sherd::cuda
