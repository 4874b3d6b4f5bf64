// The norm of gradients whose parts lie on several ranks.
#include <algorithm>

#include "nn/optimizer.h"
#include "runtime/apply.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "runtime/ops/optimizer_steps.h"
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

void combine(std::string_view what, std::span<const Share> shares, std::span<const Tensor> parts,
             ReduceOp reduction) {
  for (std::size_t i = 0; i < shares.size(); ++i)
    if (shares[i].ranks) shares[i].ranks->all_reduce(parts[i], reduction, {.label = std::string(what)});
}

/// `what` asks, of parameters on `device`.
Tensor norm_of(std::string_view what, std::span<const Share> shares, Device device) {
  std::vector<Tensor> largest, sums;
  for (const Share& s : shares)
    largest.push_back(s.gradients.empty() ? zeros({}, {DType::f64, device})
                                          : apply_many(ops::LargestMagnitude{}, s.gradients)[0]);
  combine(what, shares, largest, ReduceOp::max());
  const Tensor of_all = apply_many(ops::LargestMagnitude{}, largest)[0];

  for (const Share& s : shares) {
    std::vector<Tensor> list{of_all};
    list.insert(list.end(), s.gradients.begin(), s.gradients.end());
    sums.push_back(apply_many(ops::SquareSums{}, list)[0]);
  }
  combine(what, shares, sums, ReduceOp::sum());
  for (std::size_t i = 1; i < sums.size(); ++i) sums[0] = add(sums[0], sums[i]);
  return apply(ops::NormOfSums{}, sums[0], of_all);
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
