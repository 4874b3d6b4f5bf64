// The steps of recurrent layers beside their products, as calls on plain pointers. Safe to include in device
// code.
#pragma once

#include "runtime/cuda/kernels.h"
#include "runtime/ops/recurrent_cells.h"

namespace sherd::cuda {

/// One step of `rows` rows of `features`; gates of a row lie one after another. Floats of `dtype` unless said
/// otherwise; `cell` members are null for cells without one.
struct CellCall {
  ops::RecurrentCell cell = ops::RecurrentCell::tanh;
  DType dtype = DType::f32;
  std::int64_t rows = 0, features = 0;
  cudaStream_t stream = nullptr;
};

struct CellStepCall : CellCall {
  const void *x = nullptr, *m = nullptr;  ///< (rows, gates features)
  ops::CellState<const void*> before{};
  ops::CellState<void*> after{};
  void* kept = nullptr;  ///< (rows, kept features)
};
void launch_cell_step(const CellStepCall& call);

struct CellGradCall : CellCall {
  /// Gradients that the caller gives of this step's state; null where there are none.
  ops::CellState<const void*> gy{};
  /// Of this state from the step after, in the dtype of sums: read and then what the state before has, unless
  /// `last`, of which nothing is read.
  ops::CellState<void*> sums{};
  bool last = false;
  const void* product = nullptr;  ///< what the step after gave through its product
  ops::CellState<const void*> after{}, before{};
  const void* kept = nullptr;
  void *gx = nullptr, *gm = nullptr;  ///< gm where it is apart
};
void launch_cell_grad(const CellGradCall& call);

/// The product that a step's gates or gradient begin with, taken by the same kernel: for small steps, whose
/// time is mostly that of a launch.
struct FusedProduct {
  const void* weight = nullptr;  ///< (gates features, features)
  const void* bias = nullptr;    ///< (gates features), of a step
  const void* given = nullptr;   ///< what the step after gives m (rows, gates features), of a gradient
  bool first = true;             ///< kernels before it may have written the weights

  /// Whether a call is small enough, and of floats that are computed in f32.
  static bool fits(const CellCall& call, std::int64_t gates);
};
/// `m` and `product` of the calls are not read.
void launch_fused_step(const CellStepCall& call, const FusedProduct& product);
void launch_fused_grad(const CellGradCall& call, const FusedProduct& product);

/// The gradients of the first state, from the sums and the product of the first step.
void launch_cell_first(const CellGradCall& call, ops::CellState<void*> first);

}  // namespace sherd::cuda
