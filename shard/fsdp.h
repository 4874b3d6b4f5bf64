// The flat form under its public name: wraps by a rule, with the flat layout's defaults.
#pragma once

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "shard/fully_shard.h"

namespace sherd::shard {

/// Says which modules become units of their own. It is asked about inner modules first, and what they hold by
/// then belongs to their units.
using AutoWrap = std::function<bool(const nn::Module&)>;
/// Modules of these classes, by `Module::type_name`.
SHERD_API AutoWrap wrap_classes(std::set<std::string, std::less<>> type_names);
/// Modules with at least this many parameter elements that no inner unit took.
SHERD_API AutoWrap wrap_by_size(std::int64_t min_numel);
/// Every module.
SHERD_API AutoWrap wrap_always();

struct FsdpOptions {
  /// As for `Options`; with two dimensions full_shard is PyTorch's HYBRID_SHARD.
  DeviceMesh mesh{};
  ShardingStrategy strategy = ShardingStrategy::full_shard;
  AutoWrap auto_wrap{};
  MixedPrecisionPolicy mixed_precision{};
  std::optional<Device> device{};
  /// Whether parameters stay visible by their own names, as slices of the shard; else a unit lists one
  /// `_flat_param`, and needs parameters that are trainable alike.
  bool use_orig_params = false;
  int forward_prefetch = 0, backward_prefetch = 1;
};

/// Shards a module in place, so its type, attributes and names stay; the object is a handle to it, which may
/// not outlive the module.
class SHERD_API FullyShardedDataParallel {
 public:
  explicit FullyShardedDataParallel(nn::Module& module, FsdpOptions options = {});

  nn::Module& module() const { return *module_; }
  /// The unit's flat parameter; undefined without one (no parameters, or use_orig_params).
  nn::Parameter flat_param() const;
  [[nodiscard]] NoSync no_sync() { return NoSync(*module_); }
  Tensor clip_grad_norm_(double max_norm) { return shard::clip_grad_norm_(module_->parameters(), max_norm); }

 private:
  nn::Module* module_;
};

}  // namespace sherd::shard
