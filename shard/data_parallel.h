// Replicas that average their gradients: training over ranks without sharding, against which sharding is
// tested.
#pragma once

#include <cstdint>
#include <memory>

#include "collectives/group.h"
#include "nn/module.h"
#include "shard/options.h"

namespace sherd::shard {

class GradientBuckets;

/// Whether ranks have rank 0's buffers, or each its own, moved by its own data (running statistics).
enum class BroadcastBuffers : std::uint8_t { yes, no };

struct DataParallelOptions {
  /// Gradients travel in buckets of about this size, each as soon as it is complete.
  std::int64_t bucket_bytes = std::int64_t{25} << 20;
  /// The group's channel on which the averages travel: calls on one channel keep their order.
  int channel = 1;
  /// Rank 0's go to all at the end of every backward that averages. They are written then, so another graph
  /// that keeps one for its gradient (a mask that is multiplied) is refused from then on.
  BroadcastBuffers broadcast_buffers = BroadcastBuffers::yes;
  /// Every backward that averages uses the same parameters on this rank as the first one did; StateError
  /// names one that does not. From the second one on the host reads nothing of which parameters ranks use, so
  /// that such steps can be captured.
  bool static_graph = false;
};

/// For `DataParallel::join`, alike on all ranks.
struct JoinOptions {
  /// Averages are sums over the number of ranks; else over those that still have inputs.
  bool divide_by_initial_world_size = true;
  /// Whether all ranks throw StateError at the first average for which one has no inputs left.
  bool throw_on_early_termination = false;
};

/// Makes `module` a replica among the ranks of `group`. On construction rank 0's parameters and buffers go to
/// all. From then on a backward leaves in `.grad` the average over the ranks (by the one rule of `ReduceOp`),
/// added to what was there. What is there at construction is this rank's own, as after `no_sync`. Every
/// rank's backward communicates, whichever parameters its graph has: one that it does not use counts as zero,
/// one that no rank uses keeps its gradient as it is. Forwards do not.
/// The same parameters are trainable on all ranks; where one was replaced, sharded, or became trainable,
/// since, the next forward or backward throws StateError. So does construction for a parameter that is
/// sharded, or whose gradient goes to a sink of another kind.
/// Ends with this object; the module may be moved, and be gone first. An object that is made later for the
/// same parameters takes them over.
class SHERD_API DataParallel {
 public:
  [[nodiscard]] DataParallel(nn::Module& module, const Group& group, DataParallelOptions options = {});
  ~DataParallel();
  DataParallel(DataParallel&&) noexcept;

  /// Also where it was moved since. StateError when it is gone, and after a move from this object, as for
  /// `no_sync`.
  nn::Module& module() const;
  /// The forward of a module that maps one tensor to one (else StateError: call the module itself, which is
  /// the same).
  Tensor operator()(const Tensor& x) const { return module().call(x); }

  /// `hook` takes the place of the averages, one call a bucket in the order of buckets, at the end of each
  /// backward that averages: its two tensors are the bucket, of one dimension. Division is its own. Not
  /// called where there is one rank. StateError where there is one already, and as for `no_sync`.
  void register_comm_hook(CommHook hook);

  /// A scope in which backwards add to `.grad` without communication. What they leave is averaged together
  /// with the next backward outside. StateError where another object took parameters over.
  class SHERD_API NoSync {
   public:
    explicit NoSync(DataParallel& model);
    ~NoSync();
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    std::shared_ptr<GradientBuckets> buckets_;
    bool outer_;
  };
  [[nodiscard]] NoSync no_sync() { return NoSync(*this); }

  /// A scope, on every rank, for training on unlike numbers of inputs. A rank whose inputs are at their end
  /// leaves the scope, and there takes part in the others' averages, with zeros, until all have come to their
  /// ends; buffers come from the first rank that still has inputs. Then parameters and buffers are those of
  /// the first of the ranks that went on for longest, on all. Each average tells ranks who is left.
  /// StateError within another such scope of the model. One that an exception leaves takes part in nothing.
  class SHERD_API Join {
   public:
    explicit Join(DataParallel& model, JoinOptions options = {});
    ~Join() noexcept(false);
    Join(const Join&) = delete;
    Join& operator=(const Join&) = delete;

   private:
    std::shared_ptr<GradientBuckets> buckets_;
    int exceptions_;
  };
  [[nodiscard]] Join join(JoinOptions options = {}) { return Join(*this, options); }

 private:
  GradientBuckets& buckets() const;
  std::shared_ptr<nn::Module* const> module_;
  std::shared_ptr<GradientBuckets> buckets_;
  Subscription watching_;
};

}  // namespace sherd::shard
