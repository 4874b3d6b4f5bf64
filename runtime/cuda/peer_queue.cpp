#include "runtime/cuda/peer_queue.h"

#include <cstdlib>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/backend.h"
#include "runtime/cuda/backend.h"
#include "runtime/cuda/check.h"
#include "runtime/cuda/kernels.h"
#include "runtime/cuda/peer_moves.h"
#include "runtime/cuda/stream_memory.h"
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

/// SHERD_PEER_ACCESS=off is for machines whose GPUs claim to read each other's memory and read it wrong.
bool can_read(int reader, int owner) {
  const char* const access = std::getenv("SHERD_PEER_ACCESS");
  if (access != nullptr && std::string_view(access) == "off") return false;
  int reads = 0;
  check_cuda(cudaDeviceCanAccessPeer(&reads, reader, owner), "cuda peers");
  return reads != 0;
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

bool CudaPeerQueue::reach(Device other) {
  if (reads(other)) return true;
  if (!can_read(device_.index, other.index)) return false;
  open_to_peers(other.index);
  use();
  reads_.set(static_cast<std::size_t>(other.index));
  return true;
}

void CudaPeerQueue::copy_by_engine(const PeerCopy& c) {
  check_cuda(c.from_device == device_
                 ? cudaMemcpyAsync(c.to, c.from, c.bytes, cudaMemcpyDeviceToDevice, moves_)
                 : cudaMemcpyPeerAsync(c.to, device_.index, c.from, c.from_device.index, c.bytes, moves_),
             "cuda peers");
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
    if (c.bytes >= engine_bytes || !reads(c.from_device)) {
      copy_by_engine(c);
      continue;
    }
    table.piece[table.count++] = {static_cast<std::byte*>(c.to), static_cast<const std::byte*>(c.from),
                                  static_cast<std::int64_t>(c.bytes)};
    if (table.count == CopyTable::most) launch();
  }
  launch();
}

void CudaPeerQueue::combine(DType dtype, ReduceOp reduction, std::span<const PeerCombination> combinations,
                            std::span<const Device> devices) {
  use();
  // Sources that no kernel here can read come over first.
  const auto bytes_of = [&](const PeerCombination& c) {
    return static_cast<std::size_t>(c.count * size_of(dtype) + 15) / 16 * 16;
  };
  std::size_t bytes = 0;
  for (const Device& device : devices)
    if (!reads(device))
      for (const PeerCombination& c : combinations) bytes += bytes_of(c);
  const StreamMemory brought(bytes, moves_);
  check<OutOfMemoryError>(brought.get() != nullptr || bytes == 0,
                          "collectives: {} has no {} bytes for what it cannot read where it lies, on its peers",
                          to_string(device_), bytes);
  auto* at = static_cast<std::byte*>(brought.get());
  const auto readable = [&](const PeerCombination& c, std::size_t rank) {
    if (devices.empty() || reads(devices[rank])) return c.sources[rank];
    std::byte* const to = std::exchange(at, at + bytes_of(c));
    copy_by_engine({to, c.sources[rank], devices[rank], static_cast<std::size_t>(c.count * size_of(dtype))});
    return static_cast<const std::byte*>(to);
  };
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
    for (std::size_t rank = 0; rank < c.sources.size(); ++rank)
      table.source[static_cast<std::size_t>(table.count * table.sources) + rank] = readable(c, rank);
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
