// Captured steps whose calls the devices make by themselves.
#include "runtime/recorded_calls.h"

#include <algorithm>
#include <map>
#include <set>

#include "collectives/group_end.h"
#include "collectives/meeting_board.h"
#include "collectives/movement.h"
#include "collectives/post.h"
#include "runtime/backend.h"
#include "runtime/kernel.h"

namespace sherd {
namespace {

/// Longer calls are better made beside the rank's work, by the copy engines, and so are steps' that have more.
constexpr std::size_t most_bytes_of_a_call = std::size_t{1} << 20, most_bytes = std::size_t{64} << 20;

template <class O>
const O* as(const CapturedCall& call) {
  return &call.op->kernels() == &kernel_row<O>() ? static_cast<const O*>(call.op->value()) : nullptr;
}

/// Where each segment's input lies among what the ranks leave; the last entry is where all of it ends.
std::vector<std::size_t> offsets(const Collective& c, int size) {
  std::vector<std::size_t> at{0};
  for (const Tensor& t : counted(c)) {
    const std::int64_t inputs = c.kind == CollectiveKind::reduce_scatter ? size : 1;
    const auto bytes = static_cast<std::size_t>(inputs * t.numel() * size_of(t.dtype()));
    at.push_back(at.back() + (bytes + 255) / 256 * 256);
  }
  return at;
}

MeetingCall meeting_call(const Collective& c, int rank, int size, std::size_t begin) {
  const Movement movement = Movement::of(c, size, 1);
  const std::vector<std::size_t> at = offsets(c, size);
  const DType dtype = counted(c)[0].dtype();
  const std::int64_t element = size_of(dtype);
  MeetingCall call{.dtype = dtype, .reduction = c.reduction};
  for (std::size_t i = 0; i < counted(c).size(); ++i) {
    const std::int64_t n = counted(c)[i].numel();
    const std::size_t place = begin + at[i];
    if (!c.inputs.empty() && c.inputs[i].numel() > 0)
      call.leaves.push_back(
          {c.inputs[i].raw(), place, static_cast<std::size_t>(c.inputs[i].spec().bytes())});
    if (c.outputs.empty() || n == 0) continue;
    const auto there = [&](const Piece& piece) { return place + static_cast<std::size_t>(piece.source * element); };
    if (movement.combines(0)) {
      const Piece piece = movement.piece(0, rank, rank, n);
      call.combinations.push_back({c.outputs[i].raw() + piece.destination * element, there(piece), piece.count});
      continue;
    }
    for (int from = 0; from < size; ++from) {
      const Piece piece = movement.piece(0, from, rank, n);
      std::byte* to = c.outputs[i].raw() + piece.destination * element;
      const bool in_place = from == rank && !c.inputs.empty() && to == c.inputs[i].raw();
      if (piece.count > 0 && !in_place)
        call.takes.push_back({to, from, there(piece), static_cast<std::size_t>(piece.count * element)});
    }
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
  return !device.is_cpu() && device.type != DeviceType::meta && offsets(c, size).back() <= most_bytes_of_a_call &&
         tensors.size() * static_cast<std::size_t>(size) <= MeetingCall::most_pieces;
}

class GroupCalls final : public RecordedCalls {
 public:
  GroupCalls(std::shared_ptr<GroupEnd> group, int channel, std::size_t calls, std::size_t bytes)
      : group_(std::move(group)),
        transport_(group_->transport()),
        channel_(channel),
        plan_{group_->rank(), group_->size(), calls, bytes} {}

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
  void begin() override { begin_ = 0; }

  void record(const CapturedCall& captured) override {
    const auto* post = as<ops::Post>(captured);
    if (post == nullptr) return;  // what it waits for has been, in the order of the device's work
    const Collective c = post->collective(captured.in);
    mine_->meet(everyone_, meeting_call(c, plan_.rank, plan_.size, begin_));
    begin_ += offsets(c, plan_.size).back();
  }

  void give_up(std::string_view why) noexcept override { transport_->fail(last_, channel_, why); }

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
                       .label = fmt::format("a captured step of {} calls", plan_.calls)};
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
  std::size_t begin_ = 0;
};

/// Null unless all calls are small ones of one group, and each is waited for within the step, as is no other.
std::shared_ptr<RecordedCalls> recorded(std::span<const CapturedCall> all) {
  const ops::Post* first = nullptr;
  std::size_t calls = 0, bytes = 0;
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
    ++calls;
    bytes += offsets(c, post->group->size()).back();
    waited[post->channel].push_back(post->completion == Completion::complete);
  }
  for (const auto& [channel, line] : waited)
    if (!std::ranges::all_of(line, std::identity{})) return nullptr;
  if (first == nullptr || first->group->size() == 1 || bytes == 0 || bytes > most_bytes) return nullptr;
  if (first->group->transport()->meetings() == nullptr) return nullptr;
  return std::make_shared<GroupCalls>(first->group, first->channel, calls, bytes);
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
