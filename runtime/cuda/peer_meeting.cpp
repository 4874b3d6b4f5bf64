#include "runtime/cuda/peer_meeting.h"

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

static_assert(MeetingCall::most_pieces == MeetingPieces::most);

/// A word of the host that kernels read.
class HostWord {
 public:
  HostWord() {
    check_cuda(cudaHostAlloc(reinterpret_cast<void**>(&at_), sizeof *at_, cudaHostAllocPortable), "cuda peers");
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

class CudaPeerMeeting final : public PeerMeeting {
 public:
  CudaPeerMeeting(DeviceState& state, const MeetingPlan& plan)
      : state_(state),
        plan_(plan),
        device_(Device::cuda(state.index())),
        memory_(Storage::allocate(device_, meeting_head_bytes + 2 * plan.bytes)),
        faults_(state.faults()) {
    check_cuda(cudaMemsetAsync(place(), 0, meeting_head_bytes, state.stream()), "cuda peers");
    wait_for(state.stream(), "cuda peers");  // before a peer's kernel writes there
  }

  void meet(std::span<const std::shared_ptr<PeerMeeting>> all, const MeetingCall& call) override {
    MeetingTable table{.given_up = given_up_.get(),
                       .faults = faults_,
                       .rank = plan_.rank,
                       .size = plan_.size,
                       .calls_a_run = static_cast<unsigned>(plan_.calls),
                       .half_bytes = static_cast<std::uint32_t>(plan_.bytes)};
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      const auto& there = dynamic_cast<const CudaPeerMeeting&>(*all[rank]);
      table.place[rank] = there.place();
    }
    const auto narrow = [](auto n) { return static_cast<std::uint32_t>(n); };
    MeetingPieces pieces;
    for (const auto& [from, at, bytes] : call.leaves)
      pieces.leave[pieces.leaves++] = {static_cast<const std::byte*>(from), narrow(at), narrow(bytes)};
    for (const auto& [to, rank, at, bytes] : call.takes)
      pieces.take[pieces.takes++] = {static_cast<std::byte*>(to), narrow(at), narrow(bytes), rank};
    for (const auto& [out, at, count] : call.combinations)
      pieces.combination[pieces.combinations++] = {out, narrow(at), narrow(count)};
    launch_meeting(table, pieces, call.dtype, call.reduction, state_.stream());
    check_launch("cuda peers");
  }
  bool over() noexcept override {
    return cudaSetDevice(device_.index) == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess;
  }
  void give_up() noexcept override { given_up_.set(); }

 private:
  std::byte* place() const { return static_cast<std::byte*>(memory_->data()); }

  DeviceState& state_;  // the rank's, which is the only one to call `meet`
  const MeetingPlan plan_;
  const Device device_;
  const Ref<Storage> memory_;
  const FaultSlot faults_;  // made before a recording, in which nothing can be
  HostWord given_up_;
};

}  // namespace

std::shared_ptr<PeerMeeting> CudaPeerQueue::meeting(const MeetingPlan& plan) {
  if (plan.size > MeetingHead::most_ranks || plan.bytes > std::numeric_limits<std::uint32_t>::max() / 2)
    return nullptr;
  use();
  return std::make_shared<CudaPeerMeeting>(state_, plan);
}

}  // namespace sherd::cuda
