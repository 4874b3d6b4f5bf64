#include "runtime/cuda/peer_meeting.h"

#include <algorithm>
#include <atomic>
#include <limits>

#include "runtime/cuda/check.h"
#include "runtime/cuda/fault_board.h"
#include "runtime/cuda/kernels.h"
#include "runtime/cuda/peer_queue.h"
#include "runtime/cuda/waiting.h"
#include "runtime/storage.h"

namespace sherd::cuda {
namespace {

static_assert(MeetingCall::most_parts == MeetingParts::most);

/// A word of the host that kernels read.
class HostWord {
 public:
  HostWord() {
    check_cuda(cudaHostAlloc(reinterpret_cast<void**>(&at_), sizeof *at_, cudaHostAllocPortable),
               "cuda peers");
    *at_ = 0;
  }
  ~HostWord() { cudaFreeHost(at_); }
  HostWord(const HostWord&) = delete;
  HostWord& operator=(const HostWord&) = delete;
  void set() noexcept { std::atomic_ref(*at_).store(1, std::memory_order_release); }
  const unsigned* get() const { return at_; }

 private:
  unsigned* at_ = nullptr;
};

/// What arrives of a part.
std::size_t arriving_bytes(const MeetingPart& part, int size) {
  const std::size_t units = std::max<std::size_t>(1, (part.bytes + unit_bytes - 1) / unit_bytes);
  return units * sent_unit_bytes * static_cast<std::size_t>(size);
}

/// Where each call's bytes begin to arrive; the last entry is where all of them end.
std::vector<std::size_t> places_of(const MeetingPlan& plan) {
  std::vector<std::size_t> at{0};
  for (const MeetingCall& call : plan.calls) {
    std::size_t end = at.back();
    for (const MeetingPart& part : call.parts) end += arriving_bytes(part, plan.size);
    at.push_back(end);
  }
  return at;
}

class CudaPeerMeeting final : public PeerMeeting {
 public:
  /// `at`: as `places_of` the plan.
  CudaPeerMeeting(DeviceState& state, const MeetingPlan& plan, std::vector<std::size_t> at)
      : state_(state),
        rank_(plan.rank),
        device_(Device::cuda(state.index())),
        at_(std::move(at)),
        memory_(Storage::allocate(device_, meeting_head_bytes + 2 * at_.back())),
        faults_(state.faults()) {
    // No run has number 0.
    check_cuda(cudaMemsetAsync(place(), 0, memory_->bytes(), state.stream()), "cuda peers");
    wait_for(state.stream(), "cuda peers");  // before a peer's kernel writes there
  }

  void meet(std::span<const std::shared_ptr<PeerMeeting>> all, std::size_t index,
            const MeetingCall& call) override {
    MeetingTable table{.given_up = given_up_.get(),
                       .faults = faults_,
                       .rank = rank_,
                       .size = static_cast<int>(all.size()),
                       .root = call.root,
                       .half_bytes = static_cast<std::uint32_t>(at_.back())};
    for (std::size_t rank = 0; rank < all.size(); ++rank)
      table.place[rank] = dynamic_cast<const CudaPeerMeeting&>(*all[rank]).place();
    MeetingParts parts;
    std::size_t at = at_[index];
    const auto narrow = [](std::size_t n) { return static_cast<std::uint32_t>(n); };
    for (const MeetingPart& part : call.parts) {
      parts.part[parts.count++] = {
          part.in, part.out, narrow(part.bytes), narrow(part.in_step), narrow(part.out_step), narrow(at)};
      at += arriving_bytes(part, table.size);
    }
    if (index == 0) launch_run(table, state_.stream());
    if (call.reduction)
      launch_meeting_sums(table, parts, call.dtype, *call.reduction, state_.stream());
    else
      launch_meeting_copies(table, parts, state_.stream());
    check_launch("cuda peers");
  }
  bool over() noexcept override {
    return cudaSetDevice(device_.index) == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess;
  }
  void give_up() noexcept override { given_up_.set(); }

 private:
  std::byte* place() const { return static_cast<std::byte*>(memory_->data()); }

  DeviceState& state_;  // the rank's, which is the only one to call `meet`
  const int rank_;
  const Device device_;
  const std::vector<std::size_t> at_;
  const Ref<Storage> memory_;
  const FaultSlot faults_;  // made before a recording, in which nothing can be
  HostWord given_up_;
};

}  // namespace

std::shared_ptr<PeerMeeting> CudaPeerQueue::meeting(const MeetingPlan& plan) {
  std::vector<std::size_t> at = places_of(plan);
  if (plan.size > MeetingTable::most_ranks || at.back() > std::numeric_limits<std::uint32_t>::max())
    return nullptr;
  use();
  return std::make_shared<CudaPeerMeeting>(state_, plan, std::move(at));
}

}  // namespace sherd::cuda
