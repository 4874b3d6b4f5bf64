// Norms of gradients, and clipping them.
#include <cmath>
#include <unordered_set>

#include "autograd/node.h"
#include "nn/norm_parts.h"
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

Tensor norm_of(std::string_view what, std::span<const Parameter> params, double norm_type) {
  for (const Parameter& p : params)
    check<StateError>(p.owner() == nullptr,
                      "{}: a parameter of shape {} is sharded, so its norm is not this rank's to take; use "
                      "shard::{}",
                      what, p.shape(), what);
  const NoGrad guard;
  const std::vector<Tensor> gradients = gradients_of(params);
  const NormParts parts(what, norm_type);
  return parts.norm(parts.of(gradients, gradients.empty() ? Device::cpu() : gradients[0].device()));
}

}  // namespace

NormParts::NormParts(std::string_view call, double order) : order_(order) {
  check<ValueError>(order > 0, "{}: a norm of order {}; it is above 0, as 2, 1 or INFINITY", call, order);
}

Tensor NormParts::of(std::span<const Tensor> gradients, Device device) const {
  if (order_ == 2 || std::isinf(order_)) {
    const Tensor none = zeros({0}, {DType::f32, device});
    const std::span<const Tensor> all = gradients.empty() ? std::span(&none, 1) : gradients;
    return (order_ == 2 ? apply_many(ops::SquareSums{}, all) : apply_many(ops::LargestMagnitude{}, all))[0];
  }
  Tensor total = zeros({}, {DType::f64, device});
  for (const Tensor& g : gradients) {
    const Tensor size = abs(to(g, DType::f64));
    total = add(total, sum(order_ == 1 ? size : pow(size, order_)));
  }
  return total;
}

Tensor NormParts::both(const Tensor& a, const Tensor& b) const {
  return std::isinf(order_) ? maximum(a, b) : add(a, b);
}

ReduceOp NormParts::among_ranks() const { return std::isinf(order_) ? ReduceOp::max() : ReduceOp::sum(); }

Tensor NormParts::norm(const Tensor& parts) const {
  if (order_ == 2) return apply(ops::NormOfSums{}, parts);
  return order_ == 1 || std::isinf(order_) ? parts : pow(parts, 1 / order_);
}

void note_scaled(std::span<const Parameter> params) {
  std::vector<Tensor> leaves;
  for (const Parameter& p : params) leaves.push_back(p.local());
  note_scaled_gradients(leaves);
}

void check_listed_once(std::string_view call, std::span<const Parameter> params) {
  std::unordered_set<const void*> seen;
  for (const Parameter& p : params)
    check<ValueError>(!p.defined() || seen.insert(p.id()).second,
                      "{}: a parameter of shape {} is listed twice, and its gradient would be scaled twice; "
                      "list it once",
                      call, p.shape());
}

Tensor grad_norm(std::span<const Parameter> params, double norm_type) {
  return norm_of("grad_norm", params, norm_type);
}

Tensor clip_grad_norm_(std::span<const Parameter> params, double max_norm, double norm_type) {
  check<ValueError>(max_norm >= 0, "clip_grad_norm_: limit {} must be at least 0", max_norm);
  check_listed_once("clip_grad_norm_", params);
  const Tensor norm = norm_of("clip_grad_norm_", params, norm_type);
  clip_grads_with_norm_(params, max_norm, norm);
  return norm;
}

void clip_grads_with_norm_(std::span<const Parameter> params, double max_norm, const Tensor& norm) {
  check<ValueError>(max_norm >= 0, "clip_grads_with_norm_: limit {} must be at least 0", max_norm);
  check_listed_once("clip_grads_with_norm_", params);
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
  note_scaled(params);
}

void clip_grad_value_(std::span<const Parameter> params, double limit) {
  check<ValueError>(limit >= 0, "clip_grad_value_: limit {} must be at least 0", limit);
  for (const Parameter& p : params)
    if (p.owner() != nullptr) p.owner()->check_steppable(p);
  const NoGrad guard;
  for (const Tensor& g : gradients_of(params)) copy_(g, clamp(g, -limit, limit));
  note_scaled(params);
}

}  // namespace sherd::nn
