// Calls whose tensors lie on devices that work by themselves: the hosts agree, the devices move, and what
// orders the devices are events.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "runtime/peer_queue.h"
#include "runtime/storage.h"

namespace sherd {

/// The moments of one posted call on one rank's device.
struct CallMoments {
  std::unique_ptr<DeviceEvent> ready;                 ///< this rank's tensors may be read and written
  std::array<std::unique_ptr<DeviceEvent>, 2> moved;  ///< this rank has moved what it takes, by round
};

/// One rank's moments of one sequence of calls, on one device. Only that rank sets them; all follow them.
struct DeviceLane {
  DeviceLane(Device device, PeerQueue& queue);
  /// Calls that a rank can have under way in one order.
  static constexpr std::uint64_t depth = 8;
  CallMoments& of(std::uint64_t sequence) { return calls[sequence % depth]; }

  const Device device;
  PeerQueue& queue;  ///< the rank's, on whose thread alone it is used
  std::array<CallMoments, depth> calls;
  std::atomic<DeviceEvent*> latest{nullptr};  ///< of the last call that it has moved
};

/// A rank's `DeviceLane`s, a few at most: they are added, and never go before the group does.
class DeviceLanes {
 public:
  /// The one on `device`, made on first use. On the rank's thread.
  DeviceLane& on(Device device, PeerQueue& queue);
  std::size_t count() const { return count_.load(std::memory_order_seq_cst); }
  /// Calls `f` with each. On any thread.
  template <class F>
  void each(const F& f) const {
    const std::size_t n = count_.load(std::memory_order_seq_cst);
    for (std::size_t i = 0; i < n; ++i) f(*lanes_[i]);
  }

 private:
  static constexpr std::size_t most = 16;  // devices that one rank uses in one sequence of calls
  std::array<std::unique_ptr<DeviceLane>, most> lanes_;
  std::atomic<std::size_t> count_{0};
};

/// All ranks' moments of one sequence of calls. Holds no memory of calls, so it may outlive them: loans hold
/// it.
class Moments final : public MemoryLoan {
 public:
  explicit Moments(std::size_t size) : lanes_(size) {}
  DeviceLanes& lane(std::size_t i) { return lanes_[i]; }
  /// Calls `f` with the last moment of each rank so far that is not past: to ask costs less than to follow.
  template <class F>
  void each_to_come(const F& f) const {
    each_latest([&](DeviceEvent& latest) {
      if (!latest.reached()) f(latest);
    });
  }
  /// Calls `f` with the last moment of each rank so far.
  template <class F>
  void each_latest(const F& f) const {
    for (const DeviceLanes& lane : lanes_)
      lane.each([&](const DeviceLane& on) {
        if (DeviceEvent* latest = on.latest.load(std::memory_order_seq_cst)) f(*latest);
      });
  }
  /// Whether no rank has used a second device.
  bool one_device_each() const {
    return std::ranges::none_of(lanes_, [](const DeviceLanes& lane) { return lane.count() > 1; });
  }
  /// Returns when nothing moves any more that was begun before.
  void wait() const;
  /// The same, and when the work is done that ranks had given to their devices before they posted.
  void wait_for_all() const;
  void before_free(Device device) noexcept override;

 private:
  std::vector<DeviceLanes> lanes_;
};

/// For storages of a call that is over for the hosts, which devices may still move: whoever frees one later
/// knows. Says whether nobody but the caller holds one of them, which it then drops by `free_after_moves`.
bool lend(const std::shared_ptr<Moments>& moments, std::span<const Ref<Storage>> storages);
/// Runs `drop`; what it frees on `device` is used again when all moves so far are done.
void free_after_moves(const Moments& moments, Device device, const std::function<void()>& drop);

}  // namespace sherd
