// The ranks of one `run_ranks`: who is still there, who sleeps, who waits for whom.
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

/// Wakes one rank. A rank spins briefly and then sleeps here; whoever publishes something it may wait for
/// rings.
class Bell {
 public:
  void ring() {
    if (asleep_.load(std::memory_order_seq_cst)) wake();
  }
  /// Sleeps until rung, unless `awake()` finds something first. What `awake` looks at is stored sequentially
  /// consistent and before a ring, so nothing is missed.
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
  const std::atomic<std::uint64_t>* posted;
  std::uint64_t sequence;
  Core* core;       ///< of the group that waits; alive while its rank does
  CallPlace place;  ///< of the call that waits
  Signature signature;
  bool renews = false;  ///< of a group that has failed already

  /// It was met, or the rank is about to hear of its group's fault and may then do anything.
  bool over() const;
};

/// What a rank shows its peers beside its calls.
struct alignas(128) Seat {
  Bell bell;
  std::atomic<Presence> presence{Presence::here};
  std::string reason;        ///< what it threw; written before `presence`
  std::optional<Need> need;  ///< guarded by the crew's mutex
};

/// Shared by the ranks of one run, which are threads of one process.
class Crew {
 public:
  /// `spins`: looks at the peers' progress before sleeping; few when ranks share cores.
  Crew(int size, int spins) : spins_(spins), seats_(static_cast<std::size_t>(size)) {}
  int size() const { return static_cast<int>(seats_.size()); }
  int spins() const { return spins_; }
  Seat& seat(int rank) { return seats_[static_cast<std::size_t>(rank)]; }

  /// A rank's body is over: it returned, or threw `reason`. Wakes all others.
  void leave(int rank, Presence how, std::string reason);

  /// A rank is about to sleep. When this closes a circle of ranks that wait for each other's next post, all
  /// of whom sleep, nothing can ever happen: their groups fail.
  void begin_wait(int rank, Need need);
  void end_wait(int rank);

 private:
  std::vector<int> circle_from(int rank);

  int spins_;
  std::vector<Seat> seats_;
  std::mutex needs_mutex_;  // taken only around sleeping
};

}  // namespace sherd::threads
