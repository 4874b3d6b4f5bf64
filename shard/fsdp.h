// The flat form under its public name: wraps by a rule, with the flat layout's defaults.
#pragma once

#include <concepts>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "shard/fully_shard.h"
#include "shard/summon.h"

namespace sherd::shard {

/// Says which modules become units of their own: any function of a module, or of a module and the number of
/// parameter elements in it that are sharded and that no inner unit took. It is asked about inner modules
/// first, and what they hold by then belongs to their units. Not asked about `ignored_modules`, or within
/// them.
struct AutoWrap {
  std::function<bool(const nn::Module&, std::int64_t numel)> wraps{};
  /// Whether modules within a module are asked about; without a function, always.
  std::function<bool(const nn::Module&)> enters{};

  AutoWrap() = default;
  template <std::predicate<const nn::Module&, std::int64_t> F>
  AutoWrap(F rule) : wraps(std::move(rule)) {}  // NOLINT: a function is a rule
  template <std::predicate<const nn::Module&> F>
  AutoWrap(F rule)  // NOLINT
      : wraps([rule = std::move(rule)](const nn::Module& m, std::int64_t) { return rule(m); }) {}
  explicit operator bool() const { return static_cast<bool>(wraps); }
  /// Modules for which `more` says so become units too, if there is a rule.
  SHERD_API void also_wrap(const std::function<bool(const nn::Module&)>& more);
};
/// Modules of these classes, by `Module::type_name`, of a template with or without its arguments.
SHERD_API AutoWrap wrap_classes(std::set<std::string, std::less<>> type_names);
/// Modules with at least this many elements; no ModuleList, which has no forward of its own, and nothing
/// within a MultiheadAttention, which uses what is in it without running it.
SHERD_API AutoWrap wrap_by_size(std::int64_t min_numel);
/// Every module.
SHERD_API AutoWrap wrap_always();

/// With `auto_wrap` and a mixed precision, batch normalisations become units of their own that compute in the
/// dtype in which they are stored.
struct FsdpOptions {
  /// As for `Options`; with two dimensions full_shard is PyTorch's HYBRID_SHARD.
  DeviceMesh mesh{};
  ShardingStrategy strategy = ShardingStrategy::full_shard;
  AutoWrap auto_wrap{};
  MixedPrecisionPolicy mixed_precision{};
  WritebackCheck writeback_check = WritebackCheck::on;
  std::optional<Device> device{};
  bool cpu_offload = false;
  std::optional<Device> compute_device{};
  /// Whether parameters stay visible by their own names, as slices of the shard; else a unit lists one
  /// `_flat_param`, and needs parameters that are trainable alike.
  bool use_orig_params = false;
  int forward_prefetch = 0;
  BackwardPrefetch backward_prefetch = 1;
  /// As for `Options`.
  bool sync_module_states = false;
  /// As for `Options`, of all units; ignored modules become no units, nor what is within them. ValueError for
  /// what is not in the module.
  std::vector<nn::Parameter> ignored_parameters{};
  std::vector<const nn::Module*> ignored_modules{};
};

/// Shards a module in place, so its type, attributes and names stay; the object is a handle to it, wherever
/// it is moved. StateError from every function when the module is gone.
class SHERD_API FullyShardedDataParallel {
 public:
  explicit FullyShardedDataParallel(nn::Module& module, FsdpOptions options = {});

  nn::Module& module() const;
  /// The forward of a module that maps one tensor to one (else StateError: call the module itself, which is
  /// the same).
  Tensor operator()(const Tensor& x) const { return module().call(x); }
  /// The unit's flat parameter; undefined without one (no parameters, or use_orig_params).
  nn::Parameter flat_param() const;
  void register_comm_hook(CommHook hook) { shard::register_comm_hook(module(), std::move(hook)); }
  [[nodiscard]] NoSync no_sync() { return NoSync(module()); }
  [[nodiscard]] SummonFullParams summon_full_params(SummonOptions options = {}) {
    return SummonFullParams(module(), options);
  }
  Tensor clip_grad_norm_(double max_norm, double norm_type = 2) {
    return shard::clip_grad_norm_(module().parameters(), max_norm, norm_type);
  }

 private:
  std::shared_ptr<nn::Module* const> module_;
};

}  // namespace sherd::shard
