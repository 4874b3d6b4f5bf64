#include "nn/init.h"

#include <cmath>

#include "runtime/context.h"
#include "runtime/ops.h"

namespace sherd::nn::init {

void uniform_(Parameter p, double low, double high) {
  const NoGrad guard;
  sherd::uniform_(p.data(), low, high);
}
void normal_(Parameter p, double mean, double stddev) {
  const NoGrad guard;
  sherd::normal_(p.data(), mean, stddev);
}
void constant_(Parameter p, double value) {
  const NoGrad guard;
  fill_(p.data(), value);
}
void xavier_uniform_(Parameter p) {
  check<ShapeError>(p.shape().rank() >= 2, "xavier_uniform_: needs a matrix (out, in, ...), got shape {}",
                    p.shape());
  const std::int64_t field = p.numel() / (p.shape()[0] * p.shape()[1]);
  const double bound = std::sqrt(6.0 / static_cast<double>((p.shape()[0] + p.shape()[1]) * field));
  uniform_(std::move(p), -bound, bound);
}

}  // namespace sherd::nn::init
