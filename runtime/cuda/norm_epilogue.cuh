// What follows a normalisation, on the elements that a thread has in registers.
#pragma once

#include "runtime/cuda/block.cuh"
#include "runtime/cuda/norm_epilogue.h"
#include "runtime/ops/relu.h"

namespace sherd::cuda {

template <int V, class T>
__device__ Raw<V, T> load_at(const void* array, std::int64_t i) {
  return Raw<V, T>::load(static_cast<const T*>(array) + i);
}
/// The same of an array that may be none.
template <int V, class T>
__device__ Raw<V, T> load_if(const void* array, std::int64_t i) {
  Raw<V, T> loaded;
  if (array != nullptr) loaded = load_at<V, T>(array, i);
  return loaded;
}

/// Results `y` of a normalisation with what follows it; each of these ops rounds, as one of its own would.
template <int V, class T>
__device__ Raw<V, T> finished(const NormEpilogue& e, Raw<V, T> y, const Raw<V, T>& residual) {
  using C = compute_t<T>;
  C value[V];
  y.widen_to(value);
  if (e.residual != nullptr) {
    C more[V];
    residual.widen_to(more);
#pragma unroll
    for (int j = 0; j < V; ++j) value[j] += more[j];
    y = Raw<V, T>::of(value);
  }
  if (!e.relu) return y;
  y.widen_to(value);
#pragma unroll
  for (int j = 0; j < V; ++j) value[j] = ops::Relu{}(value[j]);
  return Raw<V, T>::of(value);
}

/// The largest number that becomes 0 as a `T`: half of the smallest one, whose rounding goes to even.
template <class T>
__device__ constexpr compute_t<T> rounded_to_zero() {
  if constexpr (std::is_same_v<T, BFloat16>) return 0x1p-134f;
  if constexpr (std::is_same_v<T, Half>) return 0x1p-25f;
  return 0;
}

/// Makes gradients of ReLU's results `y` those of what it was taken of.
template <int V, class T, class C>
__device__ void go_through_relu(const Raw<V, T>& y, C (&gradient)[V]) {
  C result[V];
  y.widen_to(result);
#pragma unroll
  for (int j = 0; j < V; ++j) gradient[j] = ops::Relu{}.grad_a(gradient[j], result[j], result[j]);
}

/// Neighbouring elements of gy and, where ReLU made them, of y.
template <int V, class T, bool epilogue>
struct Upstream {
  Raw<V, T> gy, y;
  Upstream() = default;
  __device__ Upstream(const void* gy, const NormEpilogueGrad& e, std::int64_t i) : gy(load_at<V, T>(gy, i)) {
    if constexpr (epilogue) y = load_if<V, T>(e.y, i);
  }
  /// The gradient of the normalised values.
  template <class C>
  __device__ void widen_to(const NormEpilogueGrad& e, C (&wide)[V]) const {
    gy.widen_to(wide);
    if (epilogue && e.y != nullptr) go_through_relu(y, wide);
  }
};

}  // namespace sherd::cuda
