// What the ranks of a group share when they are threads: the slots in which calls are posted.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "collectives/device_moments.h"
#include "collectives/meeting_board.h"
#include "collectives/movement.h"
#include "collectives/offer.h"
#include "collectives/threads/crew.h"

namespace sherd::threads {

/// Calls that a rank can have under way in one order.
inline constexpr std::uint64_t depth = DeviceLane::depth;

/// Inputs of up to so many bytes are copied into the slot, so that the poster need not wait until its peers
/// have read them.
inline constexpr std::int64_t eager_bytes = 1024;

/// Addresses of one segment of one rank.
struct Part {
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  std::int64_t count = 0;  ///< elements, as `Signature::total` counts them
};

/// One posted call. Its rank writes it before it raises `Lane::posted`, peers read it after that, and it is
/// reused when all peers have finished with it.
struct Slot {
  Signature signature;
  InlineVec<Part, 2> parts;
  Movement movement;
  ReduceOp reduction;
  bool eager = false;
  DeviceLane* on_device = nullptr;  ///< where the tensors are; null where the host reads them
  /// Keep memory alive while it is used: peers read inputs, and in calls of two rounds outputs too.
  InlineVec<Ref<Storage>, 4> inputs, outputs;
  alignas(64) std::array<std::byte, eager_bytes> inline_bytes;
};

/// One rank's side of one sequence of calls. Only that rank writes here.
struct alignas(128) Lane {
  std::atomic<std::uint64_t> posted{0};    ///< calls whose slot is filled
  std::atomic<std::uint64_t> promised{0};  ///< and those that are queued until there is room
  std::atomic<std::uint64_t> moved{0};     ///< twice the call's number, plus the rounds that are done
  std::atomic<std::uint64_t> finished{0};  ///< calls for which this rank needs no peer's slot any more
  std::atomic<bool> reading{false};        ///< this rank is reading peers' memory now
  alignas(128) std::array<Slot, depth> slots;
  Slot& slot(std::uint64_t sequence) { return slots[sequence % depth]; }
};

/// All ranks' sides of one sequence of calls.
struct Exchange {
  explicit Exchange(std::size_t size) : moments(std::make_shared<Moments>(size)), lanes(size) {}
  /// After a fault slots may still hold memory that devices read.
  ~Exchange() { moments->wait_for_all(); }
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;
  const std::shared_ptr<Moments> moments;
  std::vector<Lane> lanes;
};

/// What the ranks of a group share.
class Core : public std::enable_shared_from_this<Core> {
 public:
  Core(std::shared_ptr<Crew> crew, std::vector<int> seats, std::string name);
  Crew& crew() { return *crew_; }
  const std::shared_ptr<Crew>& crew_ref() const { return crew_; }
  int size() const { return static_cast<int>(seats_.size()); }
  /// The place of a rank of this group in the crew.
  int seat_of(int rank) const { return seats_[static_cast<std::size_t>(rank)]; }
  const std::vector<int>& seats() const { return seats_; }
  const std::string& name() const { return name_; }
  const GroupKey& key() const { return key_; }
  MeetingBoard& meetings() { return meetings_; }

  /// The exchange of a channel (source -1) or of the messages from one rank to another; made on first use.
  Exchange& exchange(int channel, int source, int destination);

  /// Puts a new group among ranks of this one up under a number, under which each of its members accepts it
  /// once.
  std::int64_t offer(std::shared_ptr<Core> made);
  /// Null when no group was offered under this number.
  std::shared_ptr<Core> accept(std::int64_t number);

  /// Null until the group fails. Of several faults the first stays.
  const Fault* fault() const { return fault_.load(std::memory_order_seq_cst); }
  void fail(Fault fault);

  /// The ranks that have called `renew`, and the new core, which the last of them makes and each takes once.
  struct Renewal {
    explicit Renewal(std::size_t size) : asked(size) {}
    std::vector<std::atomic<std::uint64_t>> asked;  ///< 1 for each rank that came
    std::mutex mutex;
    std::shared_ptr<Core> next;  ///< until all have taken it
    std::size_t taken = 0;
    std::atomic<bool> ready{false};
    std::unique_ptr<const Fault> first_fault;
    std::atomic<const Fault*> fault{nullptr};  ///< the renewal failed: ranks renew groups in different orders
  };
  Renewal& renewal() { return renewal_; }
  void fail_renewal(Fault fault);

  /// Wakes every rank of the group that sleeps.
  void ring_all();

 private:
  std::shared_ptr<Crew> crew_;
  std::vector<int> seats_;
  std::string name_;
  const GroupKey key_ = draw_group_key();
  MeetingBoard meetings_{seats_.size()};
  std::mutex exchanges_mutex_;  // taken when a line is used for the first time
  std::map<std::array<int, 3>, std::unique_ptr<Exchange>> exchanges_;
  struct Offer {
    std::shared_ptr<Core> made;
    int waiting;  ///< members that have not accepted
  };
  std::mutex offers_mutex_;
  std::int64_t last_offer_ = 0;
  std::map<std::int64_t, Offer> offers_;
  std::mutex fault_mutex_;
  std::unique_ptr<const Fault> first_fault_;
  std::atomic<const Fault*> fault_{nullptr};
  Renewal renewal_;
};

}  // namespace sherd::threads
