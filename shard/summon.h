// A scope in which sharded parameters are whole: to look at them, to change them, to use them outside
// forwards.
#pragma once

#include <memory>
#include <vector>

#include "nn/module.h"

namespace sherd::shard {

/// For `summon_full_params`. With the names of FSDP1's.
struct SummonOptions {
  bool writeback = true;        ///< what is written in the scope is kept: each rank keeps its part of its own
  bool rank0_only = false;      ///< the other ranks see their parts, and do not keep what was gathered
  bool offload_to_cpu = false;  ///< whole values lie on `cpu:0`, not where the module computes
  bool with_grads = false;  ///< averaged gradients are whole too; a rank's own (`no_sync`) are as they are
  bool recurse = true;      ///< of the modules below, too
};

/// While it lives, `data()` and `tensor()` of the module's parameters are whole, in the dtype in which they
/// are stored and in memory of their own; lists name the parameters in a flat one. Values are written through
/// `data()`, `set_data` or `nn::init`, not through `local()`; forwards, backwards, optimizers, loading,
/// moving and cloning wait until the scope ends (StateError). Collective over the parameters' groups when it
/// begins; its end makes no call. StateError in a forward or backward, within another such scope, and for
/// parameters that were sharded with a module around this one; ValueError for `rank0_only` with `writeback`,
/// and for `with_grads` of one flat parameter; what replaced parameters may not be, as at a forward.
class SHERD_API SummonFullParams {
 public:
  explicit SummonFullParams(nn::Module& module, SummonOptions options = {});
  /// ShapeError for a gradient of another shape than the whole's, if nothing else is being thrown.
  ~SummonFullParams() noexcept(false);
  SummonFullParams(const SummonFullParams&) = delete;
  SummonFullParams& operator=(const SummonFullParams&) = delete;

 private:
  struct Summoned;
  void restore();
  SummonOptions options_;
  int exceptions_;
  std::vector<std::unique_ptr<Summoned>> summoned_;
};

[[nodiscard]] inline SummonFullParams summon_full_params(nn::Module& module, SummonOptions options = {}) {
  return SummonFullParams(module, options);
}

}  // namespace sherd::shard
