// Pinned host memory through which values go between the host and a GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>

namespace sherd::cuda {

/// A few slots of pinned memory, each used again when the device is done with it. The driver's own copy of
/// pageable memory waits for all earlier work of the stream where it does not fit the driver's buffer, and
/// has one thread, which is slower than the way to the device.
class Staging {
 public:
  Staging() = default;
  /// The device was waited for.
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  /// Whether a copy is too long for the driver's buffer.
  static bool serves(std::size_t bytes) { return bytes > driver_buffer; }
  /// Gives the copy to `stream` and returns when the host may write `from` again: at once, but where it is
  /// longer than all slots or the device still has that much to read.
  void copy(void* to, const void* from, std::size_t bytes, cudaStream_t stream);
  /// From the device to the host, where all is when it returns.
  void read(void* to, const void* from, std::size_t bytes, cudaStream_t stream);

 private:
  static constexpr std::size_t driver_buffer = 64 << 10, slot_bytes = 4 << 20;
  struct Slot {
    void* memory = nullptr;
    cudaEvent_t done = nullptr;  // the device with the last copy
    bool holds = false;          // what has come from the device and is not read yet
  };
  /// The next one, made on first use, with which the device is done; null where all hold something. To wait
  /// for the device may be to come here again, with another copy.
  Slot* take();
  std::array<Slot, 4> slots_{};
  std::size_t next_ = 0;
};

}  // namespace sherd::cuda
