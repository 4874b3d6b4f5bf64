#include "runtime/cuda/backend.h"

#include <limits>
#include <mutex>

#include "runtime/context.h"
#include "runtime/cuda/check.h"
#include "runtime/cuda/graph.h"
#include "runtime/cuda/kernels.h"
#include "runtime/cuda/memory.h"
#include "runtime/cuda/nccl.h"
#include "runtime/cuda/peer_queue.h"
#include "runtime/cuda/rank.h"
#include "runtime/cuda/waiting.h"
#include "runtime/waiting.h"

namespace sherd {
namespace cuda {
namespace {

/// Lets the driver's pool keep freed memory, because a step allocates what the step before it freed.
void keep_freed_memory(int index) {
  cudaMemPool_t pool = nullptr;
  check_cuda(cudaDeviceGetDefaultMemPool(&pool, index), "cuda memory pool");
  std::uint64_t all = std::numeric_limits<std::uint64_t>::max();
  check_cuda(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &all), "cuda memory pool");
}

bool is_pinned(const void* host) {
  cudaPointerAttributes attributes{};
  check_cuda(cudaPointerGetAttributes(&attributes, host), "cuda copy");
  return attributes.type == cudaMemoryTypeHost;
}

/// An event of the rank's stream that has a time.
class StreamMark final : public DeviceMark {
 public:
  explicit StreamMark(Device device) : device_(device) {
    DeviceState& state = state_of(device);  // also makes the device current, to which the event belongs
    check<StateError>(!state.recording(), "mark: a recording has no time; mark before it or after");
    check_cuda(cudaEventCreate(&event_), "cuda mark");
    check_cuda(cudaEventRecord(event_, state.stream()), "cuda mark");
  }
  ~StreamMark() override { cudaEventDestroy(event_); }
  bool reached() override { return is_done(cudaEventQuery(event_), "cuda mark"); }
  void wait() override { wait_for(event_, "cuda mark"); }
  double seconds_since(const DeviceMark& earlier) const override {
    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, dynamic_cast<const StreamMark&>(earlier).event_, event_),
               "cuda mark");
    return static_cast<double>(milliseconds) * 1e-3;
  }
  /// On a stream beside the rank's own, which goes on.
  void read(void* to, const void* from, std::size_t bytes) override {
    DeviceState& state = state_of(device_);
    const cudaStream_t reader = state.reader();
    wait();  // a copy to pageable memory waits for its stream within the driver
    if (Staging::serves(bytes) && !is_pinned(to)) {
      state.staging().read(to, from, bytes, reader);
    } else {
      check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, reader), "cuda read");
      check_cuda(cudaStreamSynchronize(reader), "cuda read");
    }
    state.hear_faults();
  }

 private:
  Device device_;
  cudaEvent_t event_ = nullptr;
};

class Aside final : public DeviceAside {
 public:
  explicit Aside(Device device) : device_(device) { state_of(device).begin_aside(); }
  ~Aside() override { known_state(device_)->end_aside(); }

 private:
  Device device_;
};

class CudaBackend final : public Backend {
 public:
  CudaBackend() {
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    check<DeviceError>(status == cudaSuccess && count > 0, "cuda: no GPU can be used here ({}); use cpu",
                       status == cudaSuccess ? "the driver lists none" : cudaGetErrorString(status));
    for (int i = 0; i < count; ++i) keep_freed_memory(i);
    add_kernels();
  }

  void* allocate(Device device, std::size_t bytes) override { return cuda::allocate(device, bytes); }
  void deallocate(Device device, void* data, std::size_t bytes) noexcept override {
    cuda::deallocate(device, data, bytes);
  }

  void copy(void* to, Device to_device, const void* from, Device from_device, std::size_t bytes) override {
    if (bytes == 0) return;
    if (!to_device.is_cpu() && !from_device.is_cpu() && to_device != from_device)
      return copy_between(to, to_device, from, from_device, bytes);
    DeviceState& state = state_of(to_device.is_cpu() ? from_device : to_device);
    check<StateError>(!state.recording() || to_device == from_device,
                      "copy: a recording would read or write the host's memory when it runs");
    if (from_device.is_cpu() && Staging::serves(bytes))
      return state.staging().copy(to, from, bytes, state.stream());
    if (to_device.is_cpu() && Staging::serves(bytes) && !is_pinned(to)) {
      state.staging().read(to, from, bytes, state.stream());
      return state.wait("cuda copy");
    }
    // Else the driver waits, where the copy is to pageable memory, and the rank does not go on meanwhile.
    if (to_device.is_cpu() && works_while_waiting()) state.wait("cuda copy");
    check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, state.stream()), "cuda copy");
    // Pageable memory was read when the call returned; pinned memory is read later, and the host may write it
    // before.
    if (to_device.is_cpu() || (from_device.is_cpu() && is_pinned(from))) state.wait("cuda copy");
  }

  void synchronize(Device device) override {
    state_of(device).wait(fmt::format("synchronize {}", to_string(device)));
  }
  void synchronize_all() override { cuda_synchronize(); }
  std::unique_ptr<DeviceMark> mark(Device device) override { return std::make_unique<StreamMark>(device); }
  std::unique_ptr<DeviceAside> aside(Device device) override { return std::make_unique<Aside>(device); }
  PeerQueue* peer_queue(Device device) override { return &state_of(device).peers(); }
  NetworkOffer network_offer(Device device, bool first) override { return nccl_offer(device, first); }
  std::unique_ptr<DeviceNetwork> connect(Device device, NetworkOffer own, const NetworkCard& first, int rank,
                                         int size) override {
    return nccl_connect(state_of(device), device, std::move(own), first, rank, size);
  }
  std::string product(Device device) override {
    cudaDeviceProp properties{};
    check_cuda(cudaGetDeviceProperties(&properties, device.index), "cuda device");
    return properties.name;
  }

  std::unique_ptr<DeviceRecording> record(Device device, const WorkInParts& work) override {
    return record_graph(device, work);
  }

 private:
  static void copy_between(void* to, Device to_device, const void* from, Device from_device,
                           std::size_t bytes) {
    // An event belongs to the device that is current when it is made, and is recorded there.
    const cudaStream_t source = stream_of(from_device);
    Event written;
    const cudaStream_t target = stream_of(to_device);
    Event read;
    written.order(source, target);
    check_cuda(cudaMemcpyPeerAsync(to, to_device.index, from, from_device.index, bytes, target), "cuda copy");
    read.order(target, source);
  }
};

}  // namespace
}  // namespace cuda

Backend& cuda_backend() {
  static cuda::CudaBackend instance;  // no state; made again at the next call when it throws
  return instance;
}

void cuda_synchronize() {
  for (int i = 0; i < cuda::most_devices; ++i)
    if (cuda::known_state(Device::cuda(i)) != nullptr) cuda_backend().synchronize(Device::cuda(i));
}

int cuda_device_count() noexcept {
  static const int devices = [] {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
  }();
  return devices;
}

}  // namespace sherd
