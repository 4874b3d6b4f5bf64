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
/// Uniform in +-sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio, 2010). For shape (out, in, ...) the fans are
/// in and out, each times the product of the further axes. ShapeError for fewer than two axes.
SHERD_API void xavier_uniform_(Parameter p);

}  // namespace sherd::nn::init
