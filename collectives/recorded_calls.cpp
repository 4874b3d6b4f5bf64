// Captured steps whose calls the devices make by themselves.
#include "runtime/recorded_calls.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
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
  if (c.kind == CollectiveKind::reduce_scatter || c.kind == CollectiveKind::all_reduce)
    call.reduction = c.reduction;
  for (std::size_t i = 0; i < counted(c).size(); ++i) {
    const std::size_t bytes = bytes_between(c, i, size);
    const auto address = [&](const Tensors& tensors) {
      return tensors.empty() || tensors[i].numel() == 0 ? nullptr : tensors[i].raw();
    };
    call.parts.push_back(
        {address(c.inputs), address(c.outputs), bytes, slices_in ? bytes : 0, side_by_side ? bytes : 0});
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
  return !device.is_cpu() && device.type != DeviceType::meta &&
         arriving_bytes(c, size) <= most_bytes_of_a_call && tensors.size() <= MeetingCall::most_parts;
}

/// A group whose ranks vote, since all calls that the step makes on it are small ones. Those are the same on
/// all its ranks, so each of them votes.
struct Electorate {
  std::shared_ptr<GroupEnd> group;
  std::shared_ptr<Transport> transport;
  int channel;  ///< of the first call
  std::vector<MeetingCall> calls{};
  std::uint64_t digest = 0;  ///< of all calls: other steps' votes are other calls
  std::int64_t bytes = 0;

  void add(const Collective& c) {
    calls.push_back(meeting_call(c, group->size()));
    digest = (digest ^ signature_of(c).digest) * 0x9e3779b97f4a7c15u;
    bytes += arriving_bytes(c, group->size());
  }
};

class StepCalls final : public RecordedCalls {
 public:
  /// `others`: the step has calls that no device makes, so this rank says no.
  StepCalls(std::vector<Electorate> electorates, bool others)
      : electorates_(std::move(electorates)),
        possible_(!others && electorates_.size() == 1),
        plan_{own().group->rank(), own().group->size(), own().calls} {}

  Vote vote(Question question, Vote mine) override {
    if (!possible_) mine = Vote::no;
    for (const Electorate& e : electorates_)
      if (mine == Vote::yes && (e.group->observed() || e.group->transport() != e.transport))
        mine = Vote::not_now;
    const std::string stage = fmt::format("{} {}", word_for(question), number_);
    std::vector<std::pair<const Electorate*, Posted>> posted;
    for (const Electorate& e : electorates_)
      posted.emplace_back(&e,
                          post(e, CollectiveKind::all_reduce, {static_cast<std::int32_t>(mine)}, 1, stage));
    Vote all = mine;
    for (auto& [electorate, call] : posted)
      all = std::max(all, static_cast<Vote>(finish(*electorate, call)[0]));
    // A peer that has voted may need this rank's part of an earlier call, and this host may next wait for its
    // device.
    if (all == Vote::yes) own().transport->step();
    return all;
  }

  Vote meet_on(Device device) override {
    Posted gather = post(own(), CollectiveKind::all_gather, {device.index}, plan_.size, "places");
    const std::vector<std::int32_t> where = finish(own(), gather);
    if (std::set(where.begin(), where.end()).size() < where.size()) return Vote::no;
    PeerQueue& queue = *backend(device.type).peer_queue(device);
    mine_ = memory_on(queue);
    number_ = board().put(plan_.rank, mine_);
    const bool ready = mine_ && reaches(queue, device.type, where);
    if (const Vote all = vote(Question::memory, ready ? Vote::yes : Vote::no); all != Vote::yes) return all;
    everyone_ = board().all(number_);
    return vote(Question::meeting, everyone_.size() == where.size() ? Vote::yes : Vote::no);
  }
  bool current() const override { return own().group->transport() == own().transport; }
  void begin() override { recorded_ = 0; }

  void record(const CapturedCall& captured) override {
    const auto* post = as<ops::Post>(captured);
    if (post == nullptr) return;  // what it waits for has been, in the order of the device's work
    mine_->meet(everyone_, recorded_++, meeting_call(post->collective(captured.in), plan_.size));
  }

  void give_up(std::string_view why) noexcept override {
    own().transport->give_up(last_, own().channel, why);
  }

 private:
  static std::string_view word_for(Question question) {
    constexpr std::array<std::string_view, 5> words{"plan", "memory", "meeting", "recording", "run"};
    return words[static_cast<std::size_t>(question)];
  }

  struct Posted {
    Tensor values;
    std::optional<PostedCall> call;
  };

