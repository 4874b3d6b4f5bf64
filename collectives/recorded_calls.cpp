// Captured steps whose calls the devices make by themselves.
#include "runtime/recorded_calls.h"

#include <algorithm>
#include <map>
#include <set>

#include "collectives/group_end.h"
#include "collectives/meeting_board.h"
#include "collectives/post.h"
#include "runtime/backend.h"
#include "runtime/kernel.h"

namespace sherd {
namespace {

/// Longer calls are better made beside the rank's work, by the copy engines. Of what arrives on a rank.
constexpr std::int64_t most_bytes_of_a_call = std::int64_t{1} << 20, most_bytes = std::int64_t{64} << 20;

template <class O>
const O* as(const CapturedCall& call) {
  return &call.op->kernels() == &kernel_row<O>() ? static_cast<const O*>(call.op->value()) : nullptr;
}

/// Bytes that go from one rank to another of a segment.
std::size_t bytes_between(const Collective& c, std::size_t segment, int size) {
  const Tensor& t = counted(c)[segment];
  const std::int64_t count = c.kind == CollectiveKind::all_to_all ? t.numel() / size : t.numel();
  return static_cast<std::size_t>(count * size_of(t.dtype()));
}
std::int64_t arriving_bytes(const Collective& c, int size) {
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < counted(c).size(); ++i)
    bytes += static_cast<std::int64_t>(bytes_between(c, i, size)) * size;
  return bytes;
}

MeetingCall meeting_call(const Collective& c, int size) {
  const bool slices_in = c.kind == CollectiveKind::reduce_scatter || c.kind == CollectiveKind::all_to_all,
             side_by_side = c.kind == CollectiveKind::all_gather || c.kind == CollectiveKind::all_to_all;
  MeetingCall call{.dtype = counted(c)[0].dtype(), .root = c.kind == CollectiveKind::broadcast ? c.peer : -1};
  if (c.kind == CollectiveKind::reduce_scatter || c.kind == CollectiveKind::all_reduce) call.reduction = c.reduction;
  for (std::size_t i = 0; i < counted(c).size(); ++i) {
    const std::size_t bytes = bytes_between(c, i, size);
    const auto address = [&](const Tensors& tensors) {
      return tensors.empty() || tensors[i].numel() == 0 ? nullptr : tensors[i].raw();
    };
    call.parts.push_back({address(c.inputs), address(c.outputs), bytes, slices_in ? bytes : 0, side_by_side ? bytes : 0});
  }
  return call;
}

/// What does not depend on the rank. A call that only some ranks give tensors to counts them all the same.
bool is_small(const Collective& c, int size) {
  switch (c.kind) {
    case CollectiveKind::all_gather:
    case CollectiveKind::reduce_scatter:
    case CollectiveKind::all_reduce:
    case CollectiveKind::all_to_all:
    case CollectiveKind::broadcast:
      break;
    default:
      return false;
  }
  const Tensors& tensors = counted(c);
  const Device device = tensors.empty() ? Device::cpu() : tensors[0].device();
  return !device.is_cpu() && device.type != DeviceType::meta && arriving_bytes(c, size) <= most_bytes_of_a_call &&
         tensors.size() <= MeetingCall::most_parts;
}

class GroupCalls final : public RecordedCalls {
 public:
  GroupCalls(std::shared_ptr<GroupEnd> group, int channel, std::vector<MeetingCall> calls)
      : group_(std::move(group)),
        transport_(group_->transport()),
        channel_(channel),
        plan_{group_->rank(), group_->size(), std::move(calls)} {}

  bool all(bool yes) override {
    std::int32_t every = yes && !group_->observed() && group_->transport() == transport_ ? 1 : 0;
    every = -every;
    const Tensor vote = from_blob(&every, {1}, i32);
    last_ = call(CollectiveKind::all_reduce, vote, vote);
    return every == -1;
  }

