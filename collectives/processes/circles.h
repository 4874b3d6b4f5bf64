// Finds ranks that wait for each other in a circle, so that nobody waits for ever.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <vector>

#include "collectives/processes/notice.h"

namespace sherd::processes {

struct GroupCore;
class Process;

/// What a rank that waits needs before it can go on: that `process` posts call `sequence` of `line`, or
/// renews its group.
struct Need {
  int process;
  LineId line;
  std::uint64_t sequence;
  GroupCore* core;  ///< of the group that waits
  CallPlace place;  ///< of the call that waits
  Signature signature;
  bool renews = false;
  const Fault* heard = nullptr;  ///< before it renews

  bool is(const Need& o) const {
    return process == o.process && line == o.line && sequence == o.sequence && renews == o.renews;
  }
  std::string call() const {
    return renews ? describe_renewal(place.group, heard) : describe(place, signature);
  }
};

/// This rank's part in finding circles. A rank that has waited for a while sends a chain, at first of itself
/// alone, to the rank that it waits for. That one drops it when it has sent the last of the chain something
/// that has not come there (it may be the post), or does not wait itself (it may yet post); else it adds
/// itself and passes the chain on to whom it waits for. What was dropped is made up for by the next chain,
/// after twice the time. So a chain that comes to a rank twice has gone round a circle,
/// and when all are in it for the second time, in the wait in which they were the first time, all of them
/// waited for each other when the first round ended: none can ever go on. The clock decides only when to
/// ask. Used on the rank's thread.
class Circles {
 public:
  /// Empty: the rank will go on by itself.
  using Look = std::function<std::optional<Need>()>;

  explicit Circles(Process& process) : process_(process) {}

  /// While it lives the rank waits, for what `look` says.
  class Wait {
   public:
    Wait(Circles& circles, Look look) : circles_(circles) { circles_.look_ = std::move(look); }
    ~Wait() {
      circles_.look_ = nullptr;
      circles_.need_.reset();
    }
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;

   private:
    Circles& circles_;
  };

  /// Called again and again by a rank that waits: sends a chain when it is time.
  void ask();
  void hear_chain(std::vector<Waiter> chain);
  void hear_circle(const std::vector<Waiter>& circle);

 private:
  const Need* look();
  void pass_on(std::vector<Waiter> chain);
  void conclude(std::vector<Waiter> circle);

  Process& process_;
  Look look_;
  std::optional<Need> need_;  ///< as of the last look
  std::uint64_t number_ = 0;  ///< of the wait for it
  std::chrono::steady_clock::time_point since_{};
  std::chrono::milliseconds until_asking_{};
};

}  // namespace sherd::processes
