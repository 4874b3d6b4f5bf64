#include "shard/unit.h"

#include <algorithm>
#include <utility>

#include "autograd/autograd.h"
#include "autograd/capture/capture.h"
#include "autograd/capture/effects.h"
#include "nn/on_meta.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "shard/build.h"
#include "shard/early_steps.h"
#include "shard/fully_shard.h"

namespace sherd::shard {
namespace {

/// What a flat parameter's leaf says to `register_hook`.
constexpr std::string_view flat_hooks =
    "a flat parameter's gradient comes by the parameters in it; register the hook on those, or one after "
    "accumulation on it";

/// The program writes its shard, on every rank.
void written(ParameterGroup& group) {
  group.each_gathered([](Gathered& gathered) { gathered.shard_written(); });
}

}  // namespace

Unit* unit_of(const nn::Module& module) { return dynamic_cast<Unit*>(module.extension().get()); }

Unit* unit_of(const nn::Parameter& parameter) { return dynamic_cast<Unit*>(parameter.owner()); }

ParameterGroup* group_of(const nn::Parameter& parameter) {
  const Unit* unit = unit_of(parameter);
  return unit != nullptr ? unit->stepped_at(parameter).members->group.get() : nullptr;
}

void check_kept(std::string_view name, const nn::Parameter& parameter) {
  check<StateError>(
      parameter.owner() != nullptr || parameter.local().shape() == parameter.shape(),
      "fully_shard: '{}' of shape {} was sharded with a module that is gone, and of its values there is only "
      "this rank's part of shape {}; keep that module, or give this one new parameters",
      name, parameter.shape(), parameter.local().shape());
}

std::string called_of(const nn::Parameter& parameter, std::string what) {
  const ParameterGroup* group = group_of(parameter);
  return group != nullptr ? group->name()->on_shard.called(std::move(what)) : what;
}

std::vector<NamedUnit> units_of(nn::Module& module) {
  std::vector<NamedUnit> units;
  for (const nn::NamedModule& m : module.named_modules())
    if (Unit* unit = unit_of(*m.module)) units.push_back({m.name, m.module, unit});
  return units;
}

Unit::Unit(UnitPolicy policy, std::vector<Members> members)
    : policy_(std::move(policy)),
      members_(std::move(members)),
      root_(std::make_shared<Root>(policy_.schedule)) {
  for (Members& m : members_) {
    m.order.resize(m.parameters.size());
    m.slots.resize(m.parameters.size());
    bind(m);
  }
}

std::shared_ptr<Unit> Unit::make(UnitPolicy policy, std::vector<Members> members) {
  auto unit = std::make_shared<Unit>(std::move(policy), std::move(members));
  Engine::current().add(unit, unit->root_);
  unit->root_->add(unit);
  unit->number();
  return unit;
}

void Unit::number() const {
  for (const auto& group : groups_) group->made_in_model();
}

void Unit::take_into_model(std::span<Unit* const> below) {
  std::vector<ModelNumbers*> parts;
  for (const Unit* unit : below)
    if (ModelNumbers* const part = &unit->root_->numbers();
        unit->root_ != root_ && std::ranges::find(parts, part) == parts.end())
      parts.push_back(part);
  root_->numbers().take(parts);
  number();
  for (const Unit* unit : below) unit->number();
}

Unit::~Unit() {
  for (const auto& group : groups_) group->retire();
  for (Members& m : members_) {
    for (nn::Parameter& p : m.parameters)
      if (p.owner() == this) p.leave_owner();
    if (m.flat.defined()) m.flat.leave_owner();
  }
}

const std::vector<Tensor>& Members::used_in(Precision precision) {
  const auto of = [&](Precision p) -> std::vector<Tensor>& { return used[static_cast<std::size_t>(p)]; };
  const std::vector<Tensor>& reduced = of(Precision::reduced);
  if (reduced.empty()) of(Precision::reduced) = group->make_used(Precision::reduced);
  if (&group->gathered(precision) == &group->gathered(Precision::reduced)) return reduced;
  if (of(precision).empty()) of(precision) = group->make_used(precision, reduced);
  return of(precision);
}

/// Takes the parameters over: the optimizer steps their parts of the shard, forward reads the gathered ones.
void Unit::bind(Members& members) {
  ParameterGroup& group = *members.group;
  group.set_root(root_);
  groups_.push_back(members.group);
  use(members);
  if (!group.spec().one_flat_param) return;
  const bool trained = group.trainable();
  if (!members.flat.defined()) members.flat = nn::Parameter(group.flat().detach(), trained);
  members.flat.set_owner({this, group.flat(), group.flat(), group.flat().shape()});
  refuse_hooks(group.flat(), std::string(flat_hooks));
}

/// Gives the parameters what forward reads in the precision of now.
void Unit::use(Members& members) {
  for (std::size_t i = 0; i < members.parameters.size(); ++i) bind_one(members, i);
}

void Unit::bind_one(Members& members, std::size_t i) {
  ParameterGroup& group = *members.group;
  const Tensor& used = members.summoned.empty() ? members.used_in(precision_)[i] : members.summoned[i];
  places_[members.parameters[i].id()] = {&members, i};
  members.parameters[i].set_owner({this, group.local(i), used, group.spec().shapes[i]});
  if (!is_floating(used.dtype())) return;
  set_leaf_name(used, group.spec().names[i]);
  // A part of a flat parameter has no `.grad` of its own, after which its hooks would run.
  if (group.spec().one_flat_param) share_post_accumulate_hooks(group.local(i), used);
}

void Unit::compute_in(Precision precision) {
  if (std::exchange(precision_, precision) == precision) return;
  for (Members& m : members_) use(m);
}

Members& Unit::members_of(const ParameterGroup& group) {
  return *std::ranges::find(members_, &group, [](const Members& m) { return m.group.get(); });
}

void Unit::summon(ParameterGroup& group, std::vector<Tensor> whole) {
  Members& m = members_of(group);
  for (std::size_t i = 0; i < whole.size(); ++i)
    if (is_floating(whole[i].dtype())) continue_leaf(m.used_in(precision_)[i], whole[i]);
  m.summoned = std::move(whole);
  use(m);
  group.summoned = true;
}

void Unit::dismiss(ParameterGroup& group) {
  Members& m = members_of(group);
  m.summoned.clear();
  use(m);
  group.summoned = false;
}

void Unit::refuse_summoned(std::string_view call) const {
  for (const auto& group : groups_)
    check<StateError>(!group->summoned,
                      "fully_shard: {} while summon_full_params shows '{}' whole; end that scope first", call,
                      group->spec().names[0]);
}

const Unit::Place* Unit::placed(const nn::Parameter& parameter) const {
  const auto found = places_.find(parameter.id());
  return found != places_.end() ? &found->second : nullptr;
}

Unit::Place Unit::place(const nn::Parameter& parameter) const {
  const Place* at = placed(parameter);
  check<ValueError>(at != nullptr,
                    "fully_shard: a flat parameter of {} elements stands for many; name one of those",
                    parameter.numel());
  return *at;
}

Unit::Place Unit::stepped_at(const nn::Parameter& parameter) const {
  const Members* flat = flattened(parameter);
  return flat != nullptr ? Place{flat, 0} : place(parameter);
}

void Unit::set_order(const nn::Parameter& parameter, MemberOrder order) {
  if (const Place* at = placed(parameter)) members_of(*at->members->group).order[at->index] = order;
}

void Unit::add_slots(const nn::Parameter& parameter, const std::vector<Slot>& slots) {
  const Place* at = placed(parameter);
  if (at == nullptr) return;
  std::vector<Slot>& known = members_of(*at->members->group).slots[at->index];
  for (const Slot& slot : slots)
    if (std::ranges::find(known, slot) == known.end()) known.push_back(slot);
}

void Unit::leave_slots(const std::unordered_set<const nn::Parameter*>& held) {
  for (Members& m : members_)
    for (std::size_t i = 0; i < m.parameters.size(); ++i) {
      std::erase_if(m.slots[i], [&](const Slot& slot) {
        return held.contains(slot.get()) && slot->id() != m.parameters[i].id();
      });
      if (m.slots[i].empty()) m.slots[i] = {std::make_shared<const nn::Parameter>(m.parameters[i])};
    }
}

const Members* Unit::flattened(const nn::Parameter& parameter) const {
  for (const Members& m : members_)
    if (m.flat.defined() && m.flat == parameter) return &m;
  return nullptr;
}

void Unit::check_changeable() const {
  refuse_summoned("a module is moved or cast");
  const Plan& plan = Engine::current().plan();
  for (const auto& group : groups_) {
    bool used = running();
    group->each_gathered([&](const Gathered& gathered) { used |= plan.concerns(gathered); });
    check<StateError>(
        !used,
        "fully_shard: a module with '{}' is moved or cast within a forward or backward that uses "
        "it; do that between them",
        group->spec().names[0]);
  }
}

void Unit::replace(const std::function<Tensor(const Tensor&)>& change) {
  const NoGrad guard;
  struct Fresh {
    std::shared_ptr<ParameterGroup> group;  // the old one, if `change` leaves its shard
    std::vector<Tensor> grads;              // of what is stepped
  };
  const auto stepped = [](const Members& m) { return m.flat.defined() ? std::vector{m.flat} : m.parameters; };
  std::vector<Fresh> fresh;
  for (const Members& m : members_) {
    const Tensor shard = change(m.group->shard());
    const bool same = &shard.storage() == &m.group->shard().storage();
    Fresh& f = fresh.emplace_back(same ? m.group : std::make_shared<ParameterGroup>(m.group->spec(), shard),
                                  std::vector<Tensor>{});
    for (const nn::Parameter& p : stepped(m))
      f.grads.push_back(p.grad().defined() ? change(p.grad()) : Tensor{});
    if (same) continue;
    for (std::size_t i = 0; i < f.grads.size(); ++i)
      (m.flat.defined() ? f.group->flat() : f.group->local(i)).set_grad(f.grads[i]);
    f.group->take_over(*m.group, change);
  }
  groups_.clear();
  for (std::size_t g = 0; g < members_.size(); ++g) {
    Members& m = members_[g];
    const auto old = std::exchange(m.group, fresh[g].group);
    if (m.group == old) {
      groups_.push_back(old);
    } else {
      old->each_gathered([](Gathered& gathered) {
        gathered.shard_written();
        gathered.end_all();
      });
      old->retire();
      m.used = {};
      bind(m);
    }
    std::vector<nn::Parameter> parameters = stepped(m);
    for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i].set_grad(fresh[g].grads[i]);
    if (m.group == old) m.group->take_over(*old, change);  // gradients may have moved without the shard
  }
}

