// From shards to whole values and back.
#include <algorithm>
#include <unordered_map>

#include "runtime/context.h"
#include "runtime/ops.h"
#include "shard/build.h"
#include "shard/fully_shard.h"
#include "shard/unit.h"

namespace sherd::shard {
namespace {

const Unit* host_of(const nn::Parameter& p) { return dynamic_cast<const Unit*>(p.host()); }

/// This rank's elements of a whole tensor, in one dimension; a view where it can be.
Tensor elements_of(const GroupSpec& spec, std::size_t i, const Tensor& whole) {
  const OwnedPart part = spec.layout.part(static_cast<int>(i), spec.ranks.shard_rank());
  return narrow(reshape(whole, {-1}), 0, part.numel == 0 ? 0 : part.in_parameter, part.numel);
}

}  // namespace

const Group* shard_group_of(const nn::Parameter& p) {
  const Unit* unit = host_of(p);
  if (unit == nullptr || unit->members().empty()) return nullptr;
  const Group& group = unit->members()[0].group->spec().ranks.shard;
  return group.defined() ? &group : nullptr;
}

Tensor gather_whole(const nn::Parameter& p, const Tensor& part) {
  const NoGrad guard;
  const Group* group = shard_group_of(p);
  check<ShapeError>(part.shape() == p.local().shape(),
                    "gather_whole: the part has shape {}, the parameter's is {}", part.shape(),
                    p.local().shape());
  if (group == nullptr) return clone(part);
  const auto [members, index] = host_of(p)->place(p);
  const GroupLayout& layout = members->group->spec().layout;
  std::int64_t longest = 0;
  for (int rank = 0; rank < layout.ranks(); ++rank)
    longest = std::max(longest, layout.part(static_cast<int>(index), rank).numel);
  const TensorOptions like{part.dtype(), part.device()};
  const Tensor mine = zeros({longest}, like), all = empty({longest * layout.ranks()}, like);
  copy_(narrow(mine, 0, 0, part.numel()), reshape(part, {-1}));
  group->all_gather(all, mine, {.label = "whole values", .channel = gather_channel});
  const Tensor whole = empty({p.numel()}, like);
  for (int rank = 0; rank < layout.ranks(); ++rank) {
    const OwnedPart owned = layout.part(static_cast<int>(index), rank);
    if (owned.numel > 0)
      copy_(narrow(whole, 0, owned.in_parameter, owned.numel), narrow(all, 0, rank * longest, owned.numel));
  }
  return reshape(whole, members->group->spec().shapes[index]);
}

Tensor part_of(const nn::Parameter& p, const Tensor& whole) {
  const NoGrad guard;
  if (shard_group_of(p) == nullptr) return clone(whole);
  const auto [members, index] = host_of(p)->place(p);
  const GroupSpec& spec = members->group->spec();
  check<ShapeError>(whole.shape() == spec.shapes[index], "part_of: the tensor has shape {}, the parameter {}",
                    whole.shape(), spec.shapes[index]);
  return reshape(clone(elements_of(spec, index, whole)), p.local().shape());
}

nn::StateDict full_state_dict(nn::Module& module) {
  const NoGrad guard;
  nn::StateDict state;
  const Found found = find_members(module);
  for (const FoundParameter& p : found.parameters)
    state.emplace_back(p.name, gather_whole(p.member->object(), p.member->local().detach()));
  for (const FoundBuffer& b : found.buffers)
    if (b.member->persistence() == nn::Persistence::saved)
      state.emplace_back(b.name, clone(b.member->tensor()));
  return state;
}

void load_full_state_dict(nn::Module& module, const nn::StateDict& state) {
  const std::unordered_map<std::string, Tensor> given(state.begin(), state.end());
  std::size_t used = 0;
  const auto find = [&](const std::string& name, const Shape& shape) {
    const auto at = given.find(name);
    check<ValueError>(at != given.end(), "load_full_state_dict: the state lacks '{}'", name);
    check<ShapeError>(at->second.shape() == shape,
                      "load_full_state_dict: '{}' has shape {} in the module and {} in the state", name,
                      shape, at->second.shape());
    ++used;
    return at->second;
  };
  const NoGrad guard;
  const Found found = find_members(module);
  std::vector<std::pair<Tensor, Tensor>> copies;  // into, from: all are checked before the first is made
  for (const FoundParameter& p : found.parameters) {
    const nn::Parameter& object = p.member->object();
    copies.emplace_back(object.local().detach(), part_of(object, find(p.name, object.shape())));
  }
  for (const FoundBuffer& b : found.buffers)
    if (b.member->persistence() == nn::Persistence::saved)
      copies.emplace_back(b.member->tensor(), find(b.name, b.member->tensor().shape()));
  check<ValueError>(used == given.size(),
                    "load_full_state_dict: {} of the state's {} entries belong to nothing here",
                    given.size() - used, given.size());
  for (const FoundParameter& p : found.parameters)
    if (p.member->object().host() != nullptr) p.member->object().host()->before_write();
  for (const auto& [into, from] : copies) copy_(into, from);
}

void materialize(nn::Module& module, Device device,
                 const std::function<void(const std::string& name, const Tensor& whole)>& initialise) {
  const NoGrad guard;
  module.to(device);
  const Found found = find_members(module);
  for (const FoundParameter& p : found.parameters) {
    const nn::Parameter& object = p.member->object();
    const Tensor local = object.local().detach();
    const Tensor whole = empty(object.shape(), {local.dtype(), device});
    initialise(p.name, whole);
    copy_(local, part_of(object, whole));
  }
  for (const FoundBuffer& b : found.buffers) initialise(b.name, b.member->tensor());
}

}  // namespace sherd::shard