  const Electorate& own() const { return electorates_.front(); }
  MeetingBoard& board() const { return *own().transport->meetings(); }
  std::shared_ptr<PeerMeeting> memory_on(PeerQueue& queue) const try {
    return queue.meeting(plan_);
  } catch (const OutOfMemoryError&) {
    return nullptr;
  }
  static bool reaches(PeerQueue& queue, DeviceType type, const std::vector<std::int32_t>& where) {
    return std::ranges::all_of(where, [&](std::int32_t index) {
      return queue.reach({type, static_cast<std::int8_t>(index)});
    });
  }

  /// `own` is reduced by its largest, or gathered to `size`.
  Posted post(const Electorate& e, CollectiveKind kind, std::vector<std::int32_t> own, int size,
              std::string_view stage) {
    Posted posted{empty({size}, {i32, Device::cpu()})};
    Tensor input = posted.values;
    if (kind == CollectiveKind::all_gather) input = empty({1}, {i32, Device::cpu()});
    std::memcpy(input.raw(), own.data(), own.size() * sizeof own[0]);
    const Collective c{
        .kind = kind,
        .inputs = {input},
        .outputs = {posted.values},
        .reduction = ReduceOp::max(),
        .channel = e.channel,
        .label = fmt::format("a captured step of {} calls, {:016x}, {}", e.calls.size(), e.digest, stage)};
    last_ = signature_of(c);
    e.group->enqueue(c, Completion::posted);
    posted.call = e.group->posted();
    return posted;
  }
  static std::vector<std::int32_t> finish(const Electorate& e, Posted& posted) {
    if (posted.call) {
      Line& line = e.group->line_of(posted.call->kind, posted.call->channel, posted.call->peer);
      line.wait(posted.call->sequence);
      line.wait_inputs(posted.call->sequence);
    }
    return posted.values.to_vector<std::int32_t>();
  }

  const std::vector<Electorate> electorates_;
  const bool possible_;
  const MeetingPlan plan_;
  Signature last_;
  std::uint64_t number_ = 0;  // of the meeting, once there is one
  std::shared_ptr<PeerMeeting> mine_;
  std::vector<std::shared_ptr<PeerMeeting>> everyone_;
  std::size_t recorded_ = 0;
};

/// What the step posts on one line, and what it has waited for.
using Lines = std::map<std::pair<const GroupEnd*, int>, std::vector<bool>>;

/// False for a wait for a call from before the step.
bool mark_waited(Lines& lines, const ops::Wait& wait) {
  std::vector<bool>& line = lines[{wait.group.get(), wait.channel}];
  if (wait.kind == CollectiveKind::send || wait.kind == CollectiveKind::recv || wait.behind >= line.size())
    return false;
  if (wait.until == ops::Until::outputs_are_there) line[line.size() - 1 - wait.behind] = true;
  return true;
}

/// Null where no group's ranks vote.
std::shared_ptr<RecordedCalls> recordable(std::span<const CapturedCall> all) {
  std::vector<Electorate> groups;
  std::set<const GroupEnd*> left_to_hosts;
  Lines lines;
  bool others = false;
  for (const CapturedCall& captured : all) {
    if (const auto* wait = as<ops::Wait>(captured)) {
      others = !mark_waited(lines, *wait) || others;
      continue;
    }
    const auto* post = as<ops::Post>(captured);
    if (post == nullptr || post->kind == CollectiveKind::send || post->kind == CollectiveKind::recv) {
      others = true;
      continue;
    }
    lines[{post->group.get(), post->channel}].push_back(post->completion == Completion::complete);
    const Collective c = post->collective(captured.in);
    const bool fits = post->group->size() > 1 && post->group->transport()->meetings() != nullptr &&
                      is_small(c, post->group->size());
    if (!fits) left_to_hosts.insert(post->group.get());
    if (left_to_hosts.contains(post->group.get())) continue;
    auto place = std::ranges::find(groups, post->group, &Electorate::group);
    if (place == groups.end())
      place = groups.insert(groups.end(), {post->group, post->group->transport(), post->channel});
    place->add(c);
  }
  for (const Electorate& e : groups)
    if (e.bytes > most_bytes) left_to_hosts.insert(e.group.get());
  std::erase_if(groups, [&](const Electorate& e) { return left_to_hosts.contains(e.group.get()); });
  if (groups.empty()) return nullptr;
  for (const auto& [line, waited] : lines) others = !std::ranges::all_of(waited, std::identity{}) || others;
  return std::make_shared<StepCalls>(std::move(groups), others || !left_to_hosts.empty());
}

}  // namespace

namespace ops {

std::shared_ptr<RecordedCalls> Post::recorded_calls(std::span<const CapturedCall> all) const {
  return recordable(all);
}
std::shared_ptr<RecordedCalls> Wait::recorded_calls(std::span<const CapturedCall> all) const {
  return recordable(all);
}

}  // namespace ops
}  // namespace sherd
