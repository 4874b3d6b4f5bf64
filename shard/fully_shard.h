// Sharding a module in place: its type, its names and its use do not change.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "nn/module.h"
#include "shard/options.h"

namespace sherd::shard {

class Gathered;
class Unit;

/// Shards the parameters of `module` that no inner sharded module has: call it for inner modules first, then
/// for the outermost, on every rank alike. From then on `forward` sees whole parameters, in `param_dtype`;
/// `Param::local()` and `.grad()` are this rank's part. Every rank keeps its part of its own values, unless
/// `sync_module_states` is set. A module without parameters left becomes a unit that only casts; StateError
/// if a module that holds it was sharded before. The module owns the shards; a loss may outlive it.
SHERD_API void fully_shard(nn::Module& module, const Options& options = {});

/// Whether `fully_shard` was called with this module.
SHERD_API bool is_sharded(const nn::Module& module);

/// What this rank wants a sharded module's own parameters for, as forwards and hooks may ask.
enum class Phase : std::uint8_t {
  idle,
  forward,   ///< its forward is under way, eagerly or by a program
  backward,  ///< a backward that reaches them is under way and has not left the module yet
};
/// Of a module without parameters of its own, whether its forward is under way. StateError for a module that
/// is not sharded.
SHERD_API Phase phase_of(const nn::Module& module);

/// Whether backwards average gradients. While off, `.grad()` is this rank's own whole gradient, in the reduce
/// dtype (flat layout: in the compute dtype); the next backward with it on averages the sum. For this module
/// and those below.
SHERD_API void set_requires_gradient_sync(nn::Module& module, bool sync);

/// Of shards with replicas, whether reductions go on from the ranks that share the parameters to the
/// replicas. While off, `.grad()` stays as it is, and the sums over shards are kept, in f32 (f64 for f64),
/// until the next backward with it on, which averages all of them; clearing `.grad()` leaves them. Of
/// replicas alone it is `set_requires_gradient_sync`, of shards alone nothing. For this module and those
/// below.
SHERD_API void set_requires_all_reduce(nn::Module& module, bool all_reduce);

/// What sums of gradients over the ranks are divided by, in place of the number of ranks; none: that again.
/// For this module's own parameters, not those of sharded modules below. ValueError unless it is finite and
/// above 0.
SHERD_API void set_gradient_divide_factor(nn::Module& module, std::optional<double> factor);

/// `hook` takes the place of the reductions of this module and those below, one call a parameter (flat
/// layout: a unit), at the end of each backward that averages, in the order of reductions; division is its
/// own. Not called where there is one rank. StateError for shards with replicas, and where there is a hook
/// already.
SHERD_API void register_comm_hook(nn::Module& module, CommHook hook);

/// Which modules' parameters are gathered ahead when `module`'s forward begins, or when a backward comes to
/// its parameters, in place of `forward_prefetch` and `backward_prefetch` groups. What is not gathered in
/// that forward or backward is left out. StateError for a module that is not sharded.
SHERD_API void set_modules_to_forward_prefetch(nn::Module& module, const std::vector<nn::Module*>& modules);
SHERD_API void set_modules_to_backward_prefetch(nn::Module& module, const std::vector<nn::Module*>& modules);

/// Whether backward frees gathered parameters. Off, the next forward need not gather them again unless they
/// were stepped or loaded in between. For this module and those below.
SHERD_API void set_reshard_after_backward(nn::Module& module, bool reshard);

/// A gather that `unshard_async` began. May outlive the module.
class SHERD_API UnshardHandle {
 public:
  explicit UnshardHandle(std::vector<std::shared_ptr<Gathered>> gathered) : gathered_(std::move(gathered)) {}
  /// Returns when the parameters are whole; at once where they were freed meanwhile.
  void wait() const;

