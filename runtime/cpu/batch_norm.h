// Batch normalisation: statistics over everything but the channel axis.
#pragma once

#include <cstdint>

#include "runtime/dtype.h"

namespace sherd::cpu {

/// A contiguous tensor (batch, channels, inner).
struct ChannelShape {
  std::int64_t batch = 0, channels = 0, inner = 0;
};

/// Mean and variance (without Bessel's correction) of each channel. T is double, float, Half or BFloat16.
template <class T>
void channel_statistics(const T* x, ChannelShape shape, compute_t<T>* mean, compute_t<T>* variance);

/// What y and its gradient are made of; weight and bias ([channels]) may be null, and so may a residual.
template <class T>
struct BatchNorm {
  using C = compute_t<T>;
  ChannelShape shape;
  const T* x = nullptr;
  const C *weight = nullptr, *bias = nullptr, *mean = nullptr, *variance = nullptr;
  double eps = 1e-5;
  const T* residual = nullptr;
  bool relu = false;
};

/// y = (x - mean) / sqrt(variance + eps) * weight + bias, plus the residual, after ReLU if it has that;
/// rounded after each of these three, as ops of their own round.
template <class T>
void batch_norm(const BatchNorm<T>& n, T* y);

/// What a backward is given and writes beside what it is of. With `through_statistics`, mean and variance are
/// those of x and depend on it.
template <class T>
struct BatchNormGrad {
  using C = compute_t<T>;
  bool through_statistics = true;
  const T *gy = nullptr, *y = nullptr;    ///< y where ReLU made it
  T *gx = nullptr, *gresidual = nullptr;  ///< the second where it is wanted
  C *gweight = nullptr, *gbias = nullptr;
};
template <class T>
void batch_norm_backward(const BatchNorm<T>& n, const BatchNormGrad<T>& given);

}  // namespace sherd::cpu
