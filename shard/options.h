// Options of sharding: on which ranks, what stays gathered, in which precision. They are fixed when the
// module is sharded.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "collectives/mesh.h"
#include "nn/parameter.h"
#include "runtime/device.h"
#include "runtime/dtype.h"
#include "runtime/error.h"

namespace sherd::nn {
class Module;
}

namespace sherd::shard {

/// How the parameters of a group are cut over the ranks; which rank gets what is a `Partition`.
enum class GroupLayout : std::uint8_t {
  flat,           ///< one after another, the whole cut in equal slices (FSDP1)
  per_parameter,  ///< every parameter along its dim 0 (FSDP2)
};

/// How much is sharded between two steps.
enum class ShardingStrategy : std::uint8_t {
  full_shard,     ///< parameters are gathered for forward and again for backward (ZeRO-3)
  shard_grad_op,  ///< parameters stay gathered from forward to the end of backward (ZeRO-2)
  zero1,          ///< as shard_grad_op; gradients stay whole until the end of backward, then are reduced
  no_shard,       ///< parameters are whole; gradients are averaged
};

/// What whole parameters are in.
enum class Precision : std::uint8_t {
  reduced,  ///< `param_dtype`
  full,     ///< as they are stored
};

/// Precisions of a sharded module, all optional. What is stored, stepped and saved keeps its own dtype.
struct MixedPrecisionPolicy {
  std::optional<DType> param_dtype{};   ///< of gathered parameters, and of computation
  std::optional<DType> reduce_dtype{};  ///< in which gradients are averaged; else the gradient's own
  /// Whether averages stay in the dtype in which they were reduced, in place of the parameter's.
  bool keep_low_precision_grads = false;
  /// In place of `param_dtype` for single parameters: asked once for each, by its name below the module, when
  /// that is sharded; none is `param_dtype`. Inputs are cast to `param_dtype` whatever it says. ValueError
  /// where a unit has one flat parameter, which has one dtype.
  std::function<std::optional<DType>(const std::string& name, const nn::Parameter& parameter)>
      param_dtype_override{};
  std::optional<DType> output_dtype{};  ///< floating outputs of the module are cast to it
  /// Of floating buffers while they compute: they are cast at the next forward. States hold them in the dtype
  /// that they had before, with the values of before; what a forward writes in them since is cast back.
  std::optional<DType> buffer_dtype{};
  /// Whether floating inputs of the module are cast to `param_dtype`. Per-parameter layout: yes by default,
  /// also without parameters. Flat layout: no by default, and only with parameters of its own.
  std::optional<bool> cast_forward_inputs{};
  /// Flat layout only, yes by default: the same for a module that `fully_shard` was called with, or, under
  /// `FullyShardedDataParallel`, for the outermost one.
  std::optional<bool> cast_root_forward_inputs{};
  /// What forwards compute in while the outermost module that runs is in evaluation mode. In full precision
  /// inputs are not cast to `param_dtype`, and buffers are in their own dtype.
  Precision evaluation = Precision::reduced;
};

/// What becomes of gathered parameters after forward: freed, kept, or cut to this rank's slice within
/// consecutive groups of `ranks()` ranks, among which backward gathers them again.
class ReshardAfterForward {
 public:
  ReshardAfterForward(bool reshard) {  // NOLINT: `true` is how it is written
    if (!reshard) ranks_ = 1;
  }
  /// ValueError, when the module is sharded, unless it is at least 1 and divides the number of ranks.
  ReshardAfterForward(int ranks) : ranks_(ranks) {}  // NOLINT
  /// None: freed; 1: kept.
  const std::optional<int>& ranks() const { return ranks_; }

 private:
  std::optional<int> ranks_;
};

/// Whether forwards look for parameters that were replaced by other objects since, and take this rank's part
/// from them; off, they are refused.
enum class WritebackCheck : std::uint8_t { on, off };

/// When a backward gathers the groups that come after the one that it computes with: before that one's
/// gradients are computed (PyTorch's BACKWARD_PRE), or once its reduction is posted (BACKWARD_POST), which
/// holds less memory and overlaps less.
class BackwardPrefetch {
 public:
  /// `pre(groups)`.
  BackwardPrefetch(int groups) : groups_(groups) {}  // NOLINT: a number is how it is written
  static BackwardPrefetch none() { return {0}; }
  static BackwardPrefetch pre(int groups = 1) { return {groups}; }
  static BackwardPrefetch post(int groups = 1) {
    BackwardPrefetch prefetch(groups);
    prefetch.after_reduction_ = true;
    return prefetch;
  }
  int groups() const { return groups_; }
  bool after_reduction() const { return after_reduction_; }

 private:
  int groups_;
  bool after_reduction_ = false;
};

/// Whether backwards gather a module's parameters. With `no` they do not, for frozen modules before all that
/// is trained, whose inputs need no gradients: a backward that comes to their parameters all the same is a
/// StateError. Which modules a backward comes to would depend on what each rank's inputs and parameters ask
/// for, and ranks gather alike.
enum class BackwardGather : std::uint8_t { yes, no };

/// The program's own reduction of one gradient: from all of `unsharded`, padded to equal slices, this rank's
/// slice in `shard`, both of one dimension and in the reduce dtype. Of replicas without shards the two are
/// the same tensor. It may call `ranks`, which all run it in the same order.
using CommHook = std::function<void(const Tensor& unsharded, const Tensor& shard, const Group& ranks)>;

/// For `fully_shard`.
struct Options {
  /// One dimension: its ranks share the parameters. Two: ranks along the second share them, those along the
  /// first are replicas (hybrid sharding). None: all ranks of the world.
  DeviceMesh mesh{};
  GroupLayout layout = GroupLayout::per_parameter;
  ShardingStrategy strategy = ShardingStrategy::full_shard;
  /// Of full_shard. The outermost module's parameters are always kept until backward.
  ReshardAfterForward reshard_after_forward = true;
  MixedPrecisionPolicy mixed_precision{};
  WritebackCheck writeback_check = WritebackCheck::on;
  /// Where parameters, buffers and the outermost module's inputs are moved; none: they stay where they are.
  std::optional<Device> device{};
  /// Keeps and steps this rank's part on `cpu:0` and computes on `device` (ValueError without one, and beside
  /// a `compute_device`, which says the same with other words).
  bool cpu_offload = false;
  /// Where parameters are gathered and the module computes, if not where this rank's part is kept and
  /// stepped: buffers and inputs are moved there, averages go back. Without averaging, `.grad()` is there.
  std::optional<Device> compute_device{};
  /// Groups that are gathered ahead, in forward (guessed from the step before) and in backward.
  int forward_prefetch = 1;
  BackwardPrefetch backward_prefetch = 1;
  BackwardGather backward_gather = BackwardGather::yes;
  /// Whether all ranks of the mesh get the parameters and buffers of its first one, each where it lies. On
  /// other ranks they may be on `meta`: they get memory on `device`, or the CPU, as long as this module's are
  /// whole. DeviceError where the first rank has none.
  bool sync_module_states = false;
  /// What stays the program's own: these parameters, and all of these modules. They are whole on every rank,
  /// their gradients are not averaged, and neither they nor the modules' buffers are moved or cast; states
  /// have them, as this rank has them. Outer modules that are sharded later leave them alone too. What is not
  /// in the module says nothing, so that one list may serve all calls. ValueError for what is sharded
  /// already, for the module itself and for null.
  std::vector<nn::Parameter> ignored_parameters{};
  std::vector<const nn::Module*> ignored_modules{};
};

}  // namespace sherd::shard
