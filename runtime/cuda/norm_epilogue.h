// What follows a normalisation in its kernels, where ops of their own would read and write everything again.
// Safe to include in device code.
#pragma once

namespace sherd::cuda {

/// Arrays are as x.
struct NormEpilogue {
  const void* residual = nullptr;  ///< added, if there is one
  bool relu = false;

  bool any() const { return residual != nullptr || relu; }
};

/// The same in a backward.
struct NormEpilogueGrad {
  const void* y = nullptr;   ///< the results, where ReLU made them
  void* residual = nullptr;  ///< where the residual's gradient goes, if it is wanted and there is a y
  bool y_again = false;      ///< the results may be made again as the forward did, in place of being read

  bool any() const { return y != nullptr; }
};

/// What is left to do when sums have been taken: where the residual's gradient was written, that is gy now,
/// and y need not be read again.
template <class Call>
Call after_sums(Call g) {
  if (g.epilogue.residual != nullptr) g.gy = g.epilogue.residual, g.epilogue = {};
  return g;
}

/// Calls `body.operator()<epilogue>()`.
template <class F>
void with_epilogue(bool epilogue, F&& body) {
  if (epilogue)
    body.template operator()<true>();
  else
    body.template operator()<false>();
}

}  // namespace sherd::cuda
