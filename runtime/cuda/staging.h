// Pinned host memory through which values of the host reach a GPU while both go on.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>

namespace sherd::cuda {

/// A few slots of pinned memory, each used again when the device has read it. The driver's own
/// copy of pageable memory waits for all earlier work of the stream where it does not fit the driver's
/// buffer.
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

 private:
  static constexpr std::size_t driver_buffer = 64 << 10, slot_bytes = 4 << 20;
  struct Slot {
    void* memory = nullptr;
    cudaEvent_t read = nullptr;
  };
  std::array<Slot, 4> slots_{};
  std::size_t next_ = 0;
};

}  // namespace sherd::cuda
