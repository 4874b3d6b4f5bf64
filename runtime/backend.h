// What a type of device must offer: memory, copies and waiting. The CPU and CUDA each implement it in a
// folder of their own, an application may add its own.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "runtime/device_network.h"
#include "runtime/device_recording.h"
#include "runtime/kernel.h"
#include "runtime/peer_queue.h"

namespace sherd {

/// A point in a rank's work on a device: after all that the rank had given to it. Used on the rank's thread.
class SHERD_API DeviceMark {
 public:
  virtual ~DeviceMark();
  /// Whether the work before it is done; does not wait.
  virtual bool reached() = 0;
  /// Returns when the work before it is done, whatever came later.
  virtual void wait() = 0;
  /// Seconds of the device's time since another mark of the same device. Both were reached.
  virtual double seconds_since(const DeviceMark& earlier) const = 0;
  /// Copies to the host what the work before it wrote and no later work writes, without waiting for later
  /// work.
  virtual void read(void* to, const void* from, std::size_t bytes) = 0;
};

/// The memory of one type of device. Called by any rank, so from several threads at once.
class SHERD_API Backend {
 public:
  virtual ~Backend();
  /// At least `bytes` of uninitialised memory, aligned to 64 bytes; throws OutOfMemoryError.
  virtual void* allocate(Device device, std::size_t bytes) = 0;
  /// Takes back `data`, which `allocate` gave for `bytes`.
  virtual void deallocate(Device device, void* data, std::size_t bytes) noexcept = 0;
  /// Copies bytes where `to` or `from` may be the host's memory; runs after earlier work of this rank on the
  /// device.
  virtual void copy(void* to, Device to_device, const void* from, Device from_device, std::size_t bytes) = 0;
  /// Waits until all work of this rank on the device is done.
  virtual void synchronize(Device device) = 0;
  /// The same on all devices of this type that the rank used. Nothing to wait for where a back end says
  /// nothing of its own: its work is done when it is asked for.
  virtual void synchronize_all() {}
  /// Records what the parts of `work` give to the device on this rank, instead of doing it. Null where the
  /// device cannot, or where a part does what a recording cannot hold (it waits, or copies from the host);
  /// nothing has been done then either.
  virtual std::unique_ptr<DeviceRecording> record(Device, const WorkInParts&) { return nullptr; }
  /// A mark after all work of this rank so far. A back end that says nothing of its own has none that is
  /// under way after `synchronize`, which this calls.
  virtual std::unique_ptr<DeviceMark> mark(Device device);
  /// A scope on the calling thread, one at a time, for back ends that have a `peer_queue`. Null where nothing
  /// runs beside anything else.
  virtual std::unique_ptr<DeviceAside> aside(Device) { return nullptr; }
  /// The calling rank's queue for moving data between ranks on `device`, which the back end keeps as long as
  /// the rank lives. Null where tensors of this type of device do not travel between ranks.
  virtual PeerQueue* peer_queue(Device) { return nullptr; }
  /// What this rank tells those whose devices its own is to be connected with, and what it keeps free for
  /// that; `first`: its card names the connections. A card that says nothing, as where there is no room: what
  /// processes move of these tensors goes through the host.
  virtual NetworkOffer network_offer(Device, [[maybe_unused]] bool first) { return {}; }
  /// Begins to connect `device` with those of the other ranks, which all do so with the first one's card and
  /// have cards that reach. Never waits.
  virtual std::unique_ptr<DeviceNetwork> connect(Device device, NetworkOffer own, const NetworkCard& first,
                                                 int rank, int size);
  /// What the device's maker calls it ("NVIDIA H200"); empty where nobody says.
  virtual std::string product(Device device);
};

/// The back end of a type of device. DeviceError for `meta`, and when this build or machine has none.
SHERD_API Backend& backend(DeviceType type);

/// Waits until all work that the calling thread gave to `device` is done. A device does each thread's work in
/// order, and knows no order among threads: a tensor or a `Program` of one thread is another one's to use, to
/// write and to drop after this, on the thread that has used it. (`run_ranks` does it for its ranks, before
/// and after.) ValueError for a bad value that a kernel of the thread met, DeviceError as `backend`.
SHERD_API void synchronize(Device device);
/// The same for every device that the calling thread used.
SHERD_API void synchronize();

/// GPUs that this process can use: `cuda:0` and up. 0 without a driver, and in a build without CUDA.
SHERD_API int gpu_count() noexcept;

/// Adds a back end of the application's own and returns the type that its devices have: `Device{type, 0}`.
/// Add its kernels with `add_kernel`; an op without one runs its reference. `instance` must outlive every
/// tensor on it. ValueError when the name is taken, or five are registered.
SHERD_API DeviceType register_backend(std::string name, Backend& instance);
/// The name under which an application's back end was registered; "?" for any other type.
SHERD_API std::string_view backend_name(DeviceType type);
/// The type that was registered under `name`, if any.
SHERD_API std::optional<DeviceType> backend_type(std::string_view name);

}  // namespace sherd
