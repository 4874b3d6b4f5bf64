// A group of parameters that are gathered and reduced together: what is fixed about it, its shard, and what
// it has gathered and what gradients came.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "nn/parameter.h"
#include "shard/gathered.h"
#include "shard/gradients.h"
#include "shard/options.h"
#include "shard/step_check.h"

namespace sherd::shard {

class Root;
class Unit;

/// The ranks that share `p`; null when this rank has it whole.
SHERD_API const Group* shard_group_of(const nn::Parameter& p);

/// Channels of the groups' own orders of calls.
inline constexpr int gather_channel = 2, reduce_channel = 3;

/// The ranks that a group of parameters lives on; undefined groups are this rank alone.
struct Ranks {
  Group shard;     ///< who share the parameters
  Group replicas;  ///< who hold the same shard
  Group block;     ///< part of `shard` that keeps slices between forward and backward
};

/// This rank's number in a group, and how many there are; of an undefined group it is the only one.
struct RankOfGroup {
  int rank = 0, ranks = 1;
  explicit RankOfGroup(const Group& group) {
    if (group.defined()) rank = group.rank(), ranks = group.size();
  }
};

/// The gradient of a trainable parameter that no rank used in a backward, where others of its group were.
enum class Unused : std::uint8_t {
  none,   ///< as in FSDP2
  zeros,  ///< as in FSDP1: a slice of one gradient
};

/// Everything about a group that is fixed when it is made.
struct GroupSpec {
  GroupLayout layout = GroupLayout::per_parameter;
  Partition partition;
  Ranks ranks;
  std::vector<std::string> names{};  ///< of the parameters, within the module
  std::vector<Shape> shapes{};
  std::optional<DType> param_dtype{}, reduce_dtype{};
  bool keep_low_precision_grads = false;
  std::optional<Device> compute_device{};  ///< where parameters are gathered and read; none: the shard's
  bool reduce_at_end = false;              ///< gradients stay whole until the backward is over
  bool one_flat_param = false;             ///< parameters are listed and stepped as one
  Unused unused = Unused::none;
  BackwardGather backward_gather = BackwardGather::yes;
};

/// What a program may switch between two steps, on every rank alike.
struct Switches {
  bool synchronising = true, reshard_after_backward = true;
  bool stays_after_forward = false;   ///< until the backward, whatever the module's policy is
  bool all_reducing = true;           ///< of shards with replicas: reductions go on to the replicas
  std::optional<double> divide_by{};  ///< in place of the number of ranks
  CommHook comm_hook{};               ///< in place of reductions
  /// Whose groups are gathered ahead of the group's own forward, or backward, where the program named them.
  std::optional<std::vector<std::weak_ptr<Unit>>> forward_prefetch{}, backward_prefetch{};
};

/// A run of elements of a dense tensor.
Tensor flat_view(const Tensor& t, std::int64_t offset, std::int64_t numel);

/// Outlives its module while a graph refers to it.
class ParameterGroup final : public std::enable_shared_from_this<ParameterGroup> {
 public:
  /// `shard`: this rank's slices of all segments side by side, in the stored dtype.
  ParameterGroup(GroupSpec spec, Tensor shard);

  const GroupSpec& spec() const { return spec_; }
  const Tensor& shard() const { return shard_; }
  std::size_t size() const { return locals_.size(); }
  DType compute_dtype() const { return compute_dtype_; }
  /// Where the whole parameters are, and where gradients come from.
  Device compute_device() const;
  bool trainable() const;
  /// Whether backwards reduce gradients, if only over the shards. Of replicas alone nothing is left then.
  bool reduces() const {
    return switches.synchronising &&
           (switches.all_reducing || spec_.ranks.shard.defined() || !spec_.ranks.replicas.defined());
  }

  /// Parameter `i`'s part of the shard, a leaf.
  const Tensor& local(std::size_t i) const { return locals_[i]; }
  /// Whether other ranks have all elements of parameter `i`. In the flat layout it has no gradient here then;
  /// in the per-parameter layout an empty one, of no rows.
  bool elsewhere(std::size_t i) const {
    return spec_.layout == GroupLayout::flat && locals_[i].numel() == 0 && spec_.shapes[i].numel() > 0;
  }
  /// Another leaf in the place of `local(i)`, in the same memory and without a gradient.
  void renew_local(std::size_t i);
  /// Of a tensor that lies as the shard does, the elements of parameter `i`: shaped as `local(i)`, a view.
  Tensor part_in(const Tensor& shard, std::size_t i) const;
  /// This rank's part of parameter `i` from the whole (ShapeError), shaped as `local(i)`: a view where it can
  /// be.
  Tensor part_of(std::size_t i, const Tensor& whole) const;
  /// Where parameter `i` lies once gathered.
  sherd::Layout whole_layout(std::size_t i) const;
  /// With `one_flat_param`, the whole shard as a leaf.
  const Tensor& flat() const { return flat_; }
  /// Every rank's part of what lies as the shard does, side by side as in `whole_layout`, in its dtype, where
  /// the group computes, in memory of its own. Collective.
  Tensor gather(const Tensor& shard) const;
  /// What forward reads: tensors whose gradients come here; made once a precision, held by the parameters.
  /// Those of a second precision have the leaves of the first, `others`: a backward through both brings one
  /// gradient.
  std::vector<Tensor> make_used(Precision precision, std::span<const Tensor> others = {});

  const std::string& label() const { return name_->module; }
  const std::shared_ptr<const CallName>& name() const { return name_; }
  const std::shared_ptr<Root>& root() const { return root_; }
  void set_root(std::shared_ptr<Root> root);
  /// Before it is in a model, and after a renewal until that runs.
  void set_name(std::string module);
  void set_name_in_model(std::string module);
  /// It, or the module around its own, was sharded.
  void made_in_model();
  const Identity& identity() const { return identity_; }
  /// Takes over what a group with the same members was told and kept; `change` makes of its gradients what
  /// was made of its shard.
  void take_over(ParameterGroup& old, const std::function<Tensor(const Tensor&)>& change);

  /// Its module is gone, or has another group in its place: graphs alone have it, which are not alike on all
  /// ranks, so nothing but their backwards asks for it.
  void retire() { retired_ = true; }
  bool retired() const { return retired_; }

  Switches switches{};
  StepCheck step_check{};
  /// A scope shows its parameters whole: what they are is written there.
  bool summoned = false;
  /// The whole parameters in a precision; one object for both where they are the same.
  Gathered& gathered(Precision precision) {
    return precision == Precision::full && in_full_ ? *in_full_ : gathered_;
  }
  /// Those that the forwards of the root compute with.
  Gathered& in_use();
  template <class F>
  void each_gathered(F&& act) {
    act(gathered_);
    if (in_full_) act(*in_full_);
  }
  Gradients& gradients() { return gradients_; }

 private:
  sherd::Layout local_layout(std::size_t i) const;

  GroupSpec spec_;
  bool retired_ = false;
  Tensor shard_, flat_;
  DType compute_dtype_;
  std::vector<Tensor> locals_;
  std::shared_ptr<const CallName> name_ = std::make_shared<CallName>();
  Identity identity_;
  std::shared_ptr<Root> root_;
  Gathered gathered_;
  std::optional<Gathered> in_full_;
  Gradients gradients_;
};

}  // namespace sherd::shard
