#include "shard/fsdp.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "nn/layers.h"
#include "shard/build.h"
#include "shard/unit.h"

namespace sherd::shard {
namespace {

struct Children final : nn::MemberVisitor {
  std::vector<nn::Module*> modules;
  void child(std::string_view, nn::Module& module) override { modules.push_back(&module); }
};

/// Of parameters that a unit around `module` would take.
std::int64_t numel_left(nn::Module& module, const Options& options) {
  std::int64_t numel = 0;
  for (const FoundParameter& p : to_shard(module, options)) numel += p.member->object().numel();
  return numel;
}

/// Inner modules first.
void wrap_below(nn::Module& module, const AutoWrap& rule, const Options& options,
                const std::function<void(nn::Module&)>& wrap) {
  Children children;
  module.visit_members(children);
  for (nn::Module* child : children.modules) {
    if (std::ranges::find(options.ignored_modules, child) != options.ignored_modules.end()) continue;
    if (!rule.enters || rule.enters(*child)) wrap_below(*child, rule, options, wrap);
    if (const Unit* unit = unit_of(*child))
      unit->check_complete(*child);
    else if (rule.wraps(*child, numel_left(*child, options)))
      wrap(*child);
  }
}

/// Of a template, its name alone.
std::string_view class_of(const nn::Module& module) {
  return module.type_name().substr(0, module.type_name().find('<'));
}

/// What names nothing here was meant for another module, and would be sharded in silence.
void check_ignored(nn::Module& module, const FsdpOptions& options) {
  std::unordered_set<const nn::Module*> modules;
  for (const nn::NamedModule& m : module.named_modules()) modules.insert(m.module);
  for (const nn::Module* m : options.ignored_modules)
    check<ValueError>(modules.contains(m),
                      "FullyShardedDataParallel: {} of ignored_modules is not in {}; leave it out",
                      m != nullptr ? m->type_name() : "a null module", module.type_name());
  std::unordered_set<const void*> parameters;
  for (const FoundParameter& p : find_members(module).parameters) parameters.insert(p.member->object().id());
  for (const nn::Parameter& p : options.ignored_parameters)
    check<ValueError>(
        parameters.contains(p.id()),
        "FullyShardedDataParallel: a parameter of shape {} of ignored_parameters is not in {}; leave "
        "it out",
        p.defined() ? p.shape() : Shape{}, module.type_name());
}

}  // namespace

void AutoWrap::also_wrap(const std::function<bool(const nn::Module&)>& more) {
  if (!wraps) return;
  wraps = [more, rule = wraps](const nn::Module& m, std::int64_t numel) { return more(m) || rule(m, numel); };
}

AutoWrap wrap_classes(std::set<std::string, std::less<>> type_names) {
  return [names = std::move(type_names)](const nn::Module& m) {
    return names.contains(m.type_name()) || names.contains(class_of(m));
  };
}

AutoWrap wrap_by_size(std::int64_t min_numel) {
  AutoWrap rule = [min_numel](const nn::Module& m, std::int64_t numel) {
    return numel >= min_numel && class_of(m) != "ModuleList";
  };
  rule.enters = [](const nn::Module& m) { return class_of(m) != "MultiheadAttention"; };
  return rule;
}

AutoWrap wrap_always() {
  return [](const nn::Module&) { return true; };
}

FullyShardedDataParallel::FullyShardedDataParallel(nn::Module& module, FsdpOptions options)
    : module_(module.whereabouts()) {
  check_ignored(module, options);
  const MixedPrecisionPolicy& precision = options.mixed_precision;
  const Options each{.mesh = options.mesh,
                     .layout = GroupLayout::flat,
                     .strategy = options.strategy,
                     .mixed_precision = precision,
                     .writeback_check = options.writeback_check,
                     .device = options.device,
                     .cpu_offload = options.cpu_offload,
                     .compute_device = options.compute_device,
                     .forward_prefetch = options.forward_prefetch,
                     .backward_prefetch = options.backward_prefetch,
                     .sync_module_states = options.sync_module_states,
                     .ignored_parameters = options.ignored_parameters,
                     .ignored_modules = options.ignored_modules};
  UnitForm form{.one_flat_param = !options.use_orig_params};
  form.without_parameters =
      precision.cast_root_forward_inputs.value_or(true) ? InputCast::when_root : InputCast::never;
  form.input_cast =
      precision.cast_forward_inputs.value_or(false) ? InputCast::with_parameters : form.without_parameters;
  std::vector<Unit*> made;
  const auto wrap = [&](nn::Module& m) {
    Options its = each;
    if (nn::is_batch_norm(m)) its.mixed_precision = {};
    build_unit(m, its, form);
    made.push_back(unit_of(m));
  };
  if (precision.param_dtype || precision.reduce_dtype || precision.buffer_dtype)
    options.auto_wrap.also_wrap(nn::is_batch_norm);
  try {
    if (options.auto_wrap) wrap_below(module, options.auto_wrap, each, wrap);
    wrap(module);
  } catch (...) {  // a second attempt with other options would find these, and leave them as they are
    for (Unit* unit : made) unit->abandon();
    throw;
  }
}

nn::Module& FullyShardedDataParallel::module() const {
  check<StateError>(*module_ != nullptr, "FullyShardedDataParallel: the module of this handle is gone");
  return **module_;
}

nn::Parameter FullyShardedDataParallel::flat_param() const {
  for (const Members& m : unit_of(module())->members())
    if (m.flat.defined()) return m.flat;
  return {};
}

}  // namespace sherd::shard
