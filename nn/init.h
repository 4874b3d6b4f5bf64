// First values of parameters. Each call writes all values of `Parameter::data()`, unrecorded; random ones
// come from the rank's generator. StateError for an empty parameter.
// Of a sharded parameter each rank keeps its part of the whole, so ranks that draw alike get the values of an
// unsharded one; ValueError for a flat one, which is many.
#pragma once

#include "nn/parameter.h"

namespace sherd::nn::init {

/// Uniform in [low, high).
SHERD_API void uniform_(Parameter p, double low, double high);
/// Normal with this mean and standard deviation.
SHERD_API void normal_(Parameter p, double mean = 0, double stddev = 1);
/// `value` everywhere.
SHERD_API void constant_(Parameter p, double value);

// For shape (out, in, ...) fan_in and fan_out are in and out, each times the product of the further axes;
// what needs them throws ShapeError for fewer than two axes.

/// Uniform in +-gain sqrt(6 / (fan_in + fan_out)), and normal with that variance (Glorot and Bengio, 2010).
SHERD_API void xavier_uniform_(Parameter p, double gain = 1);
SHERD_API void xavier_normal_(Parameter p, double gain = 1);

/// What follows a layer.
enum class Nonlinearity { linear, sigmoid, tanh, relu, leaky_relu, selu };
/// By what weights are larger before it, so that variances stay: 1, 1, 5/3, sqrt(2), sqrt(2 / (1 + slope^2))
/// for a leaky ReLU of this slope, 3/4.
SHERD_API double calculate_gain(Nonlinearity nonlinearity, double slope = 0.01);
/// Whose variance stays: that of the forward (`in`), or of the backward.
enum class Fan { in, out };
struct KaimingOptions {
  Nonlinearity nonlinearity = Nonlinearity::leaky_relu;
  double slope = 0;  ///< of a leaky ReLU
  Fan mode = Fan::in;
};
/// Normal with the standard deviation gain / sqrt(fan), and uniform with that variance (He et al., 2015).
SHERD_API void kaiming_normal_(Parameter p, KaimingOptions options = {});
SHERD_API void kaiming_uniform_(Parameter p, KaimingOptions options = {});

/// Normal, without what lies outside [low, high]. ValueError for a deviation that is not positive, and for an
/// interval that begins more than 5.6 deviations from the mean.
SHERD_API void trunc_normal_(Parameter p, double mean = 0, double stddev = 1, double low = -2,
                             double high = 2);
/// `gain` times a random matrix (out, the further axes as one) of orthonormal rows, or columns if there are
/// fewer (Saxe et al., 2013). ShapeError for fewer than two axes.
SHERD_API void orthogonal_(Parameter p, double gain = 1);

}  // namespace sherd::nn::init
