#include "shard/fully_shard.h"

#include <cmath>
#include <string_view>
#include <utility>

#include "autograd/capture/effects.h"
#include "autograd/node.h"
#include "collectives/world.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "shard/build.h"
#include "shard/unit.h"

namespace sherd::shard {

void fully_shard(nn::Module& module, const Options& options) {
  const bool flat = options.layout == GroupLayout::flat;
  const MixedPrecisionPolicy& precision = options.mixed_precision;
  UnitForm form;
  if (!flat)
    form.input_cast = precision.cast_forward_inputs.value_or(true) ? InputCast::always : InputCast::never;
  else if (precision.cast_root_forward_inputs.value_or(true))
    form.input_cast = InputCast::always;  // each call makes a root of its own
  else
    form.input_cast =
        precision.cast_forward_inputs.value_or(false) ? InputCast::with_parameters : InputCast::never;
  build_unit(module, options, form);
}

bool is_sharded(const nn::Module& module) { return unit_of(module) != nullptr; }

namespace {

/// Whom a call about a module and those below is about. StateError where it would do nothing because
/// something else has the module's parameters, or their gradients.
std::vector<NamedUnit> units_for(nn::Module& module, std::string_view call) {
  std::vector<NamedUnit> units = units_of(module);
  if (!units.empty()) return units;
  for (const FoundParameter& p : find_members(module).parameters) {
    check<StateError>(
        p.member->object().owner() == nullptr,
        "{}: '{}' of {} was sharded with a module around it, and the call would do nothing; call it "
        "of that one",
        call, p.name, module.type_name());
    check<StateError>(
        sink_of(p.member->local()) == nullptr,
        "{}: {} is not sharded, the gradient of '{}' goes elsewhere (DataParallel), and the call would "
        "do nothing; use what that has",
        call, module.type_name(), p.name);
  }
  return units;
}

template <class F>
void each_group(std::span<const NamedUnit> units, F&& visit) {
  for (const NamedUnit& u : units)
    for (const Members& m : u.unit->members()) visit(*m.group);
}

/// The unit of a module that a call is about; StateError for one that is not sharded.
Unit& sharded(const nn::Module& module, std::string_view call) {
  Unit* unit = unit_of(module);
  check<StateError>(unit != nullptr, "{}: {} is not sharded; call it of a module that is", call,
                    module.type_name());
  return *unit;
}

}  // namespace

Phase phase_of(const nn::Module& module) { return sharded(module, "phase_of").phase(); }

void set_requires_gradient_sync(nn::Module& module, bool sync) {
  for (const NamedUnit& u : units_for(module, "set_requires_gradient_sync")) u.unit->set_synchronising(sync);
}
void set_reshard_after_backward(nn::Module& module, bool reshard) {
  each_group(units_for(module, "set_reshard_after_backward"),
             [&](ParameterGroup& group) { group.switches.reshard_after_backward = reshard; });
}
void set_requires_all_reduce(nn::Module& module, bool all_reduce) {
  each_group(units_for(module, "set_requires_all_reduce"),
             [&](ParameterGroup& group) { group.switches.all_reducing = all_reduce; });
}
void set_gradient_divide_factor(nn::Module& module, std::optional<double> factor) {
  check<ValueError>(
      !factor || (std::isfinite(*factor) && *factor > 0),
      "set_gradient_divide_factor: {} is no factor; give one above 0, or none for the number of "
      "ranks",
      factor.value_or(0));
  for (const Members& m : sharded(module, "set_gradient_divide_factor").members())
    m.group->switches.divide_by = factor;
}
void register_comm_hook(nn::Module& module, CommHook hook) {
  const std::vector<NamedUnit> units = units_for(module, "register_comm_hook");
  each_group(units, [](ParameterGroup& group) {
    const Ranks& ranks = group.spec().ranks;
    check<StateError>(
        !ranks.shard.defined() || !ranks.replicas.defined(),
        "register_comm_hook: '{}' has shards with replicas, whose reduction is two calls; give a mesh "
        "of one dimension",
        group.spec().names[0]);
    check<StateError>(!group.switches.comm_hook, "register_comm_hook: '{}' has a communication hook already",
                      group.spec().names[0]);
  });
  each_group(units, [&](ParameterGroup& group) { group.switches.comm_hook = hook; });
}

namespace {

std::vector<std::weak_ptr<Unit>> units_in(const std::vector<nn::Module*>& modules, std::string_view call) {
  std::vector<std::weak_ptr<Unit>> units;
  for (const nn::Module* m : modules) {
    check<ValueError>(m != nullptr, "{}: a module of the list is null", call);
    sharded(*m, call);
    units.push_back(std::dynamic_pointer_cast<Unit>(m->extension()));
  }
  return units;
}

}  // namespace

void set_modules_to_forward_prefetch(nn::Module& module, const std::vector<nn::Module*>& modules) {
  constexpr std::string_view call = "set_modules_to_forward_prefetch";
  const auto units = units_in(modules, call);
  for (const Members& m : sharded(module, call).members()) m.group->switches.forward_prefetch = units;
}
void set_modules_to_backward_prefetch(nn::Module& module, const std::vector<nn::Module*>& modules) {
  constexpr std::string_view call = "set_modules_to_backward_prefetch";
  const auto units = units_in(modules, call);
  for (const Members& m : sharded(module, call).members()) m.group->switches.backward_prefetch = units;
}

void UnshardHandle::wait() const {
  for (const auto& gathered : gathered_) gathered->finish();
}
UnshardHandle unshard_async(nn::Module& module) {
  Unit& unit = sharded(module, "unshard");
  const NamedUnit own{"", &module, &unit};
  write_back(std::span(&own, 1));
  std::vector<std::shared_ptr<Gathered>> begun;
  for (const Members& m : unit.members()) {
    Engine::current().unshard(*m.group);
    begun.push_back(m.group->in_use().shared());
  }
  return UnshardHandle(std::move(begun));
}
void unshard(nn::Module& module) { unshard_async(module).wait(); }

void reshard(nn::Module& module) {
  refuse_in_frames("compile: reshard is called inside");
  for (const NamedUnit& u : units_for(module, "reshard")) u.unit->let_go();
}

NoSync::NoSync(nn::Module& module) {
  for (const NamedUnit& u : units_for(module, "no_sync")) {
    u.unit->begin_no_sync();
    units_.push_back(std::dynamic_pointer_cast<Unit>(u.module->extension()));
  }
}
NoSync::~NoSync() {
  for (const auto& unit : alive<Unit>(units_)) unit->end_no_sync();
}

std::vector<GroupReport> groups_of(nn::Module& module) {
  std::vector<GroupReport> reports;
  for (const NamedUnit& u : units_of(module))
    for (const Members& m : u.unit->members()) {
      const GroupSpec& spec = m.group->spec();
      GroupReport report{u.name,
                         m.group->shard().dtype(),
                         spec.partition.shard_numel(),
                         spec.partition.gathered_numel(),
                         {}};
      for (std::size_t i = 0; i < spec.shapes.size(); ++i) {
        ParameterReport parameter{spec.names[i], spec.shapes[i], {}};
        for (int rank = 0; rank < spec.partition.ranks(); ++rank)
          parameter.owned_numels.push_back(spec.partition.part(static_cast<int>(i), rank).numel);
        report.parameters.push_back(std::move(parameter));
      }
      reports.push_back(std::move(report));
    }
  return reports;
}

}  // namespace sherd::shard
