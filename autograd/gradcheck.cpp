#include <algorithm>
#include <cmath>

#include "autograd/autograd.h"
#include "runtime/ops.h"

namespace sherd {
namespace {

/// Fixed weights that differ from element to element, so that a gradient in the wrong place shows.
Tensor weights_like(const Tensor& y) {
  std::vector<double> weights(static_cast<std::size_t>(y.numel()));
  for (std::size_t i = 0; i < weights.size(); ++i)
    weights[i] = 0.5 + 0.37 * static_cast<double>((i * 7 + 3) % 11);
  return Tensor::from(weights, y.shape(), y.device());
}

double weighted_sum(const Tensor& y) { return sum(mul(y, weights_like(y))).item(); }

}  // namespace

double gradcheck(const std::function<Tensor(std::span<const Tensor>)>& fn, std::span<const Tensor> inputs,
                 double step) {
  std::vector<Tensor> leaves;
  for (const Tensor& x : inputs) {
    check<DTypeError>(x.dtype() == f64, "gradcheck: inputs must be f64 for finite differences, got {}",
                      name_of(x.dtype()));
    leaves.push_back(clone(x.detach()).requires_grad_());
  }
  const Tensor y = fn(leaves);
  const std::vector<Tensor> gradients =
      y.requires_grad() ? grad(y, leaves, weights_like(y)) : std::vector<Tensor>(leaves.size());
  const NoGrad guard;
  double worst = 0;
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    const std::vector<double> given =
        gradients[i].defined() ? gradients[i].to_vector<double>()
                               : std::vector<double>(static_cast<std::size_t>(leaves[i].numel()), 0.0);
    auto* values = leaves[i].mutable_data<double>();
    for (std::size_t k = 0; k < given.size(); ++k) {
      const double x = values[k];
      values[k] = x + step;
      const double above = weighted_sum(fn(leaves));
      values[k] = x - step;
      const double below = weighted_sum(fn(leaves));
      values[k] = x;
      const double expected = (above - below) / (2 * step);
      const double error = std::abs(given[k] - expected) / std::max(1.0, std::abs(expected));
      worst = std::isnan(error) ? error : std::max(worst, error);
      if (std::isnan(error)) return error;
    }
  }
  return worst;
}

}  // namespace sherd
