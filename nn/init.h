// How parameters start. Each writes the whole parameter, without recording, from the rank's generator.
#pragma once

#include "nn/parameter.h"

namespace sherd::nn::init {

SHERD_API void uniform_(Parameter p, double low, double high);
SHERD_API void normal_(Parameter p, double mean = 0, double stddev = 1);
SHERD_API void constant_(Parameter p, double value);
/// Uniform in +-sqrt(6 / (fan_in + fan_out)) for a matrix (out, in) (Glorot and Bengio, 2010).
SHERD_API void xavier_uniform_(Parameter p);

}  // namespace sherd::nn::init
