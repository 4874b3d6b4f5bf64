// What a rank keeps for each GPU that it uses: a stream and more, in a slot of the rank's Context.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <functional>
#include <memory>
#include <string_view>

#include "runtime/cuda/block_cache.h"
#include "runtime/cuda/staging.h"
#include "runtime/device.h"

namespace sherd::cuda {

class CudaPeerQueue;
class CudnnAttention;
class CudnnConv;
class FaultBoard;
class GraphMemory;
class MatMulPlans;
struct FaultSlot;

/// An event that orders the work of two streams.
class Event {
 public:
  Event();
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  /// Work that is given to `later` from now on runs after the work that `earlier` holds now.
  void order(cudaStream_t earlier, cudaStream_t later) {
    record(earlier);
    precede(later);
  }
  /// The two halves of `order`.
  void record(cudaStream_t earlier);
  void precede(cudaStream_t later);

 private:
  cudaEvent_t event_ = nullptr;
};

/// Streams that a recording has, the rank's own among them (lanes.h).
inline constexpr int most_lanes = 4;

/// A rank's stream on one GPU, what libraries keep for it (matmul_plans.h, cudnn_plans.h) and its reports
/// of bad values.
class DeviceState {
 public:
  explicit DeviceState(int index);
  /// Waits for the stream first, because its work may use memory that is freed after this.
  ~DeviceState();
  DeviceState(const DeviceState&) = delete;
  DeviceState& operator=(const DeviceState&) = delete;

  int index() const { return index_; }
  cudaStream_t stream() const { return stream_; }
  /// Stands for this state where others free the blocks that it took from the driver.
  const std::shared_ptr<Maker>& maker() const { return maker_; }
  /// A stream on which other ranks' blocks are freed after the work that `stream` holds now: what this rank
  /// computes does not wait for those ranks.
  cudaStream_t returns_after(cudaStream_t stream);
  BlockCache& blocks() { return blocks_; }
  Staging& staging() { return staging_; }
  /// A stream for reads by the host that do not wait for the other one; made on first use.
  cudaStream_t reader();
  /// What moves between ranks, on streams of its own; made on first use.
  CudaPeerQueue& peers();
  MatMulPlans& matmul_plans();
  CudnnAttention& cudnn_attention();
  CudnnConv& cudnn_conv();
  /// The blocks that this rank's recordings use, made anew when no graph holds them any more.
  std::shared_ptr<GraphMemory> graph_memory();
  /// The same where there are some, else null.
  std::shared_ptr<GraphMemory> known_graph_memory() const { return graph_memory_.lock(); }
  /// Where kernels of this stream report bad values.
  FaultSlot faults();
  /// Waits for the stream, and throws ValueError for what its kernels reported; StateError while recording.
  void wait(std::string_view what);
  /// Throws ValueError for what kernels have reported so far; does not wait.
  void hear_faults();
  /// From here to `end_aside`, `stream()` is another one, which follows it; and what is freed is freed there.
  void begin_aside();
  void end_aside() noexcept;
  /// Until the next call `stream()` is that of a lane of a recording (lanes.h): 0 is the rank's own.
  void work_in_lane(int lane);
  int lane() const { return lane_; }
  /// Runs `drop`; what it frees is freed on `stream` in place of the rank's own.
  void free_on(cudaStream_t stream, const std::function<void()>& drop);
  /// The stream of `free_on` while it runs, or that of a scope aside; else null.
  cudaStream_t frees() const { return frees_ != nullptr ? frees_ : is_aside_ ? stream_ : nullptr; }
  /// Whether the stream's work is being recorded (graph.h) instead of done.
  bool recording() const { return recording_; }
  void begin_recording();
  /// After the end of the stream's capture: frees what came back meanwhile.
  void end_recording();

 private:
  int index_;
  bool recording_ = false;
  cudaStream_t stream_ = nullptr, reader_ = nullptr, frees_ = nullptr, aside_ = nullptr, returns_ = nullptr;
  bool is_aside_ = false;
  int lane_ = 0;
  std::array<cudaStream_t, most_lanes> lanes_{};  // that of `lane_` stands in `stream_`
  Event before_aside_, before_return_;
  std::shared_ptr<Maker> maker_ = std::make_shared<Maker>();
  BlockCache blocks_;
  Staging staging_;
  std::unique_ptr<CudaPeerQueue> peers_;
  std::unique_ptr<MatMulPlans> matmul_plans_;
  std::unique_ptr<CudnnAttention> cudnn_attention_;
  std::unique_ptr<CudnnConv> cudnn_conv_;
  std::unique_ptr<FaultBoard> faults_;
  std::weak_ptr<GraphMemory> graph_memory_;
};

/// As many as a Device can name.
inline constexpr int most_devices = 128;
/// This rank's state of `device`, made on first use; makes the device current for the calling thread.
DeviceState& state_of(Device device);
/// The same where it was made before, else null; leaves the thread's current device as it is.
DeviceState* known_state(Device device);
inline cudaStream_t stream_of(Device device) { return state_of(device).stream(); }

}  // namespace sherd::cuda