// ---- switches ----

void Unit::set_synchronising(bool synchronising) {
  synchronising_ = synchronising;
  apply_synchronising();
}
void Unit::begin_no_sync() {
  ++no_syncs_;
  apply_synchronising();
}
void Unit::end_no_sync() {
  --no_syncs_;
  apply_synchronising();
}
void Unit::apply_synchronising() {
  for (const auto& group : groups_) group->switches.synchronising = synchronising_ && no_syncs_ == 0;
}

// ---- forward ----

void Unit::join(const Unit& outer, std::string_view name) {
  const bool moves = root_ != outer.root_;
  if (!moves && !outer.label_.empty()) return;
  label_ = outer.label_.empty() ? std::string(name)
           : name.empty()       ? outer.label_
                                : fmt::format("{}.{}", outer.label_, name);
  if (moves) {
    outer.root_->take_over(*root_);
    root_ = outer.root_;
    root_->add(shared_from_this());
    Engine::current().note_root_changed();
  }
  compute_in(root_->precision());
  for (const auto& group : groups_) {
    group->set_root(root_);
    group->set_name_in_model(label_.empty() ? "root" : label_);
  }
}

void Unit::gather_ahead(int groups) {
  policy_.schedule.gather_ahead(groups);
  root_->gather_ahead(groups);
}

