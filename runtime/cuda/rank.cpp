#include "runtime/cuda/rank.h"

#include <span>

#include "runtime/context.h"
#include "runtime/cuda/attention_cudnn.h"
#include "runtime/cuda/backend.h"
#include "runtime/cuda/beside_recording.h"
#include "runtime/cuda/check.h"
#include "runtime/cuda/conv_cudnn.h"
#include "runtime/cuda/fault_board.h"
#include "runtime/cuda/graph_memory.h"
#include "runtime/cuda/matmul_plans.h"
#include "runtime/cuda/peer_queue.h"
#include "runtime/cuda/waiting.h"

namespace sherd::cuda {
namespace {

struct Devices {
  std::array<std::unique_ptr<DeviceState>, most_devices> state;
};

}  // namespace

Event::Event() { check_cuda(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cuda event"); }
Event::~Event() { cudaEventDestroy(event_); }
void Event::record(cudaStream_t earlier) { check_cuda(cudaEventRecord(event_, earlier), "cuda event"); }
void Event::precede(cudaStream_t later) { check_cuda(cudaStreamWaitEvent(later, event_), "cuda event"); }

namespace {
cudaStream_t make_stream(int index) {
  cudaStream_t stream = nullptr;
  check_cuda(cudaSetDevice(index), "cuda device");
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cuda stream");
  return stream;
}
}  // namespace

DeviceState::DeviceState(int index) : index_(index), stream_(make_stream(index)), blocks_(stream_) {
  maker_->add(stream_);
}

DeviceState::~DeviceState() {
  cudaSetDevice(index_);
  cudaStreamSynchronize(stream_);
  if (aside_ != nullptr) cudaStreamSynchronize(aside_);
  peers_.reset();
  blocks_.trim();
  maker_->end();
  matmul_plans_.reset();
  cudnn_attention_.reset();
  cudnn_conv_.reset();
  faults_.reset();
  if (reader_ != nullptr) cudaStreamDestroy(reader_);
  if (aside_ != nullptr) cudaStreamDestroy(aside_);
  for (const cudaStream_t lane : std::span(lanes_).subspan(1))
    if (lane != nullptr) cudaStreamDestroy(lane);
  if (returns_ != nullptr) cudaStreamDestroy(returns_);
  cudaStreamDestroy(stream_);
}

cudaStream_t DeviceState::reader() {
  if (reader_ == nullptr)
    check_cuda(cudaStreamCreateWithFlags(&reader_, cudaStreamNonBlocking), "cuda stream");
  return reader_;
}

CudaPeerQueue& DeviceState::peers() {
  if (!peers_) peers_ = std::make_unique<CudaPeerQueue>(*this, Device::cuda(index_));
  return *peers_;
}

void DeviceState::begin_aside() {
  check<StateError>(!is_aside_, "aside: a scope in which {} works beside the rank's work is open already",
                    to_string(Device::cuda(index_)));
  if (aside_ == nullptr) {
    aside_ = make_stream(index_);
    maker_->add(aside_);
  }
  before_aside_.order(stream_, aside_);
  std::swap(stream_, aside_);
  is_aside_ = true;
}

void DeviceState::end_aside() noexcept {
  std::swap(stream_, aside_);
  is_aside_ = false;
}

void DeviceState::work_in_lane(int lane) {
  cudaStream_t& its = lanes_.at(static_cast<std::size_t>(lane));
  if (lane != lane_ && its == nullptr) {
    const BesideRecording scope;
    its = make_stream(index_);
  }
  lanes_[static_cast<std::size_t>(lane_)] = stream_;
  stream_ = its;
  lane_ = lane;
}

void DeviceState::free_on(cudaStream_t stream, const std::function<void()>& drop) {
  struct Scope {
    cudaStream_t& frees;
    ~Scope() { frees = nullptr; }
  } scope{frees_ = stream};
  drop();
}

cudaStream_t DeviceState::returns_after(cudaStream_t stream) {
  if (returns_ == nullptr) returns_ = make_stream(index_);
  before_return_.order(stream, returns_);
  return returns_;
}

void DeviceState::begin_recording() {
  maker_->begin_recording();
  recording_ = true;
}

void DeviceState::end_recording() {
  recording_ = false;
  for (const Maker::LeftBlock& block : maker_->end_recording()) {
    if (block.after != nullptr) {
      cudaStreamWaitEvent(stream_, block.after);
      cudaEventDestroy(block.after);
    }
    deallocate(Device::cuda(index_), block.data, block.bytes);
  }
}

MatMulPlans& DeviceState::matmul_plans() {
  if (!matmul_plans_) matmul_plans_ = std::make_unique<MatMulPlans>();
  return *matmul_plans_;
}

CudnnAttention& DeviceState::cudnn_attention() {
  if (!cudnn_attention_) cudnn_attention_ = std::make_unique<CudnnAttention>(Device::cuda(index_));
  return *cudnn_attention_;
}

CudnnConv& DeviceState::cudnn_conv() {
  if (!cudnn_conv_) cudnn_conv_ = std::make_unique<CudnnConv>(Device::cuda(index_));
  return *cudnn_conv_;
}

std::shared_ptr<GraphMemory> DeviceState::graph_memory() {
  std::shared_ptr<GraphMemory> memory = graph_memory_.lock();
  if (!memory) graph_memory_ = memory = std::make_shared<GraphMemory>(index_);
  return memory;
}

FaultSlot DeviceState::faults() {
  if (!faults_) faults_ = std::make_unique<FaultBoard>();
  return faults_->slot();
}

void DeviceState::wait(std::string_view what) {
  check<StateError>(!recording_, "{}: waits, which a recording cannot", what);
  wait_for(stream_, what);
  hear_faults();
}

void DeviceState::hear_faults() {
  if (faults_) faults_->raise(stream_);
}

DeviceState* known_state(Device device) {
  const auto& all = Context::current().slot<Devices>().state;
  return static_cast<std::size_t>(device.index) < all.size()
             ? all[static_cast<std::size_t>(device.index)].get()
             : nullptr;
}

DeviceState& state_of(Device device) {
  const int count = cuda_device_count();
  if (device.index >= count) [[unlikely]]  // a text that is made on every call costs more than the rest
    fail<DeviceError>("{}: this machine has {} GPU{}; use cuda:0{}", device, count, count == 1 ? "" : "s",
                      count > 1 ? fmt::format(" to cuda:{}", count - 1) : "");
  auto& state = Context::current().slot<Devices>().state[static_cast<std::size_t>(device.index)];
  if (!state) {
    if (Context::current().slot<PeerThreads>().there) open_to_peers(device.index);
    state = std::make_unique<DeviceState>(device.index);
  } else if (int current = -1; cudaGetDevice(&current) != cudaSuccess || current != device.index) {
    check_cuda(cudaSetDevice(device.index), "cuda device");  // twice the time of asking
  }
  return *state;
}

}  // namespace sherd::cuda
