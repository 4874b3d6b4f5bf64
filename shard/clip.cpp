// The norm of gradients whose parts lie on several ranks.
#include <algorithm>

#include "nn/norm_parts.h"
#include "nn/optimizer.h"
#include "runtime/context.h"
#include "shard/fully_shard.h"
#include "shard/group.h"
#include "shard/unit.h"

namespace sherd::shard {
namespace {

/// This rank's gradients of parameters that the same ranks hold parts of; without ranks they are whole here.
struct Share {
  const Group* ranks = nullptr;
  nn::Parameter first{};  ///< by whose model the call is named
  std::vector<Tensor> gradients{};
};

/// Every group of ranks counts, also one without a gradient here: the others wait for this rank.
std::vector<Share> shares_of(std::span<const nn::Parameter> params) {
  std::vector<Share> shares(1);
  for (const nn::Parameter& p : params) {
    const Group* ranks = shard_group_of(p);
    if (ranks && ranks->size() == 1) ranks = nullptr;
    auto share = std::ranges::find_if(
        shares, [&](const Share& s) { return ranks && s.ranks ? *s.ranks == *ranks : s.ranks == ranks; });
    if (share == shares.end()) share = shares.insert(share, {ranks, p});
    if (p.owner() != nullptr) p.owner()->check_steppable(p);
    if (const Tensor g = p.grad(); g.defined()) share->gradients.push_back(g);
  }
  return shares;
}

/// `what` asks, of parameters on `device`.
Tensor norm_of(std::string_view what, const nn::NormParts& parts, std::span<const Share> shares,
               Device device) {
  Tensor all;
  for (const Share& s : shares) {
    const Tensor here = parts.of(s.gradients, device);
    if (s.ranks)
      s.ranks->all_reduce(here, parts.among_ranks(), {.label = called_of(s.first, std::string(what))});
    all = all.defined() ? parts.both(all, here) : here;
  }
  return parts.norm(all);
}

Tensor norm_of(std::string_view what, std::span<const nn::Parameter> params, double norm_type) {
  const nn::NormParts parts(what, norm_type);
  const NoGrad guard;
  write_back(what, params);
  return norm_of(what, parts, shares_of(params), params.empty() ? Device::cpu() : params[0].local().device());
}

}  // namespace

Tensor grad_norm(std::span<const nn::Parameter> params, double norm_type) {
  return norm_of("grad_norm", params, norm_type);
}

Tensor clip_grad_norm_(std::span<const nn::Parameter> params, double max_norm, double norm_type) {
  check<ValueError>(max_norm >= 0, "clip_grad_norm_: limit {} must be at least 0", max_norm);
  nn::check_listed_once("clip_grad_norm_", params);
  const Tensor norm = norm_of("clip_grad_norm_", params, norm_type);
  nn::clip_grads_with_norm_(params, max_norm, norm);
  return norm;
}

}  // namespace sherd::shard
