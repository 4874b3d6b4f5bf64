#include "nn/init.h"

#include <cmath>

#include "runtime/context.h"
#include "runtime/ops.h"

namespace sherd::nn::init {

namespace {

/// Fills the whole parameter; of one that is shared among ranks this rank keeps its part, so that all draw
/// the same numbers.
template <class Fill>
void give_values(const Parameter& p, const Fill& fill) {
  const NoGrad guard;
  if (p.owner() == nullptr) return fill(p.data());
  const Tensor whole = empty(p.shape(), {p.local().dtype(), p.local().device()});
  fill(whole);
  p.owner()->set_whole(p, whole);
}

}  // namespace

void uniform_(Parameter p, double low, double high) {
  give_values(p, [&](const Tensor& t) { sherd::uniform_(t, low, high); });
}
void normal_(Parameter p, double mean, double stddev) {
  give_values(p, [&](const Tensor& t) { sherd::normal_(t, mean, stddev); });
}
void constant_(Parameter p, double value) {
  give_values(p, [&](const Tensor& t) { fill_(t, value); });
}
void xavier_uniform_(Parameter p) {
  check<ShapeError>(p.shape().rank() >= 2, "xavier_uniform_: needs a matrix (out, in, ...), got shape {}",
                    p.shape());
  const std::int64_t field = p.numel() / (p.shape()[0] * p.shape()[1]);
  const double bound = std::sqrt(6.0 / static_cast<double>((p.shape()[0] + p.shape()[1]) * field));
  uniform_(std::move(p), -bound, bound);
}

}  // namespace sherd::nn::init
