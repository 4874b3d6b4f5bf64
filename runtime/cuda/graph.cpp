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
    if (const DeviceState* state = known_state(device_))
      cudaStreamSynchronize(state->stream());  // not others, on which peers' devices may be waited for
    else
      cudaDeviceSynchronize();
    GraphMemory::of(device_.index).end([this] { cudaGraphExecDestroy(graph_); });
    cudaGetLastError();
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void record(const std::function<void()>& work);
  void run(RandomKey start) override {
    const cudaStream_t stream = stream_of(device_);
    if (draws_) launch_set_key(start, start_.get(), stream);
    check_memory([&] { return cudaGraphLaunch(graph_, stream); });
  }

 private:
  /// The status of `call` must be success; where it found no memory, it is called once more after all that
  /// can be has been given back.
  template <class F>
  void check_memory(const F& call) const {
    GraphMemory& memory = GraphMemory::of(device_.index);
    cudaError_t status = memory.use(call);
    if (status == cudaErrorMemoryAllocation) [[unlikely]] {
      cudaGetLastError();
      give_back_to_graphs(state_of(device_));
      status = memory.use(call);
    }
    if (status == cudaErrorMemoryAllocation)
      refuse_memory(device_,
                    fmt::format("what a captured step makes on its way, beside this rank's tensors of {}",
                                Context::current().memory().held(device_.type).text()));
    check_cuda(status, "cuda graph");
  }

  Device device_;
  StartKey start_;
  bool draws_ = false;
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

void Graph::record(const std::function<void()>& work) {
  Capturing capturing(state_of(device_));
  RandomReplay replay = random_replay();
  replay.on_device = start_.get();
  draws_ = replay.end > replay.first.offset;
  {
    const ReplayingRandom scope(replay);
    work();
  }
  const cudaGraph_t graph = capturing.end();
  check<StateError>(graph != nullptr, "cuda graph: {}", cudaGetErrorString(cudaGetLastError()));
  const std::unique_ptr<std::remove_pointer_t<cudaGraph_t>, decltype(&cudaGraphDestroy)> recorded(
      graph, &cudaGraphDestroy);
  check_memory([&] { return cudaGraphInstantiate(&graph_, recorded.get(), 0); });
  GraphMemory::of(device_.index).begin();
}

}  // namespace

DeviceKey device_key(RandomKey key) {
  const RandomReplay& replay = random_replay();
  if (replay.on_device == nullptr || !replay.covers(key)) return {key_to_draw(key)};
  return {{0, key.offset - replay.first.offset}, replay.on_device};
}

std::unique_ptr<DeviceRecording> record_graph(Device device, const std::function<void()>& work) {
  try {
    auto graph = std::make_unique<Graph>(device);
    graph->record(work);
    return graph;
  } catch (const Error& e) {
    write_log(LogLevel::info, "{}: a captured step runs op by op: {}", to_string(device), e.what());
    return nullptr;
  }
}

}  // namespace sherd::cuda
