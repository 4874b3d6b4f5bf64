#include "runtime/cuda/memory.h"

#include <array>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>

#include "runtime/context.h"
#include "runtime/cuda/check.h"
#include "runtime/cuda/graph_memory.h"
#include "runtime/cuda/rank.h"

namespace sherd::cuda {
namespace {

/// The makers of all blocks that the driver gave and that were not given back, those that ranks keep for
/// later among them. Blocks of recordings are in `GraphMemory` and not here.
class Makers {
 public:
  /// Never destroyed: tensors may end after `main`.
  static Makers& all() {
    static Makers& makers = *new Makers;
    return makers;
  }
  void add(void* block, std::shared_ptr<Maker> maker) {
    Part& part = part_of(block);
    const std::scoped_lock lock(part.mutex);
    part.makers.insert_or_assign(block, std::move(maker));
  }
  /// Null for a recording's block.
  std::shared_ptr<Maker> find(void* block) {
    Part& part = part_of(block);
    const std::scoped_lock lock(part.mutex);
    const auto found = part.makers.find(block);
    return found != part.makers.end() ? found->second : nullptr;
  }
  void remove(void* block) {
    Part& part = part_of(block);
    const std::scoped_lock lock(part.mutex);
    part.makers.erase(block);
  }

 private:
  struct Part {  // several, so that ranks seldom meet
    std::mutex mutex;
    std::unordered_map<void*, std::shared_ptr<Maker>> makers;
  };
  Part& part_of(void* block) {
    return parts_[(reinterpret_cast<std::uintptr_t>(block) >> 9) % parts_.size()];
  }
  std::array<Part, 16> parts_;
};

}  // namespace

void Maker::add(cudaStream_t stream) {
  const std::scoped_lock lock(mutex_);
  streams_.push_back(stream);
}

void Maker::end() noexcept {
  const std::scoped_lock lock(mutex_);
  streams_.clear();
}

void Maker::begin_recording() {
  const std::scoped_lock lock(mutex_);
  recording_ = true;
}

std::vector<Maker::LeftBlock> Maker::end_recording() {
  const std::scoped_lock lock(mutex_);
  recording_ = false;
  return std::exchange(left_, {});
}

void Maker::leave(const LeftBlock& block) {
  const std::scoped_lock lock(mutex_);
  left_.push_back(block);
}

void Maker::give_back(void* data, std::size_t bytes, cudaStream_t later) {
  const std::scoped_lock lock(mutex_);
  if (!recording_) {
    for (const cudaStream_t stream : streams_) Event().order(stream, later);
    return free_block(data, later);
  }
  LeftBlock left{data, bytes, nullptr};
  check_cuda(cudaEventCreateWithFlags(&left.after, cudaEventDisableTiming), "cuda event");
  check_cuda(cudaEventRecord(left.after, later), "cuda event");
  left_.push_back(left);
}

void* allocate(Device device, std::size_t bytes) {
  if (DeviceState* known = known_state(device); known != nullptr && !known->recording())
    if (void* kept = known->blocks().take(bytes)) return kept;
  DeviceState& state = state_of(device);
  void* data = nullptr;
  bytes = BlockCache::rounded(bytes);  // never 0: null would mean "released"
  if (state.recording()) return state.graph_memory()->take(bytes, state.lane());
  cudaError_t status = cudaMallocAsync(&data, bytes, state.stream());
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    give_back_unused(state);
    status = cudaMallocAsync(&data, bytes, state.stream());
  }
  if (status == cudaErrorMemoryAllocation) refuse_memory(device, fmt::format("{} bytes", bytes));
  check_cuda(status, "cuda memory");
  Makers::all().add(data, state.maker());
  return data;
}

void deallocate(Device device, void* data, std::size_t bytes) noexcept {
  try {
    const std::shared_ptr<Maker> maker = Makers::all().find(data);
    if (maker == nullptr) {  // the graphs'
      const DeviceState* known = Context::current_or_null() != nullptr ? known_state(device) : nullptr;
      if (const auto memory = known != nullptr ? known->known_graph_memory() : nullptr) memory->give(data);
      return;
    }
    if (Context::current_or_null() == nullptr) {  // a thread that is ending, whose streams may be at work
      check_cuda(cudaSetDevice(device.index), "cuda device");
      check_cuda(cudaDeviceSynchronize(), "cuda memory");
      return free_block(data, nullptr);
    }
    if (DeviceState* known = known_state(device);
        known != nullptr && maker == known->maker() && !known->recording() && known->frees() == nullptr)
      if (known->blocks().keep(data, bytes)) return;
    DeviceState& state = state_of(device);
    const cudaStream_t stream = state.frees() != nullptr ? state.frees() : state.stream();
    if (state.recording())  // what is freed now would be part of the recording
      state.maker()->leave({data, bytes, nullptr});
    else if (maker == state.maker())
      free_block(data, stream);
    else
      maker->give_back(data, bytes, state.returns_after(stream));
  } catch (const std::exception&) {  // the device has failed, and its memory cannot be freed
  }
}

void free_block(void* data, cudaStream_t stream) noexcept {
  Makers::all().remove(data);  // before another rank may get it
  if (cudaFreeAsync(data, stream) != cudaSuccess) cudaGetLastError();
}

void give_back_unused(DeviceState& state) {
  state.blocks().trim();
  check_cuda(cudaDeviceSynchronize(), "cuda memory");
}

void give_back_to_graphs(DeviceState& state) {
  give_back_unused(state);
  cudaMemPool_t pool = nullptr;
  check_cuda(cudaDeviceGetDefaultMemPool(&pool, state.index()), "cuda memory");
  check_cuda(cudaMemPoolTrimTo(pool, 0), "cuda memory");
}

void refuse_memory(Device device, std::string_view what) {
  cudaGetLastError();
  std::size_t free = 0, total = 0;
  cudaMemGetInfo(&free, &total);
  cudaMemPool_t pool = nullptr;
  std::uint64_t reserved = 0, used = 0;
  if (cudaDeviceGetDefaultMemPool(&pool, device.index) == cudaSuccess) {
    cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReservedMemCurrent, &reserved);
    cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &used);
  }
  fail<OutOfMemoryError>(
      "{}: no memory for {}; {} of {} are free, and the driver's pool keeps {} for later; use smaller "
      "batches "
      "or free tensors",
      to_string(device), what, free, total, reserved - used);
}

}  // namespace sherd::cuda