  bool meet_on(Device device) override {
    std::vector<std::int32_t> where(static_cast<std::size_t>(plan_.size));
    std::int32_t own = device.index;
    call(CollectiveKind::all_gather, from_blob(where.data(), {plan_.size}, i32), from_blob(&own, {1}, i32));
    if (std::set(where.begin(), where.end()).size() < where.size()) return false;
    PeerQueue& queue = *backend(device.type).peer_queue(device);
    mine_ = queue.meeting(plan_);
    const std::uint64_t number = transport_->meetings()->put(plan_.rank, mine_);
    if (!all(mine_ && reaches(queue, device.type, where))) return false;
    everyone_ = transport_->meetings()->all(number);
    return all(everyone_.size() == where.size());
  }
  void begin() override { recorded_ = 0; }

  void record(const CapturedCall& captured) override {
    const auto* post = as<ops::Post>(captured);
    if (post == nullptr) return;  // what it waits for has been, in the order of the device's work
    mine_->meet(everyone_, recorded_++, meeting_call(post->collective(captured.in), plan_.size));
  }

  void give_up(std::string_view why) noexcept override { transport_->give_up(last_, channel_, why); }

 private:
  static bool reaches(PeerQueue& queue, DeviceType type, const std::vector<std::int32_t>& where) try {
    for (const std::int32_t index : where) queue.reach({type, static_cast<std::int8_t>(index)});
    return true;
  } catch (const NotImplementedError&) {
    return false;
  }
  Signature call(CollectiveKind kind, const Tensor& output, const Tensor& input) {
    const Collective c{.kind = kind,
                       .inputs = {input},
                       .outputs = {output},
                       .reduction = ReduceOp::max(),
                       .channel = channel_,
                       .label = fmt::format("a captured step of {} calls", plan_.calls.size())};
    group_->enqueue(c, Completion::complete);
    return signature_of(c);
  }

  const std::shared_ptr<GroupEnd> group_;
  const std::shared_ptr<Transport> transport_;
  const int channel_;
  const MeetingPlan plan_;
  Signature last_;
  std::shared_ptr<PeerMeeting> mine_;
  std::vector<std::shared_ptr<PeerMeeting>> everyone_;
  std::size_t recorded_ = 0;
};

/// Null unless all calls are small ones of one group, and each is waited for within the step, as is no other.
std::shared_ptr<RecordedCalls> recorded(std::span<const CapturedCall> all) {
  const ops::Post* first = nullptr;
  std::vector<MeetingCall> calls;
  std::int64_t bytes = 0;
  std::map<int, std::vector<bool>> waited;  // by channel: for each call
  for (const CapturedCall& captured : all) {
    if (const auto* wait = as<ops::Wait>(captured)) {
      std::vector<bool>& line = waited[wait->channel];
      if (wait->behind >= line.size()) return nullptr;
      if (wait->until == ops::Until::outputs_are_there) line[line.size() - 1 - wait->behind] = true;
      continue;
    }
    const auto* post = as<ops::Post>(captured);
    if (post == nullptr || (first != nullptr && post->group != first->group)) return nullptr;
    if (first == nullptr) first = post;
    const Collective c = post->collective(captured.in);
    if (!is_small(c, post->group->size())) return nullptr;
    calls.push_back(meeting_call(c, post->group->size()));
    bytes += arriving_bytes(c, post->group->size());
    waited[post->channel].push_back(post->completion == Completion::complete);
  }
  for (const auto& [channel, line] : waited)
    if (!std::ranges::all_of(line, std::identity{})) return nullptr;
  if (first == nullptr || first->group->size() == 1 || bytes > most_bytes) return nullptr;
  if (first->group->transport()->meetings() == nullptr) return nullptr;
  return std::make_shared<GroupCalls>(first->group, first->channel, std::move(calls));
}

}  // namespace

namespace ops {

std::shared_ptr<RecordedCalls> Post::recorded_calls(std::span<const CapturedCall> all) const {
  return recorded(all);
}
std::shared_ptr<RecordedCalls> Wait::recorded_calls(std::span<const CapturedCall> all) const {
  return recorded(all);
}

}  // namespace ops
}  // namespace sherd
