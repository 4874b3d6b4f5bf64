#include "runtime/cuda/peer_queue.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/backend.h"
#include "runtime/cuda/backend.h"
#include "runtime/cuda/check.h"
#include "runtime/cuda/engine_copies.h"
#include "runtime/cuda/kernels.h"
#include "runtime/cuda/memory.h"
#include "runtime/cuda/peer_moves.h"
#include "runtime/cuda/waiting.h"
#include "runtime/tensor_options.h"

namespace sherd::cuda {
namespace {

/// Longer copies are the copy engines', which leave the multiprocessors to the rank's own work.
constexpr std::size_t engine_bytes = 256 << 10;
/// What a sum brings over at a time of memory that it cannot read.
constexpr std::int64_t most_brought_bytes = 64 << 20;

class PeerEvent final : public DeviceEvent {
 public:
  PeerEvent() { check_cuda(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cuda peers"); }
  ~PeerEvent() override { cudaEventDestroy(event_); }
  void wait() override { wait_for(event_, "cuda peers"); }
  bool reached() override { return is_done(cudaEventQuery(event_), "cuda peers"); }
  cudaEvent_t get() const { return event_; }
  void record(cudaStream_t stream) {
    static std::atomic<std::uint64_t> moments{0};  // of the process, so that none is taken for another
    check_cuda(cudaEventRecord(event_, stream), "cuda peers");
    moment_.store(moments.fetch_add(1, std::memory_order_relaxed) + 1, std::memory_order_seq_cst);
  }
  /// The number of the moment last set, or of one before it; 0 for none.
  std::uint64_t moment() const { return moment_.load(std::memory_order_seq_cst); }

 private:
  cudaEvent_t event_ = nullptr;
  std::atomic<std::uint64_t> moment_{0};
};

PeerEvent& peer_event(DeviceEvent& event) { return dynamic_cast<PeerEvent&>(event); }
cudaEvent_t event_of(DeviceEvent& event) { return peer_event(event).get(); }

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
                    device_);
  use();
  peer_event(event).record(state_.stream());
}

void CudaPeerQueue::mark(DeviceEvent& event) {
  use();
  peer_event(event).record(moves_);
}

void CudaPeerQueue::follow(DeviceEvent& event) {
  check_cuda(cudaStreamWaitEvent(moves_, event_of(event)), "cuda peers");
}

void CudaPeerQueue::work_follows(DeviceEvent& event) {
  const Followed now{state_.stream(), peer_event(event).moment()};
  if (now.moment == 0 || std::ranges::find(followed_, now) != followed_.end()) return;
  if (!event.reached()) check_cuda(cudaStreamWaitEvent(now.stream, event_of(event)), "cuda peers");
  if (state_.recording()) return;  // what is recorded is no work yet
  followed_[next_followed_++ % followed_.size()] = now;
}

bool CudaPeerQueue::reach(Device other) {
  if (reads(other)) return true;
  if (!can_read(device_.index, other.index)) return false;
  open_to_peers(other.index);
  use();
  reads_.set(static_cast<std::size_t>(other.index));
  return true;
}

void CudaPeerQueue::bring(const PeerCopy& c) {
  check_cuda(cudaMemcpyPeerAsync(c.to, device_.index, c.from, c.from_device.index, c.bytes, moves_),
             "cuda peers");
}

void CudaPeerQueue::copy(std::span<const PeerCopy> copies) {
  use();
  CopyTable table;
  EngineCopies long_copies;
  const auto launch = [&] {
    if (table.count == 0) return;
    launch_copies(table, moves_);
    check_launch("cuda peers");
    table.count = 0;
  };
  for (const PeerCopy& c : copies) {
    if (!reads(c.from_device)) {
      bring(c);
      continue;
    }
    if (c.bytes >= engine_bytes) {
      long_copies.add(c.to, c.from, c.bytes);
      continue;
    }
    table.piece[table.count++] = {static_cast<std::byte*>(c.to), static_cast<const std::byte*>(c.from),
                                  static_cast<std::int64_t>(c.bytes)};
    if (table.count == CopyTable::most) launch();
  }
  launch();
  launch_copies(long_copies, moves_);
}

void CudaPeerQueue::combine(DType dtype, ReduceOp reduction, std::span<const PeerCombination> combinations,
                            std::span<const Device> devices) {
  use();
  const auto ranks = static_cast<int>(combinations[0].sources.size());
  check<NotImplementedError>(ranks <= CombineTable::most_pointers,
                             "collectives: {} ranks of one process reduce on {}; at most {} do", ranks,
                             device_, CombineTable::most_pointers);
  const auto unread = std::ranges::count_if(devices, [&](Device device) { return !reads(device); });
  if (unread == 0) return combine_read(dtype, reduction, combinations);
  // Sources that no kernel here can read come over first, some elements at a time.
  const std::int64_t element = size_of(dtype), most = most_brought_bytes / (unread * element);
  for (const PeerCombination& c : combinations)
    for (std::int64_t begin = 0; begin < c.count; begin += most) {
      const std::int64_t count = std::min(most, c.count - begin), bytes = count * element;
      const StreamMemory brought = memory_for(static_cast<std::size_t>(unread * bytes));
      auto* to = static_cast<std::byte*>(brought.get());
      std::vector<const std::byte*> sources;
      for (std::size_t rank = 0; rank < devices.size(); ++rank) {
        sources.push_back(c.sources[rank] + begin * element);
        if (reads(devices[rank])) continue;
        bring({to, sources.back(), devices[rank], static_cast<std::size_t>(bytes)});
        sources.back() = std::exchange(to, to + bytes);
      }
      const PeerCombination part{sources, c.out + begin * element, count};
      combine_read(dtype, reduction, {&part, 1});
    }
}

StreamMemory CudaPeerQueue::memory_for(std::size_t bytes) {
  for (const bool again : {false, true}) {
    if (again) give_back_unused(state_);
    if (StreamMemory memory(bytes, moves_); memory.get() != nullptr) return memory;
  }
  refuse_memory(device_, "what it cannot read where it lies, on its peers");
}

void CudaPeerQueue::combine_read(DType dtype, ReduceOp reduction,
                                 std::span<const PeerCombination> combinations) {
  CombineTable table;
  table.sources = static_cast<int>(combinations[0].sources.size());
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
