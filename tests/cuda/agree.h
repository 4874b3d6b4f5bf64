// One function on both devices: values and gradients close, and the same to the bit when the GPU repeats it.
#pragma once

#include <functional>

#include "autograd/autograd.h"
#include "tests/cuda/compare.h"

namespace sherd::test {

using Function = std::function<Tensor(std::span<const Tensor>)>;

/// Values of `fn`, then its gradients to the floating inputs for a fixed upstream gradient; no gradients
/// where the result does not depend on them.
inline std::vector<Tensor> values_and_gradients(std::vector<Tensor> inputs, const Function& fn) {
  std::vector<Tensor> leaves;
  for (Tensor& t : inputs) {
    if (!t.defined() || !is_floating(t.dtype())) continue;
    (t = t.detach()).requires_grad_();
    leaves.push_back(t);
  }
  const Tensor y = fn(inputs);
  std::vector<Tensor> all{y.detach()};
  if (!y.requires_grad()) return all;
  const Tensor upstream = to(Values(77)(y.shape(), y.dtype()), y.device());
  for (const Tensor& g : grad(y, leaves, upstream)) all.push_back(g);
  return all;
}

/// Checks `fn` at `inputs` (on the host; none stay none): relative distances of values and gradients.
inline void agree(const std::vector<Tensor>& inputs, double tolerance, const Function& fn) {
  std::vector<Tensor> moved;
  for (const Tensor& t : inputs) moved.push_back(t.defined() ? on_gpu(t) : t);
  const std::vector<Tensor> host = values_and_gradients(inputs, fn), first = values_and_gradients(moved, fn),
                            second = values_and_gradients(moved, fn);
  REQUIRE(host.size() == first.size());
  for (std::size_t i = 0; i < host.size(); ++i) {
    INFO((i == 0 ? "value" : "gradient ") << (i == 0 ? "" : std::to_string(i - 1)));
    REQUIRE(host[i].defined() == first[i].defined());
    if (!host[i].defined()) continue;
    CHECK(first[i].device() == gpu);
    CHECK(relative_distance(first[i], host[i]) <= tolerance);
    CHECK(distance_in_ulps(second[i], first[i]) == 0);
  }
}

/// What sums over rows in another order may differ by, relative: a few roundings.
inline double row_tolerance(DType dtype) { return (size_of(dtype) == 2 ? 2 : 16) * rounding(dtype); }

}  // namespace sherd::test
