// The norm of gradients whose parts lie on several ranks.
#include <algorithm>

#include "nn/optimizer.h"
#include "runtime/apply.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "runtime/ops/order_free_norm.h"
#include "shard/fully_shard.h"
#include "shard/group.h"
#include "shard/unit.h"

namespace sherd::shard {
namespace {

/// This rank's gradients of parameters that the same ranks hold parts of; without ranks they are whole here.
struct Share {
  const Group* ranks = nullptr;
  std::vector<Tensor> gradients;
};

/// Every group of ranks counts, also one without a gradient here: the others wait for this rank.
std::vector<Share> shares_of(std::span<const nn::Parameter> params) {
  std::vector<Share> shares(1);
  for (const nn::Parameter& p : params) {
    const Group* ranks = shard_group_of(p);
    if (ranks && ranks->size() == 1) ranks = nullptr;
    auto share = std::ranges::find_if(
        shares, [&](const Share& s) { return ranks && s.ranks ? *s.ranks == *ranks : s.ranks == ranks; });
    if (share == shares.end()) share = shares.insert(share, {ranks, {}});
    if (p.owner() != nullptr) p.owner()->check_steppable(p);
    if (const Tensor g = p.grad(); g.defined()) share->gradients.push_back(g);
  }
  return shares;
}

/// `what` asks, of parameters on `device`.
Tensor norm_of(std::string_view what, std::span<const Share> shares, Device device) {
  Tensor sum;
  for (const Share& s : shares) {
    const Tensor none = zeros({0}, {DType::f32, device});
    const Tensor here =
        apply_many(ops::SquareSums{}, s.gradients.empty() ? std::span(&none, 1) : std::span(s.gradients))[0];
    if (s.ranks) s.ranks->all_reduce(here, ReduceOp::sum(), {.label = std::string(what)});
    sum = sum.defined() ? add(sum, here) : here;
  }
  return apply(ops::NormOfSums{}, sum);
}

Tensor norm_of(std::string_view what, std::span<const nn::Parameter> params) {
  const NoGrad guard;
  write_back(what, params);
  return norm_of(what, shares_of(params), params.empty() ? Device::cpu() : params[0].local().device());
}

}  // namespace

Tensor grad_norm(std::span<const nn::Parameter> params) { return norm_of("grad_norm", params); }

Tensor clip_grad_norm_(std::span<const nn::Parameter> params, double max_norm) {
  check<ValueError>(max_norm >= 0, "clip_grad_norm_: limit {} must be at least 0", max_norm);
  const Tensor norm = norm_of("clip_grad_norm_", params);
  nn::clip_grads_with_norm_(params, max_norm, norm);
  return norm;
}

}  // namespace sherd::shard