void Unit::leave_root() {
  if (running()) return;
  root_ = std::make_shared<Root>(policy_.schedule);
  root_->add(shared_from_this());
  Engine::current().add(root_);
  Engine::current().note_root_changed();
  label_.clear();
  below_.forget();
  compute_in(root_->precision());
  for (const auto& group : groups_) {
    group->set_root(root_);
    group->set_name(policy_.type);
  }
}

/// All units of a root compute in the precision of the module that runs as one, and so do its buffers.
void Unit::begin_root(nn::Module& root) {
  check_steps(step_check_, root);
  below_.look(root, *this);
  const auto units = root_->units();
  for (const auto& unit : units) {
    unit->write_back();
    unit->check_gradients();
  }
  const Precision precision = root.training() ? Precision::reduced : policy_.evaluation;
  if (root_->compute_in(precision))
    for (const auto& unit : units) unit->compute_in(precision);
  below_.cast_buffers(root, *this, precision);
}

/// What is on `meta` computes shapes alone, from inputs on `meta`.
void Unit::check_values(const nn::Module& module, std::span<Tensor* const> inputs) const {
  for (const auto& group : groups_) {
    if (!nn::on_meta(group->shard())) continue;
    for (const Tensor* input : inputs)
      check<DeviceError>(!input->defined() || nn::on_meta(*input),
                         "{}: its parameters are on meta and have no values, an input is on {}; call "
                         "materialize() of the sharded module first",
                         module.type_name(), input->device());
  }
}

