// The whole parameters of a group in one precision: one storage that keeps its identity, of which they are
// views, and why its memory is here at a given moment.
#pragma once

#include <array>
#include <optional>
#include <variant>

#include "collectives/group.h"
#include "runtime/peer_queue.h"
#include "runtime/storage.h"
#include "runtime/tensor.h"
#include "shard/partition.h"

namespace sherd::shard {

class ParameterGroup;

/// Who wants the whole parameters here. Leases begin and end by program position and policy, alike on all
/// ranks: so they alone decide what is gathered again.
enum class Lease : std::uint8_t {
  module,    ///< modules that run; counted
  backward,  ///< a backward, from its plan to where the group's first use began; read after that, to its end
  forward,   ///< a forward that keeps it for its backward, or to a write
  policy,  ///< `unshard`, a slice, a forward without gradients, a backward that does not reshard: to a write
  list,    ///< gathered ahead by a forward's list, or read outside its module, until the cursor goes on
};

// Where the whole parameters are, and of which values of the shard (`epoch`) they are made.
struct Sharded {};
/// This rank's slice within `Ranks::block`, between forward and backward.
struct Sliced {
  Tensor slice;
  std::uint64_t epoch;
};
struct Gathering {
  Work work;
  Ref<Storage> memory;
  std::uint64_t epoch;
};
struct Full {
  std::uint64_t epoch;
};
/// This rank wrote its part of what ranks keep, so that it alone does not have it any more: a gather here
/// would be one that those that wrote nothing do not make.
struct Written {
  std::string replaced;  ///< parameter whose values the user gave in their place, for a backward to come
};

/// Whether a rank's own slices are copied to their place among all before a gather, or read where they are.
enum class InPlace : std::uint8_t { no, yes };
/// The call that brings every rank's slices of `shard` together in `all`, segment by segment. With
/// `InPlace::yes` copies this rank's, in `all`'s dtype and on its device.
Collective gather_call(const Tensor& all, const Tensor& shard, const Partition& partition, int rank,
                       InPlace in_place);

class Gathered final : public StorageOwner {
 public:
  /// The parameters of `group` in `dtype`, where the group computes.
  Gathered(ParameterGroup& group, DType dtype);
  /// The identity: released, owned by this object; of the shard, where that is all.
  Ref<Storage> make_storage();

  ParameterGroup& group() const { return group_; }
  DType dtype() const { return dtype_; }
  /// The whole parameters are the shard itself: nothing is ever gathered.
  bool is_shard_itself() const { return is_shard_itself_; }
  /// Holds the group.
  std::shared_ptr<Gathered> shared();

  bool here() const { return std::holds_alternative<Full>(residency_); }
  bool on_its_way() const { return std::holds_alternative<Gathering>(residency_); }
  bool pinned() const { return storage_ != nullptr && storage_->pins() > 0; }
  /// Place at which the gather of what is here began: nobody notices reads from then on.
  std::uint64_t since() const { return since_; }
  /// Reads that backwards announced and have not made yet.
  int reads() const { return reads_; }

  /// The program asked for it (`unshard`): parameters show it until it is freed.
  bool shown() const { return shown_ && here(); }
  void show() { shown_ = true; }

  void lease(Lease owner);
  bool leased(Lease owner) const { return leases_[static_cast<std::size_t>(owner)] > 0; }
  bool leased() const;
  int modules() const { return leases_[0]; }
  /// By others than modules.
  bool leased_elsewhere() const;
  /// The last lease that ends frees what is here or on its way; peers still get what was posted.
  void end(Lease owner) noexcept;
  /// Ends every owner's: after a fault, when nobody knows what the peers have.
  void end_all() noexcept;

  /// Posts a gather, from this rank's slice of the block or from the shard, unless it is here or on its way.
  void start();
  /// Waits for a gather that was started.
  void finish();
  /// Whether it is here, or on its way to where nobody has read it yet, or is on the ranks that did not write
  /// their parts.
  bool kept_whole() const { return here() || on_its_way() || std::holds_alternative<Written>(residency_); }
  /// StateError where this rank wrote.
  void check_unwritten() const;
  /// The write was of values that the user gave parameter `name`; the name of the last such one, once.
  void tell_replaced(const std::string& name);
  std::string take_replaced();
  /// Whether the shard was written since, or nothing is kept.
  bool stale() const;
  /// What is old goes, unless a module reads it.
  void drop() noexcept {
    if (!leased(Lease::module)) free();
  }
  /// Keeps this rank's slice of the block, as policy, and frees the rest.
  void slice();
  /// The shard is about to be written on every rank: peers have read it, and graphs from before know.
  void shard_written();
  /// The same by an op on this rank, which others need not apply: what is kept stays theirs to keep.
  void shard_written_here();

  // ---- StorageOwner ----
  void need(Storage& storage) override;
  /// StateError within a backward that may have stepped the group since its own reads.
  void expect_reads(Storage&, int reads) override;
  void read_done(Storage&) override;
  void forget_reads(Storage&) noexcept override { reads_ = 0; }
  std::string explain_released() const override;
  /// StateError: the next gather would undo the write.
  void before_write(Storage&) override;
  void storage_gone(Storage&) noexcept override { storage_ = nullptr; }

 private:
  void free() noexcept;
  /// Marks what was copied to this device beside the rank's own work; `follow_copies` lets that follow.
  void mark_copies();
  void follow_copies() const;
  /// Advances with every write of the shard, through ops or past them.
  std::uint64_t epoch() const;

  ParameterGroup& group_;
  DType dtype_;
  bool is_shard_itself_;
  std::optional<Partition> block_partition_;
  Storage* storage_ = nullptr;  // held by the parameters and by graphs
  std::variant<Sharded, Sliced, Gathering, Full, Written> residency_;
  std::array<int, 5> leases_{};
  bool shown_ = false;
  std::uint64_t epoch_ = 1, since_ = 0;
  std::unique_ptr<DeviceEvent> copied_;  // of a shard that lies on another device
  Work reading_;  // the last gather whose input is the shard itself; those before are read first
  int reads_ = 0;
};

}  // namespace sherd::shard
