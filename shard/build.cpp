#include "shard/build.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "autograd/node.h"
#include "collectives/world.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "shard/flat_param_handle.h"
#include "shard/share.h"

namespace sherd::shard {
namespace {

/// How many modules this rank has sharded.
struct BuildCounter {
  std::uint64_t last = 0;
};

class Finder final : public nn::MemberVisitor {
 public:
  explicit Finder(Found& found) : found_(found) {}
  void param(std::string_view name, nn::Param& member) override {
    if (!member.defined()) return;
    check_kept(prefix_ + std::string(name), member.object());
    const auto [place, first] = seen_.emplace(member.object().id(), found_.parameters.size());
    if (first) found_.parameters.push_back({prefix_ + std::string(name), &member});
    found_.parameters[place->second].slots.push_back(member.shared_slot());
    found_.parameters[place->second].names.push_back(prefix_ + std::string(name));
  }
  void buffer(std::string_view name, nn::Buffer& member) override {
    if (member.tensor().defined()) found_.buffers.push_back({prefix_ + std::string(name), &member});
  }
  void child(std::string_view name, nn::Module& member) override {
    const std::string outer = std::exchange(prefix_, prefix_ + std::string(name) + ".");
    member.visit_members(*this);
    prefix_ = outer;
  }

 private:
  Found& found_;
  std::string prefix_;
  std::unordered_map<const void*, std::size_t> seen_;
};

/// Undefined outside a world.
DeviceMesh mesh_of(const Options& options) {
  World* const world = options.mesh.dimensions() == 0 ? World::current_or_null() : nullptr;
  return world != nullptr ? world->mesh() : options.mesh;
}

Ranks ranks_of(const DeviceMesh& mesh, const Options& options) {
  if (mesh.dimensions() == 0) return {};
  check<ValueError>(mesh.dimensions() <= 2,
                    "fully_shard: a mesh of {} dimensions; it takes one (shards), or two (replicas, shards): "
                    "pass a slice",
                    mesh.dimensions());
  const auto several = [](const Group& group) { return group.size() > 1 ? group : Group{}; };
  Ranks ranks;
  if (options.strategy == ShardingStrategy::no_shard) {
    ranks.replicas = several(mesh.all());
  } else {
    ranks.shard = several(mesh.group(mesh.names().back()));
    if (mesh.dimensions() == 2) ranks.replicas = several(mesh.group(mesh.names()[0]));
  }
  return ranks;
}

/// The rule of `reshard_after_forward`, as a policy of the strategy.
AfterForward after_forward(const Options& options, int shard_size) {
  const bool full = options.strategy == ShardingStrategy::full_shard;
  const int k = options.reshard_after_forward.ranks().value_or(shard_size);
  check<ValueError>(k > 0 && (!full || shard_size % k == 0),
                    "If passing reshard_after_forward as an int, it should be a factor of {}, not {}",
                    shard_size, k);
  if (!full) return AfterForward::keep;
  if (!options.reshard_after_forward.ranks()) return AfterForward::free;
  if (k == 1) return AfterForward::keep;
  return k == shard_size ? AfterForward::free : AfterForward::slice;
}

/// Nothing else has averaged, or will average, what these parameters' gradients are.
void check_untouched(std::span<const FoundParameter> parameters) {
  for (const FoundParameter& p : parameters) {
    check<StateError>(
        !p.member->object().grad().defined(),
        "fully_shard: '{}' has a gradient, which is not an average over the ranks; shard before the "
        "first backward, or zero_grad() first",
        p.name);
    check<StateError>(sink_of(p.member->local()) == nullptr,
                      "fully_shard: '{}' gives its gradient to a sink already (a living DataParallel, or "
                      "set_sink), and both would average it; end that before the module is sharded",
                      p.name);
  }
}

/// A module that was sharded after one around it would have no parameters left, and nothing would say so.
/// Members that a unit elsewhere knows are known from a module around, if not from a unit below.
void check_inner_first(nn::Module& module, std::span<const FoundParameter> parameters) {
  std::unordered_set<const Unit*> below;
  std::unordered_set<std::string> modules;  // theirs
  for (const NamedUnit& u : units_of(module)) below.insert(u.unit), modules.insert(u.name);
  const auto within_one = [&](const std::string& name) {
    for (std::size_t dot = name.find('.'); dot != std::string::npos; dot = name.find('.', dot + 1))
      if (modules.contains(name.substr(0, dot))) return true;
    return false;
  };
  for (const FoundParameter& p : parameters) {
    const nn::Parameter& object = p.member->object();
    Unit* const keeper = unit_of(object);
    if (keeper == nullptr || below.contains(keeper)) continue;
    const Unit::Place place = keeper->place(object);
    const std::vector<Slot>& known = place.members->slots[place.index];
    for (std::size_t i = 0; i < p.slots.size(); ++i)
      check<StateError>(
          within_one(p.names[i]) || std::ranges::find(known, p.slots[i]) == known.end(),
          "fully_shard: '{}' of {} was sharded as '{}' of {}, which holds this module; shard inner "
          "modules first, {} before {}",
          p.name, module.type_name(), place.members->group->spec().names[place.index], keeper->policy().type,
          module.type_name(), keeper->policy().type);
  }
}

/// The first rank's values for all: unit by unit, so that a rank on `meta` never has the whole model.
void synchronise(const Found& found, const Ignored& ignored, const Group& ranks, const Options& options) {
  // What is one tensor on `meta` stays one: `share` sends it once.
  std::map<std::tuple<std::uint64_t, std::int64_t, std::int64_t>, Tensor> received;
  const auto receive = [&](const Tensor& t, const std::string& name) {
    if (t.device().type != DeviceType::meta) return t;
    check<DeviceError>(
        ranks.rank() != 0,
        "fully_shard: sync_module_states would give all ranks this one's '{}', which is on meta "
        "and has no values; materialize() the module first, or on all ranks after sharding",
        name);
    Tensor& given = received[{t.storage().id(), t.layout().offset, t.numel()}];
    if (!given.defined()) given = empty({t.shape(), t.dtype(), options.device.value_or(Device::cpu())});
    return reshape(given, t.shape());
  };
  const NoGrad guard;
  std::vector<Tensor> values;
  for (const FoundParameter& p : found.parameters) {
    const Tensor t = p.member->local().detach();
    values.push_back(receive(t, p.name));
    if (values.back().device() != t.device()) p.member->set_data(values.back());
  }
  for (const FoundBuffer& b : found.buffers) {
    if (ignored.covers(b.name)) continue;
    const Tensor t = b.member->tensor();
    values.push_back(receive(t, b.name));
    if (values.back().device() != t.device()) b.member->set(values.back());
  }
  if (ranks.size() > 1) share(std::move(values), ranks, {.label = "module states"});
}

/// A shard lies on one device; on `meta`, where nothing has values, beside others they would be lost.
void check_one_device(std::span<const FoundParameter> parameters) {
  const FoundParameter& first = parameters[0];
  for (const FoundParameter& p : parameters)
    check<DeviceError>(
        p.member->local().device() == first.member->local().device(),
        "fully_shard: parameters of a group lie on one device; '{}' is on {}, '{}' on {}: move or "
        "materialize() the module",
        first.name, first.member->local().device(), p.name, p.member->local().device());
}

/// Takes this rank's part of whole parameters; what lies between and behind them is padding.
void fill_shard(const ParameterGroup& group, std::span<const Tensor> whole) {
  if (group.shard().device().type == DeviceType::meta) return;
  const std::vector<Padding>& padding = group.spec().partition.padding();
  fill_(group.shard(), padding.empty() ? 0 : padding[0].value);
  for (std::size_t i = 0; i < whole.size(); ++i) copy_(group.local(i).detach(), group.part_of(i, whole[i]));
}

/// None: as it is stored.
std::optional<DType> computed_in(const FoundParameter& p, const Options& options) {
  const MixedPrecisionPolicy& precision = options.mixed_precision;
  if (!precision.param_dtype_override) return precision.param_dtype;
  const auto own = precision.param_dtype_override(p.name, p.member->object());
  check<DTypeError>(!own || is_floating(*own),
                    "fully_shard: param_dtype_override gives {} for '{}'; parameters compute in floats",
                    own ? name_of(*own) : "", p.name);
  return own ? own : precision.param_dtype;
}

/// The flat layout's, over all parameters of a unit, which are of one dtype then.
Partition flat_partition(std::span<const FoundParameter> found, const nn::Module& module,
                         std::optional<DType> param_dtype, const UnitForm& form, int ranks) {
  std::vector<nn::Parameter> parameters;
  for (const FoundParameter& p : found) parameters.push_back(p.member->object());
  return FlatParamHandle(
             parameters, module,
             {.ranks = ranks, .param_dtype = param_dtype, .use_orig_params = !form.one_flat_param})
      .partition();
}

Members make_group(std::span<const FoundParameter> parameters, const nn::Module& module,
                   const Options& options, const UnitForm& form, const Ranks& ranks) {
  check_one_device(parameters);
  std::vector<Shape> shapes;
  for (const FoundParameter& p : parameters) {
    shapes.push_back(p.member->object().shape());
    check<ShapeError>(
        options.layout == GroupLayout::flat || shapes.back().rank() > 0,
        "fully_shard: '{}' has no dimension to cut it along; give it the shape (1), or use the flat layout",
        p.name);
  }
  const int shards = RankOfGroup(ranks.shard).ranks;
  const std::optional<DType> param_dtype = computed_in(parameters[0], options);
  GroupSpec spec{.layout = options.layout,
                 .partition = options.layout == GroupLayout::flat
                                  ? flat_partition(parameters, module, param_dtype, form, shards)
                                  : Partition::per_parameter(shapes, shards),
                 .ranks = ranks,
                 .param_dtype = param_dtype,
                 .reduce_dtype = options.mixed_precision.reduce_dtype,
                 .keep_low_precision_grads = options.mixed_precision.keep_low_precision_grads,
                 .compute_device = options.compute_device,
                 .reduce_at_end = options.strategy == ShardingStrategy::zero1,
                 .one_flat_param = form.one_flat_param,
                 .unused = options.layout == GroupLayout::flat ? Unused::zeros : Unused::none,
                 .backward_gather = options.backward_gather};
  Members members;
  std::vector<Tensor> whole;
  const NoGrad guard;
  for (const FoundParameter& p : parameters) {
    const Tensor value = p.member->local().detach();
    const bool moves = options.device && value.device().type != DeviceType::meta;
    whole.push_back(moves ? to(value, *options.device) : value);
    spec.names.push_back(p.name);
    members.parameters.push_back(p.member->object());
  }
  spec.shapes = std::move(shapes);
  const Tensor shard = empty({spec.partition.shard_numel()}, {whole[0].dtype(), whole[0].device()});
  members.group = std::make_shared<ParameterGroup>(std::move(spec), shard);
  members.group->set_name(std::string(module.type_name()));  // its name follows with a root
  fill_shard(*members.group, whole);
  return members;
}

/// Says by devices what `cpu_offload` says.
Options with_devices(Options options) {
  if (!options.cpu_offload) return options;
  check<ValueError>(
      options.device.has_value(),
      "fully_shard: cpu_offload keeps shards on cpu:0 and computes on `device`, which is not given");
  check<ValueError>(!options.compute_device,
                    "fully_shard: cpu_offload computes on `device`, {}, and compute_device is given too, {}; "
                    "leave one out",
                    *options.device, options.compute_device.value_or(*options.device));
  options.compute_device = std::exchange(options.device, Device::cpu());
  return options;
}

/// Numbers all parameters of a module in the order of its members, also those of units within, and says which
/// members have them.
void number(std::span<const FoundParameter> parameters) {
  const std::uint64_t root = ++Context::current().slot<BuildCounter>().last;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const nn::Parameter& p = parameters[i].member->object();
    if (auto* unit = dynamic_cast<Unit*>(p.owner())) {
      unit->set_order(p, {root, i});
      unit->add_slots(p, parameters[i].slots);
    }
  }
}

/// What `options` and the units below leave to the program, by names.
Ignored ignored_in(nn::Module& module, const Options& options) {
  Ignored ignored;
  std::unordered_set<const void*> listed;
  for (const nn::Parameter& p : options.ignored_parameters) listed.insert(p.id());
  check<ValueError>(std::ranges::find(options.ignored_modules, nullptr) == options.ignored_modules.end(),
                    "fully_shard: a module of ignored_modules is null");
  // Under whatever names: one is tied to a parameter that is used elsewhere.
  for (const nn::Module* m : options.ignored_modules)
    for (const nn::Parameter& p : m->parameters()) listed.insert(p.id());
  for (const nn::NamedModule& m : module.named_modules()) {
    const Unit* const unit = unit_of(*m.module);
    if (unit != nullptr) ignored.add(m.name, unit->policy().ignored);
    if (std::ranges::find(options.ignored_modules, m.module) == options.ignored_modules.end()) continue;
    check<ValueError>(!m.name.empty() && unit == nullptr,
                      "fully_shard: the ignored module '{}' ({}) is {}; leave it out of ignored_modules",
                      m.name, m.module->type_name(),
                      m.name.empty() ? "the one that is sharded" : "sharded already");
    ignored.modules.insert(m.name);
  }
  for (const FoundParameter& p : find_members(module).parameters) {
    const nn::Parameter& object = p.member->object();
    check<ValueError>(!listed.contains(object.id()) || object.owner() == nullptr,
                      "fully_shard: the ignored parameter '{}' is sharded already; ignore it in that call "
                      "too, or leave it and its module out of ignored_parameters and ignored_modules",
                      p.name);
    const bool is_ignored =
        listed.contains(object.id()) ||
        std::ranges::any_of(p.names, [&](const std::string& name) { return ignored.covers(name); });
    if (is_ignored && object.owner() == nullptr && !ignored.covers(p.name)) ignored.parameters.insert(p.name);
  }
  return ignored;
}

void keep_to_shard(std::vector<FoundParameter>& found, const Ignored& ignored) {
  std::erase_if(found, [&](const FoundParameter& p) {
    return p.member->object().owner() != nullptr || ignored.covers(p.name);
  });
}

}  // namespace

