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

void check_input(const Tensor& x) {
  check<DTypeError>(x.dtype() == f64, "gradcheck: inputs must be f64 for finite differences, got {}",
                    name_of(x.dtype()));
  check<DeviceError>(x.device().type != DeviceType::meta,
                     "gradcheck: an input of shape {} is on meta and has no values to vary; give it some on "
                     "another device",
                     x.shape());
}

/// Sets element `k` of a dense leaf, on the leaf's own device.
void set_element(const Tensor& leaf, std::size_t k, double value) {
  const NoGrad guard;
  fill_(alias(leaf, {{1}, {1}, static_cast<std::int64_t>(k)}), value);
}

}  // namespace

namespace {

/// Gradients of the weighted sum of what `fn` makes of `leaves`, with respect to `wanted`; empty where none
/// arrives.
std::vector<Tensor> gradients_of(const std::function<Tensor(std::span<const Tensor>)>& fn,
                                 std::span<const Tensor> leaves, std::span<const Tensor> wanted) {
  const Tensor y = fn(leaves);
  check<DTypeError>(y.dtype() == f64, "gradcheck: the output must be f64 for finite differences, got {}",
                    name_of(y.dtype()));
  return y.requires_grad() ? grad(y, wanted, weights_like(y)) : std::vector<Tensor>(wanted.size());
}

}  // namespace

double gradcheck(const std::function<Tensor(std::span<const Tensor>)>& fn, std::span<const Tensor> inputs,
                 double step) {
  std::vector<Tensor> leaves;
  for (const Tensor& x : inputs) {
    check_input(x);
    leaves.push_back(clone(x.detach()).requires_grad_());
  }
  std::vector<Tensor> gradients = gradients_of(fn, leaves, leaves);
  // Where `fn` takes an input from elsewhere (a module its parameters), that one is varied.
  std::vector<Tensor> varied = leaves;
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    if (gradients[i].defined() || !inputs[i].requires_grad() || !inputs[i].is_leaf()) continue;
    const Tensor own[] = {inputs[i]};
    gradients[i] = gradients_of(fn, leaves, own)[0];
    if (gradients[i].defined()) varied[i] = inputs[i];
  }
  double worst = 0;
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    const std::vector<double> given =
        gradients[i].defined() ? gradients[i].to_vector<double>()
                               : std::vector<double>(static_cast<std::size_t>(leaves[i].numel()), 0.0);
    const std::vector<double> values = varied[i].to_vector<double>();
    for (std::size_t k = 0; k < values.size(); ++k) {
      set_element(varied[i], k, values[k] + step);
      const double above = weighted_sum(fn(leaves));
      set_element(varied[i], k, values[k] - step);
      const double below = weighted_sum(fn(leaves));
      set_element(varied[i], k, values[k]);
      const double expected = (above - below) / (2 * step);
      const double error = std::abs(given[k] - expected) / std::max(1.0, std::abs(expected));
      worst = std::isnan(error) ? error : std::max(worst, error);
      if (std::isnan(error)) return error;
    }
  }
  return worst;
}

}  // namespace sherd
