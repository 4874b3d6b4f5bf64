#include "shard/summon.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "runtime/context.h"
#include "runtime/ops.h"
#include "shard/agree.h"
#include "shard/build.h"
#include "shard/unit.h"

namespace sherd::shard {
namespace {

/// Nothing would show a part whole that a unit around the module keeps.
void check_all_below(nn::Module& module, std::span<const NamedUnit> below) {
  for (const FoundParameter& p : find_members(module).parameters) {
    const Unit* keeper = unit_of(p.member->object());
    check<StateError>(
        keeper == nullptr || std::ranges::find(below, keeper, &NamedUnit::unit) != below.end(),
        "summon_full_params of {}: '{}' was sharded with a module that is not in this one; summon a module "
        "that holds both",
        module.type_name(), p.name);
  }
}

std::vector<NamedUnit> units_to_summon(nn::Module& module, bool recurse) {
  Unit* const own = unit_of(module);
  if (own != nullptr && !recurse) return {{"", &module, own}};
  std::vector<NamedUnit> units = units_of(module);
  check_all_below(module, units);
  return recurse ? units : std::vector<NamedUnit>{};
}

void check_options(const SummonOptions& options) {
  check<ValueError>(
      !options.writeback || !options.rank0_only,
      "summon_full_params: writeback=True and rank0_only=True is not supported: the other ranks "
      "would keep other values; pass writeback = false");
}

void check_idle(const NamedUnit& u) {
  check<StateError>(!u.unit->running() && !Engine::current().in_backward(),
                    "summon_full_params of {}: Cannot manually unshard parameters during forward/backward",
                    u.module->type_name());
  check<StateError>(!u.unit->summoned(),
                    "summon_full_params of {}: it is summoned already; end that scope first",
                    u.module->type_name());
}

bool is_first(const Ranks& ranks) {
  return RankOfGroup(ranks.shard).rank == 0 && RankOfGroup(ranks.replicas).rank == 0;
}

/// Whether any rank that shares the parameters has each one's gradient.
std::vector<bool> with_gradient(const Members& m) {
  std::vector<bool> present;
  for (const nn::Parameter& p : m.parameters) present.push_back(p.grad().defined());
  return said_by_any(m.group->spec().ranks.shard, present, "gradients to summon");
}

/// Of what every rank has in the shard's form, each parameter's; and what it was when it was made.
struct Wholes {
  Tensor all;
  std::uint32_t version = 0;
  std::vector<Tensor> of;  ///< by parameter; empty where there is none

  Wholes() = default;
  Wholes(ParameterGroup& group, const Tensor& shard, bool on_cpu) : all(group.gather(shard)) {
    if (on_cpu) all = to(all, Device::cpu());
    version = all.storage().version();
    for (std::size_t i = 0; i < group.size(); ++i) of.push_back(alias(all, group.whole_layout(i)));
  }
  bool written() const { return all.defined() && all.storage().version() != version; }
};

/// Averages, zeros where a rank that shares them has none; empty where all have none. Collective.
Wholes whole_gradients(const Members& m, bool on_cpu) {
  ParameterGroup& group = *m.group;
  const std::vector<bool> present = with_gradient(m);
  const Tensor parts = zeros({group.shard().numel()}, {group.shard().dtype(), group.shard().device()});
  for (std::size_t i = 0; i < m.parameters.size(); ++i)
    if (const Tensor g = m.parameters[i].grad(), part = group.part_in(parts, i);
        g.defined() && part.numel() > 0)
      copy_(part, g);
  Wholes gradients(group, parts, on_cpu);
  for (std::size_t i = 0; i < present.size(); ++i)
    if (!present[i]) gradients.of[i] = {};
  return gradients;
}

void check_group(const Members& m, const SummonOptions& options) {
  const std::string& name = m.group->spec().names[0];
  check<DeviceError>(m.group->shard().device().type != DeviceType::meta,
                     "summon_full_params: '{}' is on meta and has no values; call materialize() first", name);
  check<ValueError>(
      !options.with_grads || !m.flat.defined(),
      "summon_full_params: with_grads needs parameters with gradients of their own, and '{}' is "
      "part of one flat parameter; pass use_orig_params",
      name);
}

}  // namespace

/// A unit's group in the scope.
struct SummonFullParams::Summoned {
  std::shared_ptr<Unit> unit;
  std::shared_ptr<ParameterGroup> group;
  std::vector<nn::Parameter> parameters;
  Wholes values, gradients{};
  std::vector<Tensor> held{};  ///< the gradients before

  void keep_values() const {
    if (!values.written()) return;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const Tensor local = group->local(i).detach();
      copy_(local, to(group->part_of(i, values.of[i]), local.device()));
    }
  }

  void keep_gradient(std::size_t i, bool writeback) {
    nn::Parameter& p = parameters[i];
    const Tensor now = p.grad();
    const bool untouched = now.defined() ? &now.storage() == &gradients.all.storage() && !gradients.written()
                                         : !gradients.of[i].defined();
    p.local().set_grad(held[i]);
    if (untouched || !writeback) return;
    if (now.defined()) check_writeback("gradient", group->spec().names[i], p.shape(), now.shape());
    p.local().set_grad(now.defined() && !group->elsewhere(i)
                           ? to(clone(group->part_of(i, now)), group->shard().device())
                           : Tensor{});
  }
};

SummonFullParams::SummonFullParams(nn::Module& module, SummonOptions options)
    : options_(options), exceptions_(std::uncaught_exceptions()) {
  const NoGrad guard;
  check_options(options);
  const std::vector<NamedUnit> units = units_to_summon(module, options.recurse);
  for (const NamedUnit& u : units) check_idle(u);
  check_steps(module);
  write_back(units);
  for (const NamedUnit& u : units) u.unit->check_gradients();
  for (const NamedUnit& u : units)
    for (const Members& m : u.unit->members()) {
      ParameterGroup& group = *m.group;
      check_group(m, options);
      Wholes values(group, group.shard(), options.offload_to_cpu), gradients;
      if (options.with_grads && !group.gradients().unreduced())
        gradients = whole_gradients(m, options.offload_to_cpu);
      const bool shown = !options.rank0_only || is_first(group.spec().ranks);
      auto unit = std::dynamic_pointer_cast<Unit>(u.module->extension());
      summoned_.push_back(std::make_unique<Summoned>(Summoned{std::move(unit), m.group, m.parameters,
                                                              shown ? std::move(values) : Wholes(),
                                                              shown ? std::move(gradients) : Wholes()}));
    }
  for (const auto& s : summoned_) {
    s->unit->summon(*s->group, s->values.of);
    for (std::size_t i = 0; i < s->gradients.of.size(); ++i) {
      s->held.push_back(s->parameters[i].grad());
      if (s->gradients.of[i].defined()) s->parameters[i].set_grad(s->gradients.of[i]);
    }
  }
}

SummonFullParams::~SummonFullParams() noexcept(false) {
  try {
    restore();
  } catch (...) {
    if (std::uncaught_exceptions() == exceptions_) throw;
  }
}

void SummonFullParams::restore() {
  const NoGrad guard;
  for (const auto& s : summoned_) s->unit->dismiss(*s->group);
  std::exception_ptr first;
  for (const auto& s : summoned_) {
    if (options_.writeback) s->keep_values();
    for (std::size_t i = 0; i < s->gradients.of.size(); ++i) try {
        s->keep_gradient(i, options_.writeback);
      } catch (...) {
        if (!first) first = std::current_exception();
      }
  }
  if (first) std::rethrow_exception(first);
}

}  // namespace sherd::shard
