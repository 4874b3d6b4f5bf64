// Where the ranks of a group, threads of one process, find the memory in which their devices meet.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "runtime/peer_queue.h"

namespace sherd {

/// Keeps nothing alive. Used on all ranks' threads.
class MeetingBoard {
 public:
  explicit MeetingBoard(std::size_t size) : puts_(size) {}
  /// Shows a rank's memory to the others and returns the number of this meeting, which is the same on all
  /// ranks, since they put theirs up in one order. Null where the rank has none.
  std::uint64_t put(int rank, const std::shared_ptr<PeerMeeting>& mine) {
    const std::scoped_lock lock(mutex_);
    std::erase_if(shown_, [](const auto& one) { return one.second.expired(); });
    const std::uint64_t number = puts_[static_cast<std::size_t>(rank)]++;
    if (mine) shown_[{number, rank}] = mine;
    if (mine && given_up_) mine->give_up();
    return number;
  }
  /// That meeting's memory by rank; fewer where a rank has none. All ranks have put theirs up.
  std::vector<std::shared_ptr<PeerMeeting>> all(std::uint64_t number) {
    const std::scoped_lock lock(mutex_);
    std::vector<std::shared_ptr<PeerMeeting>> found;
    for (auto it = shown_.lower_bound({number, 0}); it != shown_.end() && it->first.first == number; ++it)
      if (auto one = it->second.lock()) found.push_back(std::move(one));
    return found;
  }
  /// The rank goes. Where its device has failed, the others wait no longer for what it had agreed to.
  void leave(int rank) noexcept {
    std::vector<std::shared_ptr<PeerMeeting>> own;
    {
      const std::scoped_lock lock(mutex_);
      for (const auto& [key, one] : shown_)
        if (auto meeting = key.second == rank ? one.lock() : nullptr) own.push_back(std::move(meeting));
    }
    if (!std::ranges::all_of(own, [](const auto& meeting) { return meeting->over(); })) give_up();
  }
  /// The group has failed: no device waits for a rank any more.
  void give_up() noexcept {
    std::vector<std::shared_ptr<PeerMeeting>> held;  // the last handles perhaps, which end after the lock
    const std::scoped_lock lock(mutex_);
    given_up_ = true;
    for (const auto& [key, one] : shown_) {
      const auto& meeting = held.emplace_back(one.lock());
      if (meeting) meeting->give_up();
    }
  }

 private:
  std::mutex mutex_;  // guards what follows
  bool given_up_ = false;
  std::vector<std::uint64_t> puts_;  // by rank
  std::map<std::pair<std::uint64_t, int>, std::weak_ptr<PeerMeeting>> shown_;
};

}  // namespace sherd
