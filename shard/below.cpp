#include "shard/below.h"

#include <fmt/format.h>

#include <unordered_set>
#include <utility>

#include "runtime/ops.h"
#include "shard/build.h"
#include "shard/unit.h"

namespace sherd::shard {
namespace {

std::string joined(std::string_view outer, std::string_view name) {
  return outer.empty()  ? std::string(name)
         : name.empty() ? std::string(outer)
                        : fmt::format("{}.{}", outer, name);
}

/// The objects of all members, by member.
struct Objects final : nn::MemberVisitor {
  std::vector<const void*> ids;
  void param(std::string_view, nn::Param& p) override { ids.push_back(p.object().id()); }
};

}  // namespace

bool Ignored::covers(std::string_view name) const {
  if (parameters.contains(name)) return true;
  if (modules.empty()) return false;
  for (std::size_t dot = name.find('.'); dot != std::string_view::npos; dot = name.find('.', dot + 1))
    if (modules.contains(name.substr(0, dot))) return true;
  return false;
}

void Ignored::add(std::string_view name, const Ignored& of_inner) {
  for (const std::string& n : of_inner.parameters) parameters.insert(joined(name, n));
  for (const std::string& n : of_inner.modules) modules.insert(joined(name, n));
}

void Below::look(nn::Module& root, Unit& unit) {
  Objects now;
  now.ids.reserve(ids_.size());
  root.visit_all_members(now);
  if (looked_ && now.ids == ids_ && roots_changed_ == Engine::current().roots_changed()) return;
  looked_ = false;
  ignored_ = {};
  casts_buffers_ = false;
  const std::vector<NamedUnit> units = units_of(root);
  for (const NamedUnit& below : units) {
    ignored_.add(below.name, below.unit->policy().ignored);
    casts_buffers_ = casts_buffers_ || below.unit->policy().buffer_dtype;
  }
  if (casts_buffers_) find_buffers(root, unit);
  write_back(root);
  for (const nn::Parameter& p : std::exchange(tied_, {}))
    if (Unit* keeper = unit_of(p)) keeper->write_back();
  held_.clear();
  shared_.clear();
  std::unordered_set<const nn::Parameter*> held;
  for (const FoundParameter& p : find_members(root).parameters) {
    Unit* const keeper = unit_of(p.member->object());
    check<StateError>(keeper != nullptr || ignored_.covers(p.name),
                      "fully_shard: '{}' of shape {} was put into {} after it was sharded, and every rank "
                      "would train it alone; shard a module when it is complete",
                      p.name, p.member->shape(), root.type_name());
    held_.push_back(p.member->object());
    if (keeper == nullptr) continue;
    keeper->add_slots(p.member->object(), p.slots);
    for (const Slot& slot : p.slots) held.insert(slot.get());
    if (std::ranges::find(units, keeper, &NamedUnit::unit) == units.end())
      tied_.push_back(p.member->object());
    else if (p.slots.size() > 1)
      shared_.push_back(p.member->object());
  }
  for (const NamedUnit& below : units) below.unit->leave_slots(held);
  for (const NamedUnit& below : units) below.unit->join(unit, below.name);
  Objects objects;
  root.visit_all_members(objects);
  ids_ = std::move(objects.ids);
  roots_changed_ = Engine::current().roots_changed();  // by what joined here too
  looked_ = true;
}

std::vector<std::shared_ptr<ParameterGroup>> Below::tied() const {
  std::vector<std::shared_ptr<ParameterGroup>> groups;
  const auto add = [&](const nn::Parameter& p, bool gathered_too) {
    const Unit* const keeper = unit_of(p);
    if (keeper == nullptr) return;
    const auto& group = keeper->place(p).members->group;
    if (!gathered_too && !group->in_use().is_shard_itself()) return;
    if (std::ranges::find(groups, group) == groups.end()) groups.push_back(group);
  };
  for (const nn::Parameter& p : tied_) add(p, true);
  for (const nn::Parameter& p : shared_) add(p, false);
  return groups;
}

// ---- buffers ----

void Below::find_buffers(nn::Module& root, const Unit& unit) {
  struct Finder final : nn::MemberVisitor {
    Below& below;
    const UnitPolicy* policy;
    std::string prefix{};
    Finder(Below& below, const UnitPolicy& policy) : below(below), policy(&policy) {}
    void buffer(std::string_view name, nn::Buffer&) override {
      below.buffer_casts_.push_back(
          {below.ignored_.covers(prefix + std::string(name)), policy->buffer_dtype});
    }
    void child(std::string_view name, nn::Module& module) override {
      const std::string outer = std::exchange(prefix, prefix + std::string(name) + ".");
      const UnitPolicy* const around = policy;
      if (const Unit* inner = unit_of(module)) policy = &inner->policy();
      module.visit_members(*this);
      policy = around;
      prefix = outer;
    }
  };
  buffer_casts_.clear();
  Finder finder(*this, unit.policy());
  root.visit_members(finder);
}

void Below::cast_buffers(nn::Module& root, const Unit& unit, Precision precision) {
  if (!casts_buffers_) return;
  struct Caster final : nn::MemberVisitor {
    const std::vector<BufferCast>& casts;
    Precision precision;
    std::size_t at = 0;
    Caster(const std::vector<BufferCast>& casts, Precision precision) : casts(casts), precision(precision) {}
    void buffer(std::string_view, nn::Buffer& b) override {
      const std::size_t i = at++;
      if (i >= casts.size() || casts[i].left_alone) return;
      if (!b.tensor().defined() || !is_floating(b.tensor().dtype())) return;
      b.compute_in(precision == Precision::reduced ? casts[i].dtype.value_or(b.own_dtype()) : b.own_dtype());
    }
  };
  Caster caster(buffer_casts_, precision);
  root.visit_all_members(caster);
  if (caster.at == buffer_casts_.size()) return;
  find_buffers(root, unit);  // there are others now
  cast_buffers(root, unit, precision);
}

}  // namespace sherd::shard
