// Norms of gradients, and clipping them.
#include "nn/optimizer.h"
#include "runtime/apply.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "runtime/ops/order_free_norm.h"

namespace sherd::nn {
namespace {

std::vector<Tensor> gradients_of(std::span<const Parameter> params) {
  std::vector<Tensor> gradients;
  for (const Parameter& p : params)
    if (const Tensor g = p.grad(); g.defined()) gradients.push_back(g);
  return gradients;
}

Tensor norm_of(std::string_view what, std::span<const Parameter> params) {
  for (const Parameter& p : params)
    check<StateError>(p.owner() == nullptr,
                      "{}: a parameter of shape {} is sharded, so its norm is not this rank's to take; use "
                      "shard::{}",
                      what, p.shape(), what);
  const NoGrad guard;
  return order_free_norm(gradients_of(params));
}

}  // namespace

Tensor grad_norm(std::span<const Parameter> params) { return norm_of("grad_norm", params); }

Tensor clip_grad_norm_(std::span<const Parameter> params, double max_norm) {
  check<ValueError>(max_norm >= 0, "clip_grad_norm_: limit {} must be at least 0", max_norm);
  const Tensor norm = norm_of("clip_grad_norm_", params);
  clip_grads_with_norm_(params, max_norm, norm);
  return norm;
}

void clip_grads_with_norm_(std::span<const Parameter> params, double max_norm, const Tensor& norm) {
  check<ValueError>(max_norm >= 0, "clip_grads_with_norm_: limit {} must be at least 0", max_norm);
  check<ShapeError>(norm.numel() == 1, "clip_grads_with_norm_: takes the norm in one element, got shape {}",
                    norm.shape());
  for (const Parameter& p : params)
    if (p.owner() != nullptr) p.owner()->check_steppable(p);
  const NoGrad guard;
  const std::vector<Tensor> gradients = gradients_of(params);
  if (gradients.empty()) return;
  std::vector<Tensor> dense{reshape(to(to(norm.detach(), DType::f64), gradients[0].device()), {})};
  for (const Tensor& g : gradients) dense.push_back(contiguous(g));
  apply_many(ops::ClipScale{max_norm}, dense);
  for (std::size_t i = 0; i < gradients.size(); ++i)
    if (!gradients[i].is_contiguous()) copy_(gradients[i], dense[i + 1]);
}

void clip_grad_value_(std::span<const Parameter> params, double limit) {
  check<ValueError>(limit >= 0, "clip_grad_value_: limit {} must be at least 0", limit);
  for (const Parameter& p : params)
    if (p.owner() != nullptr) p.owner()->check_steppable(p);
  const NoGrad guard;
  for (const Tensor& g : gradients_of(params)) copy_(g, clamp(g, -limit, limit));
}

}  // namespace sherd::nn
