// A group of parameters that are gathered and reduced together: their shard, where the whole is now, and the
// gradients that a backward brings.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <variant>
#include <vector>

#include "autograd/sink.h"
#include "collectives/group.h"
#include "nn/parameter.h"
#include "runtime/storage.h"
#include "shard/options.h"
#include "shard/partition.h"

namespace sherd::shard {

class Schedule;

/// The ranks that share `p`; null when this rank has it whole.
SHERD_API const Group* shard_group_of(const nn::Parameter& p);

/// Channels of the groups' own orders of calls.
inline constexpr int gather_channel = 2, reduce_channel = 3;

/// The ranks that a group of parameters lives on; undefined groups are this rank alone.
struct Ranks {
  Group shard;     ///< who share the parameters
  Group replicas;  ///< who hold the same shard
  Group block;     ///< part of `shard` that keeps slices between forward and backward

  int shard_size() const { return shard.defined() ? shard.size() : 1; }
  int shard_rank() const { return shard.defined() ? shard.rank() : 0; }
};

/// What becomes of gathered parameters after forward.
enum class AfterForward : std::uint8_t { free, keep, slice };

/// Everything about a group that is fixed when it is made.
struct GroupSpec {
  GroupLayout layout = GroupLayout::per_parameter;
  Partition partition;
  Ranks ranks;
  std::vector<std::string> names{};  ///< of the parameters, within the module
  std::vector<Shape> shapes{};
  std::optional<DType> param_dtype{}, reduce_dtype{};
  bool reduce_at_end = false;   ///< gradients stay whole until the backward is over
  bool one_flat_param = false;  ///< parameters are listed and stepped as one
};

// Where the whole parameters are.
struct Sharded {};
/// This rank's slice within `Ranks::block`, between forward and backward.
struct Sliced {
  Tensor slice;
};
struct Gathering {
  Work work;
  Ref<Storage> memory;
  Tensor source;  ///< a slice on its way
  bool in_place;
};
struct Full {
  Work gather;  ///< if peers read this rank's slice where it lies
};
using Residency = std::variant<Sharded, Sliced, Gathering, Full>;

/// Owns the shard and the identity of the gathered storage, of which the whole parameters are views; is the
/// sink of their gradients. Outlives its module while a graph refers to it.
class ParameterGroup final : public StorageOwner,
                             public GradSink,
                             public std::enable_shared_from_this<ParameterGroup> {
 public:
  /// `shard`: this rank's slices of all segments side by side, in the stored dtype.
  ParameterGroup(GroupSpec spec, Tensor shard);

  const GroupSpec& spec() const { return spec_; }
  const Tensor& shard() const { return shard_; }
  std::size_t size() const { return members_.size(); }
  DType compute_dtype() const { return compute_dtype_; }
  /// The gradient's precision between ranks.
  DType reduce_dtype() const { return spec_.reduce_dtype.value_or(compute_dtype_); }
  /// The whole parameters are the shard itself.
  bool whole() const { return whole_; }

  /// Parameter `i`'s part of the shard, a leaf.
  const Tensor& local(std::size_t i) const { return members_[i].local; }
  /// Of a tensor that lies as the shard does, the elements of parameter `i`: shaped as `local(i)`, a view.
  Tensor part_in(const Tensor& shard, std::size_t i) const;
  /// This rank's part of parameter `i` from the whole (ShapeError), shaped as `local(i)`: a view where it can
  /// be.
  Tensor part_of(std::size_t i, const Tensor& whole) const;
  /// With `one_flat_param`, the whole shard as a leaf.
  const Tensor& flat() const { return flat_; }
  /// Views of the gathered storage, leaves whose sink is this group; made once, held by the parameters.
  std::vector<Tensor> make_used();

  std::string label = "?";  ///< the module's name, once its root has run
  std::shared_ptr<Schedule> schedule;
  bool synchronising = true, reshard_after_backward = true;

  // ---- residency ----
  const Residency& residency() const { return residency_; }
  bool gathered() const { return whole_ || std::holds_alternative<Full>(residency_); }
  bool under_way() const { return std::holds_alternative<Gathering>(residency_); }
  /// Nothing was written since the gather.
  bool fresh() const { return whole_ || epoch() == epoch_gathered_; }
  void start_gather();
  /// Waits for a gather that was started.
  void finish_gather();
  /// Frees what is gathered or under way; peers still get what was posted.
  void release();
  /// Keeps this rank's slice of the block and frees the rest.
  void slice();
  bool pinned() const { return gathered_storage_ != nullptr && gathered_storage_->pins() > 0; }
  int reads() const { return reads_; }
  /// Before the shard is written: peers have read it, and graphs from before know.
  void before_write();
  using StorageOwner::before_write;

  /// The schedule's notes: in which root call, backward and agenda it was counted last, and its turn there.
  struct Marks {
    std::uint64_t call = 0, begun = 0, on_agenda = 0;
    std::size_t gather_turn = 0;
    bool listed = false;  ///< among those that are here
  };
  Marks marks{};

  int forwards = 0;   ///< of its module, under way
  bool held = false;  ///< kept until a backward or a write

  // ---- one backward ----
  bool trainable() const;
  /// All gradients that the backward announced are here.
  bool complete() const { return due_ == 0; }
  /// Turns what came into this rank's own `.grad`, without communication.
  void keep_gradients();
  void post_reduction();
  /// Posted, and peers are still to come.
  bool reducing() const { return reduced_.defined() && !reduction_.done(); }
  void finish_reduction();
  /// Peers have read what this rank posted; its memory goes.
  void end_reduction();
  void drop_gradients() noexcept;

  // ---- StorageOwner ----
  void need(Storage& storage) override;
  void expect_reads(Storage&, int reads) override { reads_ += reads; }
  void read_done(Storage&) override;
  void forget_reads(Storage&) noexcept override { reads_ = 0; }
  void storage_gone(Storage&) noexcept override { gathered_storage_ = nullptr; }
  // ---- GradSink ----
  void begin(PassInfo pass, Leaf& leaf) override;
  void accept(PassInfo pass, Leaf& leaf, Tensor gradient) override;
  void finish(PassInfo pass) override;
  void abort(PassInfo pass) noexcept override;

 private:
  struct Member {
    Tensor local;
    Tensor gradient;  ///< complete, of the backward under way
  };
  /// A `.grad` that may hold this rank's own whole gradient, from backwards without communication.
  struct Slot {
    Tensor leaf;
    Tensor averaged{};  ///< what it showed before
    bool unsynced = false;
  };
  static Tensor flat_view(const Tensor& t, std::int64_t offset, std::int64_t numel);
  static void wait_for_readers(Work& work) noexcept;
  Tensor gathered_view(const Ref<Storage>& memory, std::int64_t offset, std::int64_t numel) const;
  sherd::Layout local_layout(std::size_t i) const;
  sherd::Layout whole_layout(std::size_t i) const;
  void keep(Slot& slot, const Tensor& gradient) const;
  void add_to(Slot& slot, const Tensor& part) const;
  Tensor take_unsynced(Slot& slot) const;
  std::vector<Tensor> totals();
  void fill_segment(const Tensor& region, int segment, std::span<const Tensor> totals) const;
  void mark_present(const Tensor& present, std::span<const Tensor> totals) const;
  Collective reduction(std::vector<Tensor> totals);
  void reduce_alone(const std::vector<Tensor>& totals);

  GroupSpec spec_;
  Tensor shard_, flat_;
  DType compute_dtype_;
  bool whole_;
  std::optional<Partition> block_partition_;
  std::vector<Member> members_;
  std::vector<Slot> slots_;  // one a parameter, or one for all
  std::unordered_map<const Leaf*, std::size_t> index_;

  Storage* gathered_storage_ = nullptr;  // the identity; held by the parameters and by graphs
  Residency residency_ = Sharded{};
  /// Advances with every write of the shard, through ops or past them.
  std::uint64_t epoch() const { return epoch_ + shard_.storage().version(); }
  std::uint64_t epoch_ = 1, epoch_gathered_ = 0;
  std::vector<Work> reading_;  // gathers whose input is the shard itself
  int reads_ = 0;

  int due_ = 0;
  Tensor reduced_;  // shard gradient, then the presence flags
  Work reduction_;
};

}  // namespace sherd::shard
