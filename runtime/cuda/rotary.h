// Rotary position embedding, as calls on plain pointers. Safe to include in device code.
#pragma once

#include "runtime/cuda/kernels.h"

namespace sherd::cuda {

/// Dense cosines and sines (steps, half) of `dtype`, f32 or f64; the others as in `ops::RotaryTable`.
struct RotaryTableCall {
  DType dtype = DType::f32;
  std::int64_t steps = 0, half = 0, first = 0;
  double base = 0, factor = 1, low = 0, high = 0, original = 0;
  bool by_pair = false;
  double amplitude = 1;
  void *cosines = nullptr, *sines = nullptr;
  cudaStream_t stream = nullptr;
};
void launch_rotary_table(const RotaryTableCall& call);

/// x (batch, steps, between, 2 half), of which features lie side by side; strides in elements. y is dense.
struct RotaryCall {
  DType dtype = DType::f32;
  bool neighbours = false, back = false;
  std::int64_t batch = 0, steps = 0, between = 0, half = 0;
  std::int64_t batch_stride = 0, step_stride = 0, between_stride = 0;
  const void *x = nullptr, *cosines = nullptr, *sines = nullptr;
  void* y = nullptr;
  cudaStream_t stream = nullptr;
};
void launch_rotary(const RotaryCall& call);

}  // namespace sherd::cuda