void Unit::cast_inputs(std::span<Tensor* const> inputs, bool root) const {
  const bool cast =
      policy_.param_dtype && root_->precision() == Precision::reduced &&
      (policy_.input_cast == InputCast::always || (policy_.input_cast == InputCast::when_root && root));
  for (Tensor* input : inputs) {
    if (!input->defined()) continue;
    if (root && policy_.device && input->device() != *policy_.device) *input = to(*input, *policy_.device);
    if (cast && is_floating(input->dtype())) *input = to(*input, *policy_.param_dtype);
  }
}

void Unit::check_complete(const nn::Module& module) const {
  check<StateError>(
      !abandoned_,
      "{}: the FullyShardedDataParallel that sharded it threw before it had sharded the modules around it; "
      "make the model anew",
      module.type_name());
}

void Unit::enter(nn::Module& module, std::span<Tensor* const> inputs) {
  check_complete(module);
  refuse_summoned("a forward begins");
  check_values(module, inputs);
  const bool root = !root_->running();
  if (root) begin_root(module);
  if (root) refuse_in_frames("compile: a sharded model begins inside; compile the model itself");
  if (recording_region()) refuse_in_frames("compile: a sharded module runs within recompute");
  enter(root ? below_.tied() : std::vector<std::shared_ptr<ParameterGroup>>{}, capturing());
}

void Unit::before_forward(nn::Module&, std::span<Tensor* const> inputs) {
  repeat_begin();
  begin_use();
  cast_inputs(inputs, root_->depth() == 1);  // in a program an op, so behind what is done at its mark
}

void Unit::enter(std::span<const std::shared_ptr<ParameterGroup>> tied, bool in_program) {
  running_.push_back(in_program);
  root_->enter(Engine::current(), tied);
}

void Unit::begin_use() {
  for (const auto& group : groups_) root_->begin_use(Engine::current(), *group);
}

AfterForward Unit::after_forward_of(const ParameterGroup& group) const {
  // For a backward: without gradients none comes, and what is kept in full precision would be read unnoticed.
  const bool stays = group.switches.stays_after_forward && Context::current().grad_enabled() &&
                     root_->precision() == Precision::reduced;
  return stays ? AfterForward::keep : policy_.after_forward;
}