Found find_members(nn::Module& module) {
  Found found;
  Finder finder(found);
  module.visit_members(finder);
  return found;
}

std::vector<FoundParameter> to_shard(nn::Module& module, const Options& options) {
  write_back(module);
  std::vector<FoundParameter> found = find_members(module).parameters;
  keep_to_shard(found, ignored_in(module, options));
  return found;
}

void build_unit(nn::Module& module, const Options& given, const UnitForm& form) {
  check<StateError>(
      !module.extension(),
      "fully_shard: {} is sharded already; a module is sharded once, by one rank: each makes its own",
      module.type_name());
  const Options options = with_devices(given);
  write_back(module);  // else what was put in the place of an inner unit's would be taken for a whole one
  Found found = find_members(module);
  const std::vector<FoundParameter> all = found.parameters;
  Ignored ignored = ignored_in(module, options);
  keep_to_shard(found.parameters, ignored);
  check_inner_first(module, all);
  check_untouched(found.parameters);
  const DeviceMesh mesh = mesh_of(options);
  Ranks ranks = ranks_of(mesh, options);
  const MixedPrecisionPolicy& precision = options.mixed_precision;
  const AfterForward after = after_forward(options, RankOfGroup(ranks.shard).ranks);
  if (after == AfterForward::slice)
    ranks.block = Engine::current().block_of(ranks.shard, *options.reshard_after_forward.ranks());

  if (options.sync_module_states && mesh.dimensions() > 0) synchronise(found, ignored, mesh.all(), options);

  // One group a stored dtype and one of computation, in order of appearance; the flat layout takes one stored
  // dtype.
  std::vector<std::vector<FoundParameter>> by_dtype;
  for (const FoundParameter& p : found.parameters) {
    const auto same = std::ranges::find_if(by_dtype, [&](const auto& list) {
      return computed_in(list[0], options) == computed_in(p, options) &&
             (options.layout == GroupLayout::flat ||
              list[0].member->local().dtype() == p.member->local().dtype());
    });
    (same == by_dtype.end() ? by_dtype.emplace_back() : *same).push_back(p);
  }
  check<ValueError>(
      !form.one_flat_param || by_dtype.size() < 2,
      "fully_shard: param_dtype_override gives parameters of {} two dtypes, and a flat parameter has "
      "one; pass use_orig_params",
      module.type_name());
  std::vector<Members> members;
  for (const auto& list : by_dtype) members.push_back(make_group(list, module, options, form, ranks));

  const std::optional<Device> compute_device =
      options.compute_device ? options.compute_device : options.device;
  if (compute_device) {
    const NoGrad guard;
    for (const FoundBuffer& b : found.buffers)
      if (b.member->tensor().device().type != DeviceType::meta && !ignored.covers(b.name))
        b.member->set(to(b.member->tensor(), *compute_device));
  }
  InputCast cast = form.input_cast;
  if (cast == InputCast::with_parameters)
    cast = members.empty() ? form.without_parameters : InputCast::always;
  UnitPolicy policy{.input_cast = cast,
                    .param_dtype = precision.param_dtype,
                    .output_dtype = precision.output_dtype,
                    .buffer_dtype = precision.buffer_dtype,
                    .evaluation = precision.evaluation,
                    .device = compute_device,
                    .strategy = options.strategy,
                    .after_forward = after,
                    .writeback_check = options.writeback_check,
                    .schedule = {options.forward_prefetch, options.backward_prefetch},
                    .ignored = std::move(ignored),
                    .type = std::string(module.type_name())};
  const auto unit = Unit::make(std::move(policy), std::move(members));
  std::vector<Unit*> below;
  for (const NamedUnit& inner : units_of(module)) below.push_back(inner.unit);
  unit->take_into_model(below);
  module.extend(unit);
  number(all);
}

}  // namespace sherd::shard
