// What the user put in the place of parameters, taken into the shard before the next gather; and what cannot
// be taken, in the words of FSDP1.
#include <algorithm>
#include <span>
#include <unordered_set>
#include <utility>

#include "runtime/context.h"
#include "runtime/ops.h"
#include "shard/build.h"
#include "shard/unit.h"

namespace sherd::shard {
namespace {

constexpr std::string_view name_of(ShardingStrategy strategy) {
  switch (strategy) {
    case ShardingStrategy::full_shard:
      return "FULL_SHARD";
    case ShardingStrategy::shard_grad_op:
      return "SHARD_GRAD_OP";
    case ShardingStrategy::zero1:
      return "ZERO1";
    case ShardingStrategy::no_shard:
      return "NO_SHARD";
  }
  return "?";
}

/// Without those of modules that are gone, which nobody else holds.
void drop_dead(std::vector<Slot>& slots, const nn::Parameter& parameter) {
  std::erase_if(slots, [](const Slot& slot) { return slot.use_count() == 1; });
  if (slots.empty()) slots = {std::make_shared<const nn::Parameter>(parameter)};
}

}  // namespace

void check_writeback(std::string_view what, const std::string& name, const Shape& expected,
                     const Shape& given) {
  check<ShapeError>(
      given == expected, "Cannot writeback when the {} shape changes: Expects {} but got {} for '{}': {}",
      what, expected, given, name,
      what == "gradient"
          ? "give it the expected shape, which is this rank's part, or the whole in a scope of "
            "summon_full_params with_grads"
          : "give this rank's part, also within summon_full_params; whole values of a parameter "
            "are taken by set_data()");
}

void Unit::write_back() {
  refuse_summoned("a forward begins, a module is sharded, or a state is read or loaded,");
  for (Members& m : members_) {
    check_unchanged(m, kept_for_backward(*m.group));
    if (policy_.writeback_check == WritebackCheck::off) continue;
    for (std::size_t i = 0; i < m.parameters.size(); ++i) {
      if (!m.replaced(i)) continue;
      drop_dead(m.slots[i], m.parameters[i]);
      if (m.replaced(i)) take_in(m, i);
    }
  }
}

void write_back(nn::Module& module) { write_back(units_of(module)); }

void write_back(std::span<const NamedUnit> units) {
  for (const NamedUnit& u : units) u.unit->write_back();
}

bool Unit::replaced(const std::unordered_set<const void*>& ids) const {
  for (const Members& m : members_)
    for (std::size_t i = 0; i < m.parameters.size(); ++i)
      if (m.replaced(i) &&
          (ids.contains(m.parameters[i].id()) ||
           std::ranges::any_of(m.slots[i], [&](const Slot& s) { return ids.contains(s->id()); })))
        return true;
  return false;
}

void write_back(std::string_view call, std::span<const nn::Parameter> parameters) {
  std::unordered_set<const void*> ids;
  for (const nn::Parameter& p : parameters) ids.insert(p.id());
  for (const auto& unit : Engine::current().units())
    if (unit->replaced(ids)) unit->write_back();
  for (const nn::Parameter& p : parameters) {
    check<StateError>(
        p.replaced_as().empty(),
        "{}: a parameter of shape {} is in its module no longer: '{}' was replaced by another object; "
        "take the parameters of the module anew, for the optimizer too",
        call, p.shape(), p.replaced_as());
    check<StateError>(p.owner() != nullptr || p.local().shape() == p.shape(),
                      "{}: a parameter of shape {} was sharded with a module that is gone, and its part "
                      "of shape {} counts on no other rank; take the parameters of a module",
                      call, p.shape(), p.local().shape());
  }
}

void Unit::check_gradients() const {
  for (const Members& m : members_) m.group->gradients().check_replaced();
}

void Unit::begin_backward(const Plan& plan) {
  for (const Members& m : members_) {
    bool concerned = false;
    m.group->each_gathered([&](const Gathered& gathered) { concerned |= plan.concerns(gathered); });
    if (!concerned) continue;
    check_unchanged(m, true);
    m.group->gradients().check_replaced();
  }
}

/// A graph that holds gathered values cannot be told that others are to count.
void Unit::check_unchanged(const Members& m, bool in_graph) {
  m.group->each_gathered([&](Gathered& gathered) {
    if (const std::string name = gathered.take_replaced(); !name.empty()) fail_changed(name);
  });
  if (policy_.writeback_check == WritebackCheck::off) return;
  for (std::size_t i = 0; in_graph && i < m.parameters.size(); ++i)
    if (m.replaced(i) && m.slots[i][0]->defined() && m.slots[i][0]->owner() == nullptr)
      fail_changed(m.group->spec().names[i]);
}

void Unit::fail_changed(const std::string& name) const {
  fail<StateError>(
      "FSDP does not support changing the parameters between forward and backward for "
      "HandleShardingStrategy.{}: '{}' was replaced; replace it before the forward, or after the "
      "backward, or reshard() the module if there will be none",
      name_of(policy_.strategy), name);
}

/// The object in its members' slots takes the place of parameter `i`, whose own goes on alone.
void Unit::take_in(Members& m, std::size_t i) {
  const NoGrad guard;
  const std::string& name = m.group->spec().names[i];
  nn::Parameter fresh = *m.slots[i][0];
  check<NotImplementedError>(
      std::ranges::all_of(m.slots[i], [&](const Slot& slot) { return *slot == fresh; }),
      "Changing shared parameters is not supported yet: '{}' is tied, and not all of its members have the "
      "same object now; tie them again",
      name);
  if (!fresh.defined() || fresh.owner() != nullptr) return;
  check<StateError>(
      !m.flat.defined(),
      "fully_shard: '{}' is part of a flat parameter and was replaced after it was sharded, so every "
      "rank would train it alone; set_data() the old one's values, or pass use_orig_params",
      name);
  const Tensor values = fresh.local().detach();
  const bool has_values = values.device().type != DeviceType::meta;
  const bool has_memory = m.group->shard().device().type != DeviceType::meta;
  if (has_values && !has_memory) return;  // until materialize() gave it some
  check<DeviceError>(
      has_values || !has_memory,
      "fully_shard: '{}' was replaced by a parameter on meta, which has no values; give it some", name);
  const Shape part = m.group->local(i).shape();
  const bool elsewhere = m.group->elsewhere(i);
  const bool whole = m.group->spec().partition.ranks() == 1 && values.numel() == part.numel();
  if (!elsewhere && !whole) check_writeback("parameter", name, part, values.shape());
  const Tensor own = sherd::clone(m.parameters[i].local().detach());
  if (!elsewhere) copy_(m.group->local(i).detach(), reshape(values, part));

  nn::Parameter old = std::exchange(m.parameters[i], fresh);
  places_.erase(old.id());
  old.leave_owner_to_another(name);
  fresh.step_count() = old.step_count();
  old.set_data(own);
  m.group->renew_local(i);
  bind_one(m, i);
}

void Unit::set_data(const nn::Parameter& parameter, const Tensor& data) {
  const NoGrad guard;
  if (const Members* flat = flattened(parameter)) {
    check_writeback("parameter", "_flat_param", parameter.local().shape(), data.shape());
    copy_(flat->group->flat().detach(), data);
    return;
  }
  const auto [members, index] = place(parameter);
  const std::string& name = members->group->spec().names[index];
  if (!members->summoned.empty()) {
    check_writeback("parameter", name, parameter.shape(), data.shape());
    copy_(members->summoned[index].detach(), data);
    return;
  }
  const Tensor local = parameter.local().detach();
  const bool whole = data.shape() == parameter.shape();
  if (!whole) check_writeback("parameter", name, local.shape(), data.shape());
  const bool kept = kept_for_backward(*members->group);
  copy_(local, whole ? members->group->part_of(index, data) : data);
  if (kept) members->group->in_use().tell_replaced(name);
}

}  // namespace sherd::shard
