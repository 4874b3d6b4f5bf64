// Moving data between ranks on a device, beside what the rank computes there: what a transport needs of a
// back end whose work is given to it and done later.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "runtime/device.h"
#include "runtime/dtype.h"
#include "runtime/export.h"
#include "runtime/reduce_op.h"

namespace sherd {

/// A moment in one rank's work on a device, which that rank sets, again and again, and which the work of any
/// rank can follow. Until it is set for the first time it lies in the past.
class SHERD_API DeviceEvent {
 public:
  virtual ~DeviceEvent();
  /// Returns when the moment last set is past.
  virtual void wait() = 0;
  /// Whether `wait` would return at once.
  virtual bool reached() = 0;
};

/// `bytes` from a peer's memory, which may be on another device of the same type.
struct PeerCopy {
  void* to;
  const void* from;
  Device from_device;
  std::size_t bytes;
};

/// `count` elements of each source, in the order of the ranks, become one; `out` may be one of them.
struct PeerCombination {
  std::span<const std::byte* const> sources;
  std::byte* out;
  std::int64_t count;
};

/// What one rank does with one segment in a call that is part of a recording: it sends as many bytes to each
/// other rank as arrive from there.
struct MeetingPart {
  const std::byte* in;   ///< null where this rank brings nothing
  std::byte* out;        ///< null where it takes nothing
  std::size_t bytes;     ///< that go from one rank to another; may be 0
  std::size_t in_step;   ///< what goes to rank r begins at `in + r * in_step`
  std::size_t out_step;  ///< what comes from rank r goes to `out + r * out_step`, unless it is combined
};

struct MeetingCall {
  /// Of parts, in one call.
  static constexpr std::size_t most_parts = 64;

  DType dtype = DType::u8;
  std::optional<ReduceOp> reduction{};  ///< all ranks' parts become one, in their order; none: side by side
  int root = -1;                        ///< whose part is taken; -1: those of all
  std::vector<MeetingPart> parts{};
};

/// One rank's memory on a device where recordings of several ranks meet while they run: what the others send
/// arrives there, and a call waits until all of it has. The ranks are threads of one process, each with a
/// device of its own: on a shared one a rank's wait could stand before the work for which it waits. Kept
/// until all ranks have dropped their recordings.
class SHERD_API PeerMeeting {
 public:
  virtual ~PeerMeeting();
  /// Gives call `index` of the plan, with the addresses of now, to the rank's device as part of what it
  /// records. `all`: by rank, this one among them, on devices that the rank's queue reaches. Every rank
  /// records all calls of the plan in their order, and they run as often on each. On the rank's thread.
  virtual void meet(std::span<const std::shared_ptr<PeerMeeting>> all, std::size_t index,
                    const MeetingCall& call) = 0;
  /// Returns when the device has done what it has, and says whether it could. On the rank's thread.
  virtual bool over() noexcept = 0;
  /// What waits here ends, now and later, and the next wait of the rank's host throws DeviceError. On any
  /// thread.
  virtual void give_up() noexcept = 0;
};

/// Who meets, and in which calls: the same on all ranks, but for their addresses.
struct MeetingPlan {
  int rank, size;
  std::vector<MeetingCall> calls;
};

/// What one rank moves on one device, in an order of its own beside the rank's own work there. Neither waits
/// for the other but where it is said here, and the host waits for none. Used on the rank's thread. Peers'
/// addresses are read as they are, so ranks are threads of one process.
class SHERD_API PeerQueue {
 public:
  virtual ~PeerQueue();
  virtual std::unique_ptr<DeviceEvent> make_event() = 0;
  /// Sets `event` after the rank's own work so far. StateError while that is being recorded: peers would not
  /// follow when the recording runs.
  virtual void mark_work(DeviceEvent& event) = 0;
  /// Sets `event` after all that is in this queue.
  virtual void mark(DeviceEvent& event) = 0;
  /// What this queue is given from now on runs after `event`, of any rank.
  virtual void follow(DeviceEvent& event) = 0;
  /// So does what the rank computes from now on.
  virtual void work_follows(DeviceEvent& event) = 0;
  /// What lies on `other`, of the same type, may be given to it from now on. Says whether this device reads
  /// it where it is, as meetings need.
  virtual bool reach(Device other) = 0;
  virtual void copy(std::span<const PeerCopy> copies) = 0;
  /// By the rule of `ReduceOp`: the bits are those of the host. `devices`: on which a source lies, by rank;
  /// none where all lie on this one.
  virtual void combine(DType dtype, ReduceOp reduction, std::span<const PeerCombination> combinations,
                       std::span<const Device> devices = {}) = 0;
  /// Runs `drop`. Memory of this device that it frees is used again after the rank's own work so far and
  /// after `events`, for which that work does not wait.
  virtual void free_after(std::span<DeviceEvent* const> events, const std::function<void()>& drop) = 0;
  /// Null where recordings of this device hold no calls among ranks.
  virtual std::shared_ptr<PeerMeeting> meeting(const MeetingPlan&) { return nullptr; }
};

/// In the Context of a rank: whether its peers are threads of its process, which may read its devices'
/// memory. A back end then prepares a device for that when the rank first uses it.
struct PeerThreads {
  bool there = false;
};

/// A scope in which what a rank gives to a device runs beside the rank's own work there: after all of that so
/// far, while what comes after the scope does not follow it but by an event (`PeerQueue::mark_work` within).
class SHERD_API DeviceAside {
 public:
  virtual ~DeviceAside();
};

/// What peers still do with a storage's memory after the call is over for its rank's host.
class SHERD_API MemoryLoan {
 public:
  virtual ~MemoryLoan();
  /// The memory is about to be freed: what the calling rank computes on `device` from now on, which may use
  /// it again, follows the peers' work with it.
  virtual void before_free(Device device) noexcept = 0;
};

}  // namespace sherd
