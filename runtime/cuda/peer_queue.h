// What a rank moves between ranks on its GPU: on a stream of its own beside the rank's.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <bitset>
#include <cstdint>

#include "runtime/cuda/rank.h"
#include "runtime/cuda/stream_memory.h"
#include "runtime/peer_queue.h"

namespace sherd::cuda {

/// Lets all other GPUs that can read the memory of `device` do so (none where SHERD_PEER_ACCESS is off), from
/// the pool that ranks' tensors are in; once for all ranks of the process. Best before anything runs there:
/// kernels that ran while their GPU's pool was being mapped for another one were seen to fail.
void open_to_peers(int device);

class CudaPeerQueue final : public PeerQueue {
 public:
  /// `state`: the rank's of the device, which owns this.
  CudaPeerQueue(DeviceState& state, Device device);
  /// Waits first, because peers' memory may be under way.
  ~CudaPeerQueue() override;
  CudaPeerQueue(const CudaPeerQueue&) = delete;
  CudaPeerQueue& operator=(const CudaPeerQueue&) = delete;

  std::unique_ptr<DeviceEvent> make_event() override;
  void mark_work(DeviceEvent& event) override;
  void mark(DeviceEvent& event) override;
  void follow(DeviceEvent& event) override;
  void work_follows(DeviceEvent& event) override;
  bool reach(Device other) override;
  void copy(std::span<const PeerCopy> copies) override;
  void combine(DType dtype, ReduceOp reduction, std::span<const PeerCombination> combinations,
               std::span<const Device> devices = {}) override;
  void free_after(std::span<DeviceEvent* const> events, const std::function<void()>& drop) override;
  std::shared_ptr<PeerMeeting> meeting(const MeetingPlan& plan) override;
  cudaStream_t stream() const { return moves_; }

 private:
  /// Makes the device current, to which streams and events belong.
  void use() const;
  /// From memory that kernels here cannot read.
  void bring(const PeerCopy& copy);
  /// In the order of the queue; OutOfMemoryError.
  StreamMemory memory_for(std::size_t bytes);
  /// Of sources that kernels here read.
  void combine_read(DType dtype, ReduceOp reduction, std::span<const PeerCombination> combinations);
  bool reads(Device other) const {
    return other == device_ || reads_.test(static_cast<std::size_t>(other.index));
  }
  /// A moment that a stream of the rank's work follows: it need not be told again.
  struct Followed {
    cudaStream_t stream = nullptr;
    std::uint64_t moment = 0;
    bool operator==(const Followed&) const = default;
  };

  DeviceState& state_;
  Device device_;
  std::array<Followed, 32> followed_{};  // the last ones
  std::size_t next_followed_ = 0;
  cudaStream_t moves_ = nullptr, frees_ = nullptr;
  Event work_so_far_;
  std::bitset<most_devices> reads_;  // whose memory kernels here read
};

}  // namespace sherd::cuda
