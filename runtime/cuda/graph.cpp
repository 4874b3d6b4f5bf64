#include "runtime/cuda/graph.h"

#include <cuda_runtime_api.h>

#include <memory>
#include <type_traits>
#include <utility>

#include "runtime/context.h"
#include "runtime/cuda/check.h"
#include "runtime/cuda/device_key.h"
#include "runtime/cuda/graph_memory.h"
#include "runtime/cuda/kernels.h"
#include "runtime/cuda/lanes.h"
#include "runtime/cuda/memory.h"
#include "runtime/cuda/rank.h"
#include "runtime/log.h"
#include "runtime/replay.h"

namespace sherd::cuda {
namespace {

/// The key that a graph's random numbers start from, in device memory.
class StartKey {
 public:
  StartKey() { check_cuda(cudaMalloc(reinterpret_cast<void**>(&at_), sizeof *at_), "cuda graph"); }
  ~StartKey() { cudaFree(at_); }
  StartKey(const StartKey&) = delete;
  StartKey& operator=(const StartKey&) = delete;
  RandomKey* get() const { return at_; }

 private:
  RandomKey* at_ = nullptr;
};

class Graph final : public DeviceRecording {
 public:
  explicit Graph(Device device) : device_(device) {}
  /// Waits first, because the stream may be at work on the graph.
  ~Graph() override {
    if (graph_ == nullptr) return;
    cudaSetDevice(device_.index);
    const Context* context = Context::current_or_null();
    const DeviceState* state = context != nullptr && context->id() == rank_ ? known_state(device_) : nullptr;
    if (state != nullptr)
      cudaStreamSynchronize(state->stream());  // not others, on which peers' devices may be waited for
    else
      cudaDeviceSynchronize();
    cudaGraphExecDestroy(graph_);
    cudaGetLastError();
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void record(const WorkInParts& work);
  void run(RandomKey start) override {
    const cudaStream_t stream = stream_of(device_);
    if (draws_) launch_set_key(start, start_.get(), stream);
    check_cuda(cudaGraphLaunch(graph_, stream), "cuda graph");
  }

 private:
  Device device_;
  const std::uint64_t rank_ = Context::current().id();  // on whose stream it runs
  StartKey start_;
  bool draws_ = false;
  std::shared_ptr<GraphMemory> memory_;  // what the ops make on their way
  cudaGraphExec_t graph_ = nullptr;
};

/// A scope in which what is given to a stream is recorded. Other threads' calls do not disturb it.
class Capturing {
 public:
  explicit Capturing(DeviceState& state) : state_(state) {
    state_.begin_recording();
    const cudaError_t begun = cudaStreamBeginCapture(state_.stream(), cudaStreamCaptureModeThreadLocal);
    if (begun != cudaSuccess) state_.end_recording();
    check_cuda(begun, "cuda graph");
  }
  ~Capturing() {
    if (state_.recording()) cudaGraphDestroy(end());
    cudaGetLastError();  // of what could not be recorded
  }
  Capturing(const Capturing&) = delete;
  Capturing& operator=(const Capturing&) = delete;
  /// What was recorded; null when that failed.
  cudaGraph_t end() {
    cudaGraph_t graph = nullptr;
    cudaStreamEndCapture(state_.stream(), &graph);
    state_.end_recording();
    return graph;
  }

 private:
  DeviceState& state_;
};

void Graph::record(const WorkInParts& work) {
  DeviceState& state = state_of(device_);
  memory_ = state.graph_memory();
  Capturing capturing(state);
  RandomReplay replay = random_replay();
  replay.on_device = start_.get();
  draws_ = replay.end > replay.first.offset;
  {
    const ReplayingRandom scope(replay);
    give_in_lanes(work, state);
  }
  const cudaGraph_t graph = capturing.end();
  check<StateError>(graph != nullptr, "cuda graph: {}", cudaGetErrorString(cudaGetLastError()));
  const std::unique_ptr<std::remove_pointer_t<cudaGraph_t>, decltype(&cudaGraphDestroy)> recorded(
      graph, &cudaGraphDestroy);
  check_cuda(cudaGraphInstantiate(&graph_, recorded.get(), 0), "cuda graph");
  memory_->before(state.stream());
  check_cuda(cudaGraphUpload(graph_, state.stream()), "cuda graph");  // what it lacks is found out here
}

std::unique_ptr<DeviceRecording> record_once(Device device, const WorkInParts& work) {
  auto graph = std::make_unique<Graph>(device);
  graph->record(work);
  return graph;
}

}  // namespace

DeviceKey device_key(RandomKey key) {
  const RandomReplay& replay = random_replay();
  if (replay.on_device == nullptr || !replay.covers(key)) return {key_to_draw(key)};
  return {{0, key.offset - replay.first.offset}, replay.on_device};
}

std::unique_ptr<DeviceRecording> record_graph(Device device, const WorkInParts& work) {
  try {
    try {
      return record_once(device, work);
    } catch (const OutOfMemoryError&) {
      give_back_to_graphs(state_of(device));
      return record_once(device, work);
    }
  } catch (const Error& e) {
    write_log(LogLevel::info, "{}: a captured step runs op by op: {}", to_string(device), e.what());
    return nullptr;
  }
}

}  // namespace sherd::cuda
