// The ranks of one `run_ranks` that are threads: which are still running, which sleep, and for which post
// each waits.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "collectives/fault.h"

namespace sherd::threads {

class Core;

/// Where one rank sleeps, after a short spin. Whoever publishes something that the rank may wait for calls
/// `ring`.
class Bell {
 public:
  void ring() {
    if (asleep_.load(std::memory_order_seq_cst)) wake();
  }
  /// Sleeps until `ring`, unless `awake()` is true before. What `awake` reads must be stored sequentially
  /// consistent and before the ring; then no ring is missed.
  template <class Awake>
  void sleep_unless(const Awake& awake) {
    asleep_.store(true, std::memory_order_seq_cst);
    const std::uint32_t seen = rings_.load(std::memory_order_seq_cst);
    if (!awake()) rings_.wait(seen, std::memory_order_seq_cst);
    asleep_.store(false, std::memory_order_seq_cst);
  }

 private:
  void wake();
  std::atomic<bool> asleep_{false};
  std::atomic<std::uint32_t> rings_{0};
};

enum class Presence : std::uint8_t { here, left, threw };

/// What a rank waits for while it sleeps: that `seat` posts its call number `sequence` of a line.
struct Need {
  int seat;
  const std::atomic<std::uint64_t>*posted, *promised;  ///< the latter counts queued calls too
  std::uint64_t sequence;
  Core* core;       ///< of the group that waits; alive while its rank does
  CallPlace place;  ///< of the call that waits
  Signature signature;
  bool renews = false;  ///< it waits in `renew`, so its group has failed already

  /// The post has come, or the waiting group has failed and its rank will wake to throw.
  bool over() const;
  /// It is over, or will be without a further call of that rank.
  bool in_sight() const;
};

/// What the peers of a rank see of it beside its calls.
struct alignas(128) Seat {
  Bell bell;
  std::atomic<Presence> presence{Presence::here};
  std::string parting;         ///< how it left, in words; written before `presence`, as is `heard` then
  std::optional<Fault> heard;  ///< the last fault that it was told of, until it uses a group that was renewed
  std::optional<Need> need;    ///< guarded by the crew's mutex
};

/// Shared by the ranks of one run, which are threads of one process.
class Crew {
 public:
  /// `spins`: looks at the peers' progress before sleeping; few when ranks share cores.
  Crew(int size, int spins) : spins_(spins), seats_(static_cast<std::size_t>(size)) {}
  int size() const { return static_cast<int>(seats_.size()); }
  int spins() const { return spins_; }
  Seat& seat(int rank) { return seats_[static_cast<std::size_t>(rank)]; }

  /// The body of a rank has ended: it returned, or threw `reason`. Wakes all others.
  void leave(int rank, Presence how, std::string_view reason);

  /// A rank is about to sleep. If it closes a circle of sleeping ranks that wait for each other's next post,
  /// none can ever wake: their groups fail.
  void begin_wait(int rank, Need need);
  void end_wait(int rank);

 private:
  std::vector<int> circle_from(int rank);

  int spins_;
  std::vector<Seat> seats_;
  std::mutex needs_mutex_;  // taken only around sleeping
};

}  // namespace sherd::threads
