#include "runtime/cuda/peer_queue.h"

#include <algorithm>
#include <mutex>
#include <vector>

#include "runtime/backend.h"
#include "runtime/cuda/backend.h"
#include "runtime/cuda/check.h"
#include "runtime/cuda/kernels.h"
#include "runtime/cuda/peer_moves.h"
#include "runtime/cuda/waiting.h"

namespace sherd::cuda {
namespace {

/// Longer copies are the copy engines', which leave the multiprocessors to the rank's own work.
constexpr std::size_t engine_bytes = 256 << 10;

class PeerEvent final : public DeviceEvent {
 public:
  PeerEvent() { check_cuda(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cuda peers"); }
  ~PeerEvent() override { cudaEventDestroy(event_); }
  void wait() override { wait_for(event_, "cuda peers"); }
  bool reached() override {
    const cudaError_t status = cudaEventQuery(event_);
    if (status != cudaErrorNotReady) check_cuda(status, "cuda peers");
    return status == cudaSuccess;
  }
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

cudaEvent_t event_of(DeviceEvent& event) { return dynamic_cast<PeerEvent&>(event).get(); }

cudaStream_t urgent_stream() {
  int least = 0, greatest = 0;
  check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cuda peers");
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest), "cuda peers");
  return stream;
}

bool can_read(int reader, int owner) {
  int reaches = 0;
  check_cuda(cudaDeviceCanAccessPeer(&reaches, reader, owner), "cuda peers");
  return reaches != 0;
}

}  // namespace

void open_to_peers(int device) {
  static std::mutex mutex;
  static std::bitset<most_devices> open;
  const std::scoped_lock lock(mutex);
  if (open.test(static_cast<std::size_t>(device))) return;
  std::vector<cudaMemAccessDesc> readers;
  for (int other = 0; other < cuda_device_count(); ++other)
    if (other != device && can_read(other, device))
      readers.push_back({{cudaMemLocationTypeDevice, other}, cudaMemAccessFlagsProtReadWrite});
  if (!readers.empty()) {
    cudaMemPool_t pool = nullptr;
    check_cuda(cudaSetDevice(device), "cuda peers");
    check_cuda(cudaDeviceSynchronize(), "cuda peers");
    check_cuda(cudaDeviceGetDefaultMemPool(&pool, device), "cuda peers");
    check_cuda(cudaMemPoolSetAccess(pool, readers.data(), readers.size()), "cuda peers");
  }
  open.set(static_cast<std::size_t>(device));
}

CudaPeerQueue::CudaPeerQueue(DeviceState& state, Device device)
    : state_(state), device_(device), moves_(urgent_stream()) {
  check_cuda(cudaStreamCreateWithFlags(&frees_, cudaStreamNonBlocking), "cuda peers");
}

CudaPeerQueue::~CudaPeerQueue() {
  for (const cudaStream_t stream : {moves_, frees_}) {
    cudaStreamSynchronize(stream);
    cudaStreamDestroy(stream);
  }
}

void CudaPeerQueue::use() const { check_cuda(cudaSetDevice(device_.index), "cuda peers"); }

std::unique_ptr<DeviceEvent> CudaPeerQueue::make_event() {
  use();
  return std::make_unique<PeerEvent>();
}

void CudaPeerQueue::mark_work(DeviceEvent& event) {
  check<StateError>(!state_.recording(), "collectives: a recording on {} cannot hold a call among ranks",
                    to_string(device_));
  use();
  check_cuda(cudaEventRecord(event_of(event), state_.stream()), "cuda peers");
}

void CudaPeerQueue::mark(DeviceEvent& event) {
  use();
  check_cuda(cudaEventRecord(event_of(event), moves_), "cuda peers");
}

void CudaPeerQueue::follow(DeviceEvent& event) {
  check_cuda(cudaStreamWaitEvent(moves_, event_of(event)), "cuda peers");
}

void CudaPeerQueue::work_follows(DeviceEvent& event) {
  check_cuda(cudaStreamWaitEvent(state_.stream(), event_of(event)), "cuda peers");
}

void CudaPeerQueue::reach(Device other) {
  if (other == device_ || reached_.test(static_cast<std::size_t>(other.index))) return;
  check<NotImplementedError>(can_read(device_.index, other.index),
                             "collectives: {} cannot read the memory of {}; start the ranks as processes "
                             "(sherd launch, torchrun), which go through the host or NCCL",
                             to_string(device_), to_string(other));
  open_to_peers(other.index);
  use();
  reached_.set(static_cast<std::size_t>(other.index));
}

void CudaPeerQueue::copy(std::span<const PeerCopy> copies) {
  use();
  CopyTable table;
  const auto launch = [&] {
    if (table.count == 0) return;
    launch_copies(table, moves_);
    check_launch("cuda peers");
    table.count = 0;
  };
  for (const PeerCopy& c : copies) {
    if (c.bytes >= engine_bytes) {
      check_cuda(c.from_device == device_
                     ? cudaMemcpyAsync(c.to, c.from, c.bytes, cudaMemcpyDeviceToDevice, moves_)
                     : cudaMemcpyPeerAsync(c.to, device_.index, c.from, c.from_device.index, c.bytes, moves_),
                 "cuda peers");
      continue;
    }
    table.piece[table.count++] = {static_cast<std::byte*>(c.to), static_cast<const std::byte*>(c.from),
                                  static_cast<std::int64_t>(c.bytes)};
    if (table.count == CopyTable::most) launch();
  }
  launch();
}

void CudaPeerQueue::combine(DType dtype, ReduceOp reduction, std::span<const PeerCombination> combinations) {
  use();
  CombineTable table;
  table.sources = static_cast<int>(combinations[0].sources.size());
  check<NotImplementedError>(table.sources <= CombineTable::most_pointers,
                             "collectives: {} ranks of one process reduce on {}; at most {} do",
                             table.sources, to_string(device_), CombineTable::most_pointers);
  const auto launch = [&] {
    if (table.count == 0) return;
    launch_combine(dtype, reduction, table, moves_);
    check_launch("cuda peers");
    table.count = 0;
  };
  for (const PeerCombination& c : combinations) {
    if (c.count == 0) continue;
    if (!table.has_room()) launch();
    std::ranges::copy(c.sources, table.source + table.count * table.sources);
    table.piece[table.count++] = {c.out, c.count};
  }
  launch();
}

void CudaPeerQueue::free_after(std::span<DeviceEvent* const> events, const std::function<void()>& drop) {
  use();
  work_so_far_.order(state_.stream(), frees_);
  for (DeviceEvent* event : events) check_cuda(cudaStreamWaitEvent(frees_, event_of(*event)), "cuda peers");
  state_.free_on(frees_, drop);
}

}  // namespace sherd::cuda