void Unit::end_use() {
  const bool root = root_->depth() == 1;
  for (const auto& group : groups_)
    root_->end_use(*group, root ? AfterForward::keep : after_forward_of(*group));
}

void Unit::leave(std::span<Tensor* const> outputs) {
  running_.pop_back();
  root_->leave(outputs);
}

void Unit::after_forward(nn::Module&, std::span<Tensor* const> outputs) {
  repeat_end();
  end_use();
  if (policy_.output_dtype)
    for (Tensor* output : outputs)
      if (output->defined() && is_floating(output->dtype())) *output = to(*output, *policy_.output_dtype);
}

void Unit::leave(nn::Module&, std::span<Tensor* const> outputs) { leave(outputs); }

Phase Unit::phase() const {
  if (!running_.empty()) return Phase::forward;
  const bool in_backward =
      std::ranges::any_of(groups_, [](const auto& group) { return group->in_use().leased(Lease::backward); });
  return in_backward ? Phase::backward : Phase::idle;
}

// A compiled forward around this one has it in its program, or what comes between entering and leaving.

std::string Unit::name_of_mark(std::string_view moment) const {
  return fmt::format("{} {}", moment, label_.empty() ? "root" : label_);
}

void Unit::repeat_begin() {
  if (!capturing()) return;
  const bool whole = running_.back();
  const auto begin = [weak = weak_from_this(), whole] {
    const auto unit = weak.lock();
    if (!unit) return;
    if (whole) unit->refuse_summoned("a forward begins");
    if (whole) unit->enter({}, false);
    try {
      unit->begin_use();
    } catch (...) {
      if (whole) unit->give_up();
      throw;
    }
  };
  const auto undo = [weak = weak_from_this()] {
    if (const auto unit = weak.lock()) unit->give_up();
  };
  begin_in_frames(name_of_mark("begin"), begin, whole ? std::function<void()>(undo) : nullptr);
}

void Unit::repeat_end() {
  if (!capturing()) return;
  end_in_frames(name_of_mark("end"), [weak = weak_from_this(), whole = bool(running_.back())] {
    const auto unit = weak.lock();
    if (!unit) return;
    unit->end_use();
    if (whole) unit->leave({});
  });
}

/// A backward from there would reach the forward on ranks alone whose graphs read parameters.
void Unit::result_unknown(nn::Module& module, std::string_view type) {
  check<NotImplementedError>(
      root_->depth() > 1 || !root_->trains(),
      "fully_shard: forward of {} returns a {}, in which no tensors are found, so that backwards from them "
      "would not be noticed on every rank; give its namespace a function tensors_in({}&, visit) "
      "(nn/tensors_in.h), return tensors, or run it under NoGrad",
      module.type_name(), type, type);
}

void Unit::forward_failed(nn::Module&) noexcept {
  refuse_in_frames("compile: a sharded module's forward throws inside");
  give_up();
}

/// The innermost forward under way is over, and has not come to its end.
void Unit::give_up() noexcept {
  if (running_.empty()) return;
  running_.pop_back();
  root_->fail(groups_);
}

/// What its hooks cast follows from these.
void Unit::add_guards(std::vector<std::uint64_t>& words) const {
  words.push_back(static_cast<std::uint64_t>(root_->precision()));
  words.push_back(root_->depth() == 1 ? 1 : 0);
}

// ---- what lists and users see of the parameters ----

std::vector<nn::NamedParameter> Unit::own_parameters() const {
  std::vector<nn::NamedParameter> own;
  for (const Members& m : members_)
    if (m.flat.defined() && m.summoned.empty()) own.push_back({"_flat_param", m.flat});
  return own;
}

bool Unit::hides(const nn::Parameter& parameter) const {
  const Place* at = placed(parameter);
  return at != nullptr && at->members->flat.defined() && at->members->summoned.empty();
}

