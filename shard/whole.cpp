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

/// What is on `meta` has nothing to gather, and would take values in silence.
void check_values(std::string_view call, std::string_view name, const Tensor& t) {
  check<DeviceError>(t.device().type != DeviceType::meta,
                     "{}: '{}' is on meta and holds no values; call materialize() of the module first", call,
                     name);
}

}  // namespace

const Group* shard_group_of(const nn::Parameter& p) {
  const Unit* unit = unit_of(p);
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
  check<DeviceError>(
      part.device().type != DeviceType::meta,
      "gather_whole: a part of shape {} is on meta and holds no values; call materialize() of the "
      "module first",
      part.shape());
  if (group == nullptr) return clone(part);
  const auto [members, index] = unit_of(p)->place(p);
  const Partition& partition = members->group->spec().partition;
  std::int64_t longest = 0;
  for (int rank = 0; rank < partition.ranks(); ++rank)
    longest = std::max(longest, partition.part(static_cast<int>(index), rank).numel);
  const TensorOptions like{part.dtype(), part.device()};
  const Tensor mine = zeros({longest}, like), all = empty({longest * partition.ranks()}, like);
  copy_(narrow(mine, 0, 0, part.numel()), reshape(part, {-1}));
  group->all_gather(all, mine, {.label = "whole values", .channel = gather_channel});
  const Tensor whole = empty({p.numel()}, like);
  for (int rank = 0; rank < partition.ranks(); ++rank) {
    const OwnedPart owned = partition.part(static_cast<int>(index), rank);
    if (owned.numel > 0)
      copy_(narrow(whole, 0, owned.in_parameter, owned.numel), narrow(all, 0, rank * longest, owned.numel));
  }
  return reshape(whole, members->group->spec().shapes[index]);
}

Tensor part_of(const nn::Parameter& p, const Tensor& whole) {
  const NoGrad guard;
  if (shard_group_of(p) == nullptr) return clone(whole);
  const auto [members, index] = unit_of(p)->place(p);
  return clone(members->group->part_of(index, whole));
}

nn::StateDict full_state_dict(nn::Module& module) {
  const NoGrad guard;
  nn::StateDict state;
  const Found found = find_members(module);
  for (const FoundParameter& p : found.parameters) {
    check_values("full_state_dict", p.name, p.member->local());
    state.emplace_back(p.name, gather_whole(p.member->object(), p.member->local().detach()));
  }
  for (const FoundBuffer& b : found.buffers)
    if (b.member->persistence() == nn::Persistence::saved)
      state.emplace_back(b.name, clone(b.member->values()));
  return state;
}

void load_full_state_dict(nn::Module& module, const nn::StateDict& state) {
  std::unordered_map<std::string, Tensor> given;
  for (const auto& [name, tensor] : state)
    check<ValueError>(given.emplace(name, tensor).second, "load_full_state_dict: the state has '{}' twice",
                      name);
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
  std::vector<std::pair<nn::Buffer*, Tensor>> loads;
  for (const FoundParameter& p : found.parameters) {
    const nn::Parameter& object = p.member->object();
    check_values("load_full_state_dict", p.name, object.local());
    copies.emplace_back(object.local().detach(), part_of(object, find(p.name, object.shape())));
  }
  for (const FoundBuffer& b : found.buffers)
    if (b.member->persistence() == nn::Persistence::saved)
      loads.emplace_back(b.member, find(b.name, b.member->tensor().shape()));
  check<ValueError>(used == given.size(),
                    "load_full_state_dict: {} of the state's {} entries belong to nothing here",
                    given.size() - used, given.size());
  for (const FoundParameter& p : found.parameters)
    if (p.member->object().owner() != nullptr) p.member->object().owner()->before_write();
  for (const auto& [into, from] : copies) copy_(into, from);
  for (const auto& [buffer, from] : loads) buffer->load(from);
}

}  // namespace sherd::shard
