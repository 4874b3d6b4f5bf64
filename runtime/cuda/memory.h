// A GPU's memory: the driver's stream-ordered pool, and who asked it for which block.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <mutex>
#include <string_view>
#include <vector>

#include "runtime/device.h"

namespace sherd::cuda {

class DeviceState;

/// A rank's streams on a GPU, in which the work with its blocks lies, for whoever frees such a block. The
/// blocks keep it, so it may outlive the rank.
class Maker {
 public:
  /// A block that came back while the rank recorded.
  struct LeftBlock {
    void* data;
    std::size_t bytes;
    cudaEvent_t after;  // of the work of the thread that gave it back; null for the rank's own
  };

  // ---- the rank's own thread ----
  void add(cudaStream_t stream);
  /// The streams were waited for and are about to end.
  void end() noexcept;
  /// From here to `end_recording` nobody touches the streams: an event would become part of what is recorded.
  void begin_recording();
  /// What came back meanwhile, to be freed now.
  std::vector<LeftBlock> end_recording();
  /// Keeps a block until `end_recording`.
  void leave(const LeftBlock& block);

  // ---- any other thread ----
  /// Frees the rank's block on `later`, a stream of the caller, after the rank's work so far.
  void give_back(void* data, std::size_t bytes, cudaStream_t later);

 private:
  std::mutex mutex_;  // guards what follows
  bool recording_ = false;
  std::vector<cudaStream_t> streams_;
  std::vector<LeftBlock> left_;
};

/// As `Backend::allocate` and `Backend::deallocate`.
void* allocate(Device device, std::size_t bytes);
void deallocate(Device device, void* data, std::size_t bytes) noexcept;
/// Gives a block of `allocate` to the driver, to be used again after the work of `stream`.
void free_block(void* data, cudaStream_t stream) noexcept;

/// Gives the driver what this rank keeps for later, and waits for what other ranks freed. Not while
/// recording.
void give_back_unused(DeviceState& state);
/// The same; and what the driver's pool keeps is there for graphs, which have pools of their own.
void give_back_to_graphs(DeviceState& state);
/// OutOfMemoryError: no memory for `what`.
[[noreturn]] void refuse_memory(Device device, std::string_view what);

}  // namespace sherd::cuda