Tensor Unit::data(const nn::Parameter& parameter) const {
  const Place* at = placed(parameter);
  if (at == nullptr) return parameter.local().detach();
  if (!at->members->summoned.empty()) return parameter.tensor().detach();
  ParameterGroup& group = *at->members->group;
  const Gathered& gathered = group.in_use();
  const bool shown = gathered.is_shard_itself() || (gathered.here() && gathered.leased(Lease::module)) ||
                     gathered.shown() || (gathered.here() && kept_for_backward(group));
  return shown ? parameter.tensor().detach() : parameter.local().detach();
}

Tensor Unit::state(const nn::Parameter& parameter) const {
  const Place* at = placed(parameter);
  const bool whole = at != nullptr && !at->members->summoned.empty();
  return (whole ? parameter.tensor() : parameter.local()).detach();
}

/// Between a forward that keeps what it gathered and its backward, by policy: also where this rank wrote.
bool Unit::kept_for_backward(ParameterGroup& group) const {
  const bool keeps = group.switches.stays_after_forward || policy_.after_forward == AfterForward::keep;
  return keeps && group.spec().partition.ranks() > 1 && group.in_use().leased(Lease::forward);
}

void Unit::let_go() {
  for (const auto& group : groups_)
    group->each_gathered([](Gathered& gathered) {
      for (const Lease owner : {Lease::forward, Lease::policy, Lease::list}) gathered.end(owner);
    });
}

void Unit::set_whole(const nn::Parameter& parameter, const Tensor& whole) {
  const NoGrad guard;
  const auto [members, index] = place(parameter);
  const Tensor part = members->group->part_of(index, whole);
  if (!members->summoned.empty()) {
    copy_(members->summoned[index].detach(), whole);
    return;
  }
  before_write();
  copy_(parameter.local().detach(), part);
}

void Unit::before_write() {
  refuse_summoned("parameters are written");
  if (capturing())
    repeat_in_replays([groups = std::vector<std::weak_ptr<ParameterGroup>>(groups_.begin(), groups_.end())] {
      for (const auto& weak : groups)
        if (const auto group = weak.lock()) written(*group);
    });
  if (ParameterGroup* group = EarlySteps::current().in_walk()) {
    group->each_gathered([](Gathered& gathered) { gathered.shard_written_here(); });
    return;
  }
  for (const auto& group : groups_) written(*group);
}

std::vector<Group> Unit::ranks(const nn::Parameter& parameter) const {
  const Ranks& ranks = stepped_at(parameter).members->group->spec().ranks;
  std::vector<Group> groups;
  for (const Group& group : {ranks.shard, ranks.replicas})
    if (group.defined() && group.size() > 1) groups.push_back(group);
  return groups;
}

void Unit::zeroed(const nn::Parameter& parameter) {
  const auto [members, index] = stepped_at(parameter);
  members->group->gradients().zeroed(index);
}

void Unit::check_steppable(const nn::Parameter& parameter) const {
  check<StateError>(
      !hides(parameter),
      "fully_shard: a parameter of shape {} is part of a flat parameter, which has its gradient; make "
      "the optimizer after FullyShardedDataParallel, or pass use_orig_params",
      parameter.shape());
  check<StateError>(
      !EarlySteps::current().claims(parameter),
      "fully_shard: a parameter of shape {} is stepped within backwards (StepInBackward), so its "
      "gradient cannot be stepped, clipped or unscaled after them; end that scope",
      parameter.shape());
  const auto [members, index] = stepped_at(parameter);
  ParameterGroup& group = *members->group;
  if (!group.spec().ranks.shard.defined() || !group.gradients().own(index)) return;
  refuse_summoned("whole gradients are stepped or clipped");
  fail<StateError>("fully_shard: {}", explain(parameter, nn::WholeOf::gradient));
}

void Unit::check_gradient_taken(const nn::Parameter& parameter) const {
  check<StateError>(
      !hides(parameter),
      "set_grad: a parameter of shape {} is part of a flat parameter, which has the gradient of "
      "all in it; set that one's (FullyShardedDataParallel::flat_param), or pass use_orig_params",
      parameter.shape());
}