 private:
  std::vector<std::shared_ptr<Gathered>> gathered_;
};

/// Gathers this module's own parameters, not those of sharded modules below, on every rank alike; legal at
/// any time. `Param::data()` is the whole parameter, in `param_dtype`, until the module's next forward frees
/// it, `reshard`, or a write; within a backward that comes to the module, as long as that reads it.
/// StateError for a module that is not sharded.
SHERD_API void unshard(nn::Module& module);
/// The same without waiting. Who needs the parameters waits: the module's forward, an op that reads them, or
/// the handle.
SHERD_API UnshardHandle unshard_async(nn::Module& module);
/// Frees what this module and those below have gathered, also what was kept for a backward: parameters that
/// were replaced or written since its forward count from here on.
SHERD_API void reshard(nn::Module& module);

/// A scope in which backwards of this module do not average gradients, whatever
/// `set_requires_gradient_sync` says. It holds for the module, also once that was moved or cast, and not for
/// clones.
class SHERD_API NoSync {
 public:
  explicit NoSync(nn::Module& module);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  std::vector<std::weak_ptr<Unit>> units_;
};
[[nodiscard]] inline NoSync no_sync(nn::Module& module) { return NoSync(module); }

/// Scales all gradients by min(1, max_norm / (norm + 1e-6)) and returns the norm of order `norm_type`, before
/// that, of the whole gradient over all ranks (0-d f64): the Euclidean one and that of order INFINITY are the
/// same to the bit for every layout, strategy and number of ranks, given the same gradients. Collective over
/// the parameters' groups; parameters that are not sharded count once. A NaN and a `max_norm` of 0 do what
/// they do in `nn::clip_grad_norm_`; ValueError for a negative or NaN `max_norm` and an order that is not
/// above 0.
SHERD_API Tensor clip_grad_norm_(std::span<const nn::Parameter> params, double max_norm,
                                 double norm_type = 2);
/// The norm alone, as collective: for `Optimizer::step_clipped`, which clips in the pass that steps.
SHERD_API Tensor grad_norm(std::span<const nn::Parameter> params, double norm_type = 2);

/// The whole parameters and saved buffers on every rank, by name, each in its own dtype; collective. Values
/// are copies. DeviceError on `meta`, where `Module::materialize` gives values first.
SHERD_API nn::StateDict full_state_dict(nn::Module& module);
/// Takes this rank's part of whole values. Nothing is changed when it throws; errors, and what is returned,
/// are those of `Module::load_state_dict`.
SHERD_API nn::Mismatch load_full_state_dict(nn::Module& module, const nn::StateDict& state,
                                            nn::Strict strict = nn::Strict::yes);

/// From every rank's part (shaped as `p.local()`, any dtype) to the whole on every rank: for gradients and
/// optimizer state. A rank that has no element of `p` may give an empty handle, as its gradient is in a flat
/// group, which is taken for a part of `p`'s dtype (StateError where it has some). Collective over the ranks
/// that share `p`. ValueError for a flat parameter. Of a parameter that is not sharded, a copy.
SHERD_API Tensor gather_whole(const nn::Parameter& p, const Tensor& part);
/// This rank's part of a whole tensor, shaped as `p.local()`: a copy.
SHERD_API Tensor part_of(const nn::Parameter& p, const Tensor& whole);

// ---- what this rank owns ----

/// One parameter of a group, as `inspect` shows it.
struct ParameterReport {
  std::string name;
  Shape shape;
  std::vector<std::int64_t> owned_numels;  ///< by rank
};

/// Sizes of one group, in elements, padding included.
struct GroupReport {
  std::string label;            ///< the module's name when it was sharded
  DType dtype;                  ///< as stored
  std::int64_t shard_numel;     ///< of one rank's shard
  std::int64_t gathered_numel;  ///< of all ranks' shards
  std::vector<ParameterReport> parameters;
};
/// The groups of this module and those below, in the order of members.
SHERD_API std::vector<GroupReport> groups_of(nn::Module& module);

}  // namespace sherd::shard
