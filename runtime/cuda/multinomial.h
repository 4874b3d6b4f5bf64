// Random draws by weight, as a call on plain pointers. Safe to include in device code.
#pragma once

#include "runtime/cuda/device_key.h"
#include "runtime/cuda/faults.h"
#include "runtime/cuda/kernels.h"

namespace sherd::cuda {

/// One place of each dense row of weights, as on the CPU; sums are in f64, so only a share that falls on the
/// last bit of one may differ. Weights below zero, infinite or NaN, rows of zeros, and rows that add up
/// to infinity are reported and give place 0.
struct MultinomialCall {
  DType dtype = DType::f32;
  DeviceKey key;
  std::int64_t rows = 0, columns = 0;
  const void* weights = nullptr;
  std::int64_t* places = nullptr;
  FaultSlot faults{};
  cudaStream_t stream = nullptr;
};
void launch_multinomial(const MultinomialCall& call);
/// `draws` places of each row, each what the call above draws for a row of its own; `running` has room for
/// the running sums of all rows.
void launch_many_draws(const MultinomialCall& call, std::int64_t draws, double* running);

}  // namespace sherd::cuda