std::string Unit::explain(const nn::Parameter& parameter, nn::WholeOf whole) const {
  const Place* at = placed(parameter);
  const std::string name = at == nullptr ? "_flat_param" : at->members->group->spec().names[at->index];
  switch (whole) {
    case nn::WholeOf::values:
      return "sharded parameters take this rank's parts here; load whole values with "
             "shard::load_full_state_dict";
    case nn::WholeOf::optimizer_state:
      return "sharded parameters take the state of this rank's parts here; load a whole one with "
             "shard::load_full_optimizer_state";
    case nn::WholeOf::gradient:
      return fmt::format(
          "the gradient of '{}' is this rank's own, of shape {}, from a backward without synchronisation "
          "(no_sync); run one that averages before the step, or clear it",
          name, parameter.grad().shape());
    case nn::WholeOf::clone:
      return fmt::format(
          "'{}' of shape {} was sharded with a module that is not cloned with it; clone that module, or load "
          "its full_state_dict into a new one",
          name, parameter.shape());
  }
  return {};
}

/// A flat parameter is trained as a whole: the parameters in it follow it.
void Unit::requires_grad_changed(const nn::Parameter& parameter) {
  if (const Members* flat = flattened(parameter)) {
    for (nn::Parameter p : flat->parameters) p.set_requires_grad(parameter.requires_grad());
    return;
  }
  const auto [members, index] = place(parameter);
  if (!members->flat.defined() || members->flat.requires_grad() == parameter.requires_grad()) return;
  nn::Parameter(parameter).set_requires_grad(members->flat.requires_grad());
  fail<StateError>(
      "fully_shard: '{}' is part of a flat parameter, which is trained or frozen as a whole; freeze that "
      "one, or pass "
      "use_orig_params",
      members->group->spec().names[index]);
}

nn::Parameter Unit::stepped_as(const nn::Parameter& parameter) const {
  const Place* at = placed(parameter);
  return at != nullptr && at->members->flat.defined() ? at->members->flat : parameter;
}

void Unit::member_moved(const nn::Parameter& parameter, const nn::Parameter* from, const Slot& to) noexcept {
  const Place* at = placed(parameter);
  if (at == nullptr) return;  // a flat parameter is no member's
  auto& slots = members_of(*at->members->group).slots[at->index];
  std::ranges::replace_if(slots, [&](const Slot& slot) { return slot.get() == from; }, to);
}

std::shared_ptr<nn::ModuleExtension> Unit::clone(const nn::ClonedParameters& cloned) const {
  const NoGrad guard;
  refuse_summoned("a module is cloned");
  std::vector<Members> members;
  for (const Members& m : members_) {
    Members copy{
        std::make_shared<ParameterGroup>(m.group->spec(), sherd::clone(m.group->shard())), {}, m.order, {}};
    copy.group->set_name(m.group->label());
    copy.group->switches = m.group->switches;
    copy.group->switches.forward_prefetch = copy.group->switches.backward_prefetch = {};
    copy.group->step_check = m.group->step_check;
    for (std::size_t i = 0; i < m.parameters.size(); ++i) {
      copy.parameters.push_back(cloned.object(m.parameters[i]));
      copy.slots.emplace_back();
      for (const Slot& slot : m.slots[i])
        if (const Slot its = cloned.slot(slot.get())) copy.slots.back().push_back(its);
    }
    members.push_back(std::move(copy));
  }
  auto unit = make(policy_, std::move(members));
  unit->step_check_ = step_check_;
  for (std::size_t i = 0; i < members_.size(); ++i)
    if (const nn::Parameter& flat = members_[i].flat; flat.defined())
      unit->members_[i].flat.step_count() = flat.step_count();
  unit->set_synchronising(synchronising_);  // scopes stay with the original
  return unit;
}

}  // namespace sherd::shard
