// From shards to whole values and back.
#include <algorithm>

#include "nn/state_names.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "runtime/reach.h"
#include "shard/build.h"
#include "shard/fully_shard.h"
#include "shard/state_source.h"
#include "shard/unit.h"

namespace sherd::shard {
namespace {

/// What is on `meta` has nothing to gather, and would take values in silence.
void check_values(std::string_view call, std::string_view name, const Tensor& t) {
  check<DeviceError>(t.device().type != DeviceType::meta,
                     "{}: '{}' is on meta and holds no values; call materialize() of the module first", call,
                     name);
}

/// Of a parameter in a flat one, the flat one's.
std::int64_t steps_of(const nn::Parameter& p) {
  return (p.owner() == nullptr ? p : p.owner()->stepped_as(p)).step_count().steps;
}

std::vector<FoundBuffer> saved_buffers(const Found& found) {
  std::vector<FoundBuffer> saved;
  for (const FoundBuffer& b : found.buffers)
    if (b.member->persistence() == nn::Persistence::saved) saved.push_back(b);
  return saved;
}

}  // namespace

const Group* shard_group_of(const nn::Parameter& p) {
  const ParameterGroup* group = group_of(p);
  return group != nullptr && group->spec().ranks.shard.defined() ? &group->spec().ranks.shard : nullptr;
}

Tensor gather_whole(const nn::Parameter& p, const Tensor& given) {
  const NoGrad guard;
  const Group* group = shard_group_of(p);
  const Tensor local = p.local();
  check<StateError>(given.defined() || local.numel() == 0,
                    "gather_whole: the part is an empty handle, and this rank has {} elements of the "
                    "parameter of shape {}; give a tensor shaped as its local(), which is zeros where the "
                    "parameter has no gradient",
                    local.numel(), p.shape());
  const Tensor part = given.defined() ? given : empty(local.shape(), {local.dtype(), local.device()});
  check<ShapeError>(part.shape() == local.shape(),
                    "gather_whole: the part has shape {}, the parameter's is {}", part.shape(),
                    local.shape());
  check<DeviceError>(
      part.device().type != DeviceType::meta,
      "gather_whole: a part of shape {} is on meta and holds no values; call materialize() of the "
      "module first",
      part.shape());
  if (group == nullptr) {
    check_kept("gather_whole", p);
    return clone(part);
  }
  const auto [members, index] = unit_of(p)->place(p);
  const Partition& partition = members->group->spec().partition;
  std::int64_t longest = 0;
  for (int rank = 0; rank < partition.ranks(); ++rank)
    longest = std::max(longest, partition.part(static_cast<int>(index), rank).numel);
  const TensorOptions like{part.dtype(), part.device()};
  const Tensor mine = zeros({longest}, like), all = empty({longest * partition.ranks()}, like);
  copy_(narrow(mine, 0, 0, part.numel()), reshape(part, {-1}));
  group->all_gather(
      all, mine,
      {.label = called_of(p, fmt::format("whole values of {}", members->group->spec().names[index])),
       .channel = gather_channel});
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

Run run_of(const nn::Parameter& p) {
  const Unit* unit = unit_of(p);
  if (unit == nullptr) return {0, p.numel()};
  const auto [members, index] = unit->place(p);
  const GroupSpec& spec = members->group->spec();
  const OwnedPart owned = spec.partition.part(static_cast<int>(index), RankOfGroup(spec.ranks.shard).rank);
  const RankOfGroup replicas(spec.ranks.replicas);
  return {owned.in_parameter, owned.numel, replicas.rank, replicas.ranks};
}

nn::StateDict full_state_dict(nn::Module& module) {
  const NoGrad guard;
  nn::StateDict state;
  check_steps(module);
  write_back(module);
  const Found found = find_members(module);
  for (const FoundParameter& p : found.parameters) {
    check_values("full_state_dict", p.name, p.member->local());
    state.emplace_back(p.name, gather_whole(p.member->object(), p.member->local().detach()));
  }
  for (const FoundBuffer& b : saved_buffers(found)) {
    check_values("full_state_dict", b.name, b.member->values());
    state.emplace_back(b.name, clone(b.member->values()));
  }
  return state;
}

nn::Mismatch load_full_state_dict(nn::Module& module, const nn::StateDict& state, nn::Strict strict) {
  constexpr std::string_view call = "load_full_state_dict";
  const WholeSource from(call, state);
  StagedModel staged(call, module, from, strict);
  if (strict == nn::Strict::yes) check_none_left(call, staged.mismatch().unknown, StagedModel::what);
  staged.commit();
  return staged.mismatch();
}

ShardedStateDict sharded_state_dict(nn::Module& module) {
  const NoGrad guard;
  ShardedStateDict state;
  write_back(module);
  const Found found = find_members(module);
  for (const FoundParameter& p : found.parameters) {
    const Tensor local = p.member->local().detach();
    check_values("sharded_state_dict", p.name, local);
    const Run run = run_of(p.member->object());
    state.push_back({p.name, p.member->shape(), run.begin, reshape(local, {local.numel()}), run.replica,
                     run.replicas, steps_of(p.member->object())});
  }
  for (const FoundBuffer& b : saved_buffers(found)) {
    const Tensor own = b.member->values();
    check_values("sharded_state_dict", b.name, own);
    state.push_back({b.name, own.shape(), 0, reshape(own, {own.numel()}), 0, 0});
  }
  return state;
}

namespace {

/// The name under which the state has what the module has under `first` and `names`: the first of those that
/// are there, or `first`. Values under others are compared with those.
std::string name_in(std::string_view call, const StateSource& from, const std::string& first,
                    std::span<const std::string> names, UsedNames& used) {
  std::vector<std::string> there;
  used.add(first);
  for (const std::string& name : names) used.add(name);
  for (const std::string& name : names)
    if (std::ranges::find(there, name) == there.end() && from.shape(name)) there.push_back(name);
  if (there.empty()) return first;
  const auto whole = [&](const std::string& name) {
    const Shape shape = *from.shape(name);
    return nn::NamedValues(name, reshape(from.read(name, 0, shape.numel()), shape));
  };
  std::optional<nn::NamedValues> values;
  for (const std::string& other : std::span(there).subspan(1)) {
    if (!values) values = whole(there[0]);
    nn::check_tied(call, *values, whole(other));
  }
  return there[0];
}

/// Of a tie under any of its names.
std::int64_t steps_in(const StateSource& from, std::span<const std::string> names) {
  std::int64_t steps = 0;
  for (const std::string& name : names) steps = std::max(steps, from.steps(name));
  return steps;
}

}  // namespace

StagedModel::StagedModel(std::string_view call, nn::Module& module, const StateSource& from,
                         nn::Strict strict, Frozen frozen) {
  const NoGrad guard;
  UsedNames used;
  const auto take = [&](const std::string& first, std::span<const std::string> names, const Tensor& into,
                        const Shape& shape, const Run& run) -> std::optional<Tensor> {
    const std::string name = name_in(call, from, first, names, used);
    const std::optional<Shape> given = from.shape(name);
    if (!given && strict == nn::Strict::no) return mismatch_.missing.push_back(name), std::nullopt;
    check_values(call, name, into);
    check<StateError>(!shows_twice(into.layout()),
                      "{}: elements of the module's '{}' of shape {} and strides {} share memory; make it of "
                      "a clone",
                      call, name, into.shape(), into.strides());
    check<ValueError>(given.has_value(), "{}: the state lacks '{}'; pass Strict::no to keep the module's{}",
                      call, name, from.instead_of(name));
    check<ShapeError>(*given == shape, "{}: '{}' has shape {} in the module and {} in the state{}", call,
                      name, shape, *given, from.whose(name));
    const Tensor values = from.read(name, run.begin, run.numel);
    check<DeviceError>(values.device().type != DeviceType::meta,
                       "{}: '{}' is on meta in the state and has no values", call, name);
    return reshape(to(values, into.dtype()), into.shape());
  };
  write_back(module);
  const Found found = find_members(module);
  for (const FoundParameter& p : found.parameters) {
    const nn::Parameter& object = p.member->object();
    const bool may_lack = frozen == Frozen::left_out && !object.requires_grad();
    if (may_lack &&
        std::ranges::none_of(p.names, [&](const auto& name) { return from.shape(name).has_value(); }))
      continue;
    const Tensor local = object.local().detach();
    const auto values = take(p.name, p.names, local, object.shape(), run_of(object));
    if (!values) continue;
    copies_.emplace_back(local, *values);
    loaded_.emplace_back(object, steps_in(from, p.names));
    if (object.owner() != nullptr) owners_.push_back(object.owner());
  }
  for (const FoundBuffer& b : saved_buffers(found)) {
    const Tensor own = b.member->values();
    if (auto values = take(b.name, {}, own, own.shape(), {0, own.numel()}))
      buffers_.emplace_back(b.member, *std::move(values));
  }
  std::ranges::sort(mismatch_.missing);
  mismatch_.unknown = used.others(from);
}

void StagedModel::commit() {
  const NoGrad guard;
  for (nn::ParameterOwner* owner : owners_) owner->before_write();
  for (const auto& [into, from] : copies_) copy_(into, from);
  for (const auto& [object, steps] : loaded_) object.loaded(steps);
  for (const auto& [buffer, from] : buffers_) buffer->load(from);
}

}  // namespace sherd::shard
