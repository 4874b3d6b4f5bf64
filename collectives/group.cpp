#include "collectives/group.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "collectives/fault.h"
#include "collectives/group_end.h"
#include "collectives/observe.h"
#include "collectives/post.h"
#include "runtime/apply.h"
#include "runtime/backend.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "runtime/shown.h"
#include "runtime/timeline.h"

namespace sherd {

Line::~Line() = default;
Transport::~Transport() = default;

void refuse_to_join(const std::string& name) {
  fail<StateError>(
      "group {}: it cannot be made, because the all_gather by which its ranks agree on it did not happen; an "
      "Interception passes on calls labelled 'split of ...'",
      name);
}

/// What observes the calls of a rank, and their number.
struct CollectiveState {
  std::vector<Interception*> interceptions;
  std::vector<OrderLog*> logs;
  Subscribers<std::function<void()>> before;
  bool told = false;  ///< those are running
  Subscribers<std::function<void(const Group&)>> renewed;
  std::uint64_t calls = 0, renewals = 0;

  static CollectiveState& current() { return Context::current().slot<CollectiveState>(); }
  void log(const GroupEnd& group, const Collective& c) const {
    for (OrderLog* log : logs)
      log->lines_.push_back(
          fmt::format("{} channel {}: {}", group.name(), c.channel, signature_of(c).text()));
  }
  void tell_before() {
    if (before.empty() || std::exchange(told, true)) return;
    struct Told {
      bool& told;
      ~Told() { told = false; }
    } const over{told};
    before.each([](const auto& act) { act(); });
  }
  static const Interception::Body& body(const Interception& i) { return i.body_; }
};

Interception::Interception(Body body) : body_(std::move(body)) {
  CollectiveState::current().interceptions.push_back(this);
}
// One that is a global may be destroyed after the rank's Context.
Interception::~Interception() {
  if (Context::current_or_null() != nullptr) std::erase(CollectiveState::current().interceptions, this);
}
OrderLog::OrderLog() { CollectiveState::current().logs.push_back(this); }
OrderLog::~OrderLog() {
  if (Context::current_or_null() != nullptr) std::erase(CollectiveState::current().logs, this);
}
Subscription before_calls(std::function<void()> act) {
  return CollectiveState::current().before.add(std::move(act));
}
Subscription after_renewals(std::function<void(const Group&)> act) {
  return CollectiveState::current().renewed.add(std::move(act));
}
std::uint64_t collective_calls() { return CollectiveState::current().calls; }
std::uint64_t renewals() { return CollectiveState::current().renewals; }

// ---- one rank's end ----

GroupEnd::GroupEnd(std::unique_ptr<Transport> transport, std::string name, std::vector<int> world_ranks)
    : home_(TransportHome::current()),
      transport_(home_->keep(std::move(transport))),
      name_(one_line(std::move(name))),
      world_ranks_(std::move(world_ranks)),
      rank_(transport_->rank()),
      size_(transport_->size()),
      state_(CollectiveState::current()) {}

void GroupEnd::check_thread() const {
  check<StateError>(
      home_->is_current(),
      "group {}: it belongs to another thread's rank; a rank makes its groups on its own thread", name_);
}

Line& GroupEnd::line_of(CollectiveKind kind, int channel, int peer) {
  if (kind == CollectiveKind::send) return transport_->messages(channel, rank_, peer);
  if (kind == CollectiveKind::recv) return transport_->messages(channel, peer, rank_);
  return transport_->channel(channel);
}

namespace {

const Tensor* some_tensor(const Collective& c) {
  return !c.outputs.empty() ? &c.outputs[0] : !c.inputs.empty() ? &c.inputs[0] : nullptr;
}

/// Where the tensors lie.
Device device_of(const Collective& c) {
  const Tensor* t = some_tensor(c);
  return t != nullptr ? t->device() : Device::cpu();
}

/// A call in a world of one, on the tensors' own device: every output becomes its input.
void move_alone(const Collective& c) {
  const NoGrad guard;
  for (std::size_t i = 0; i < c.outputs.size(); ++i) {
    const Tensor &in = c.inputs[i], &out = c.outputs[i];
    if (out.numel() == 0) continue;
    const Device device = out.device();
    if (in.raw() != out.raw())
      backend(device.type)
          .copy(out.raw(), device, in.raw(), device, static_cast<std::size_t>(out.spec().bytes()));
    const bool reduces = c.kind == CollectiveKind::reduce_scatter || c.kind == CollectiveKind::all_reduce;
    if (reduces && c.reduction.kind == ReduceOp::Kind::prescaled_sum && c.reduction.scale != 1)
      copy_(alias(out, out.layout()), mul(to(out.detach(), compute_dtype(out.dtype())), c.reduction.scale));
  }
}

}  // namespace

PostedCall GroupEnd::post(const Collective& c, Completion completion) {
  validate(c, rank_, size_);
  ++state_.calls;
  state_.log(*this, c);
  std::optional<Collective> moved;  // for the transport a call like any other, with nothing left to move
  if (const Device device = device_of(c); size_ == 1 && !device.is_cpu() && device.type != DeviceType::meta) {
    moved = c;
    moved->inputs.clear();
    moved->outputs.clear();
  }
  if (!moved && !transport_->reaches(device_of(c)))
    fail<NotImplementedError>(
        "{}: tensors on {} do not travel between these ranks; move them to cpu, or let the ranks be threads "
        "of "
        "one process",
        to_string(c.kind), to_string(device_of(c)));
  Line& line = line_of(c.kind, c.channel, c.peer);
  const std::uint64_t sequence =
      line.post(moved ? *moved : c, signature_of(c),
                completion == Completion::queued ? WhenFull::queue : WhenFull::wait);
  if (moved) move_alone(c);  // once the line has taken the call
  if (completion == Completion::complete) {
    line.wait(sequence);
    line.wait_inputs(sequence);
  }
  return {c.kind, c.peer, c.channel, sequence};
}

void GroupEnd::enqueue(const Collective& collective, Completion completion) {
  check_thread();
  home_->sweep();
  state_.tell_before();
  const auto& interceptions = state_.interceptions;
  if (interceptions.empty()) {
    posted_ = post(collective, completion);
    return;
  }
  const Group group(shared_from_this());
  std::optional<PostedCall> posted;         // of this call: an interception may make others
  std::size_t left = interceptions.size();  // newest first
  Interception::Proceed proceed = [&](const Collective& c) {
    if (left == 0) {
      posted = post(c, completion);
      return;
    }
    --left;
    CollectiveState::body (*interceptions[left])({group, c}, proceed);
    ++left;
  };
  proceed(collective);
  posted_ = posted;
}

bool GroupEnd::observed() const { return !state_.interceptions.empty() || !state_.logs.empty(); }

void GroupEnd::renew() {
  check_thread();
  transport_ = home_->keep(transport_->renew());
  if (size() > 1) ++state_.renewals;
  const Group group(shared_from_this());
  state_.renewed.each([&](const auto& act) { act(group); });
}

// ---- the ops ----

namespace ops {

Collective Post::collective(Inputs in) const {
  Collective c{.kind = kind, .reduction = reduction, .peer = peer, .channel = channel, .label = label};
  for (const Tensor& t : in.first(inputs)) c.inputs.push_back(t);
  for (const Tensor& t : in.subspan(inputs)) c.outputs.push_back(t);
  return c;
}

void Post::enqueue(Inputs in) const {
  const TimelineSlice slice(to_string(kind), label);
  group->enqueue(collective(in), completion);
}

namespace {

/// The last call that a group's end has posted.
class PostedLent final : public LentCall {
 public:
  PostedLent(std::shared_ptr<GroupEnd> end, const PostedCall& call)
      : end_(std::move(end)), transport_(end_->transport()), call_(call) {}

  bool over() override {
    if (past_ || renewed()) return true;
    end_->check_thread();
    return line().inputs_done(call_.sequence);
  }
  void wait() override {
    if (past_ || renewed()) return;
    end_->check_thread();
    const TimelineSlice slice("wait", "peers' reads");
    line().wait(call_.sequence);  // this rank's own part may not be over either
    line().wait_inputs(call_.sequence);
    past_ = true;
  }

 private:
  /// Then nobody reads any more.
  bool renewed() const { return end_->transport() != transport_; }
  Line& line() { return end_->line_of(call_.kind, call_.channel, call_.peer); }

  std::shared_ptr<GroupEnd> end_;
  std::shared_ptr<Transport> transport_;
  PostedCall call_;
  bool past_ = false;
};

}  // namespace

std::shared_ptr<LentCall> Post::lent() const {
  const std::optional<PostedCall>& posted = group->posted();
  if (completion == Completion::complete || !posted) return nullptr;
  return std::make_shared<PostedLent>(group, *posted);
}

const void* Post::line() const {
  return completion == Completion::complete ? nullptr : &group->line_of(kind, channel, peer);
}

void Wait::wait() const {
  const TimelineSlice slice("wait", to_string(kind));
  group->check_thread();
  Line& line = group->line_of(kind, channel, peer);
  if (line.posted() <= behind) {  // a replay, of a call from before the step
    if (until == Until::inputs_are_free) return;
    throw CollectiveError(
        fmt::format("{} on group {}: the captured step waits for a call from before it, and the group was "
                    "renewed since; capture it again",
                    to_string(kind), group->name()),
        {}, 0);
  }
  const std::uint64_t sequence = line.posted() - 1 - behind;
  until == Until::outputs_are_there ? line.wait(sequence) : line.wait_inputs(sequence);
}

}  // namespace ops

// ---- work ----

Line& Work::line() const {
  group_->check_thread();
  if (group_->transport() != transport_)
    throw CollectiveError(
        fmt::format("{} #{} on group {}: the group was renewed since it was posted; post it again",
                    to_string(kind_), sequence_, group_->name()),
        {}, sequence_);
  return group_->line_of(kind_, channel_, peer_);
}

void Work::wait() { wait(ops::Until::outputs_are_there, outputs_); }
void Work::wait_inputs() { wait(ops::Until::inputs_are_free, {}); }

void Work::wait(ops::Until until, const Tensors& written) {
  if (!group_) return;
  const std::uint64_t behind = line().posted() - 1 - sequence_;
  apply_many(ops::Wait{group_, kind_, peer_, channel_, until, behind}, written);
}

bool Work::done() const { return !group_ || line().done(sequence_); }

// ---- the handle ----

Group::Group(std::shared_ptr<GroupEnd> end) : end_(std::move(end)) {}

namespace {

GroupEnd& end_of(const std::shared_ptr<GroupEnd>& end) {
  check<StateError>(static_cast<bool>(end), "group: this rank is not in the group; ask defined() first");
  return *end;
}

/// Applies a call as an op, so that listeners see it.
void pass(const std::shared_ptr<GroupEnd>& end, const Collective& c, Completion completion) {
  end_of(end);
  Tensors tensors;
  tensors.reserve(c.inputs.size() + c.outputs.size());
  for (const Tensor& t : c.inputs) tensors.push_back(t);
  for (const Tensor& t : c.outputs) tensors.push_back(t);
  apply_many(ops::Post{end, c.kind, c.reduction, c.peer, c.channel, c.label, completion, c.inputs.size()},
             tensors);
}

}  // namespace

int Group::rank() const { return end_of(end_).rank(); }
int Group::size() const { return end_of(end_).size(); }
const std::string& Group::name() const { return end_of(end_).name(); }
std::span<const int> Group::world_ranks() const { return end_of(end_).world_ranks(); }
const GroupKey& Group::key() const {
  end_of(end_).check_thread();
  return end_->transport()->key();
}
bool Group::failed() const {
  end_of(end_).check_thread();
  return end_->transport()->failed();
}
void Group::renew() const { end_of(end_).renew(); }

Work Group::enqueue(Collective c, WhenFull full) const {
  pass(end_, c, full == WhenFull::queue ? Completion::queued : Completion::posted);
  Work work;
  const std::optional<PostedCall>& posted = end_->posted();
  if (!posted) return work;
  work.group_ = end_;
  work.transport_ = end_->transport();
  work.kind_ = posted->kind;
  work.peer_ = posted->peer;
  work.channel_ = posted->channel;
  work.sequence_ = posted->sequence;
  work.outputs_ = std::move(c.outputs);
  return work;
}

void Group::call(Collective c) const { pass(end_, c, Completion::complete); }

void Group::all_gather(const Tensor& output, const Tensor& input, CallOptions o) const {
  call({CollectiveKind::all_gather, {input}, {output}, {}, -1, o.channel, std::move(o.label)});
}
void Group::reduce_scatter(const Tensor& output, const Tensor& input, ReduceOp reduction,
                           CallOptions o) const {
  call({CollectiveKind::reduce_scatter, {input}, {output}, reduction, -1, o.channel, std::move(o.label)});
}
void Group::all_reduce(const Tensor& tensor, ReduceOp reduction, CallOptions o) const {
  call({CollectiveKind::all_reduce, {tensor}, {tensor}, reduction, -1, o.channel, std::move(o.label)});
}
void Group::broadcast(const Tensor& tensor, int root, CallOptions o) const {
  Collective c{CollectiveKind::broadcast, {}, {tensor}, {}, root, o.channel, std::move(o.label)};
  if (rank() == root) c.inputs.push_back(tensor);
  call(std::move(c));
}
void Group::all_to_all(const Tensor& output, const Tensor& input, CallOptions o) const {
  call({CollectiveKind::all_to_all, {input}, {output}, {}, -1, o.channel, std::move(o.label)});
}
void Group::send(const Tensor& tensor, int destination, CallOptions o) const {
  call({CollectiveKind::send, {tensor}, {}, {}, destination, o.channel, std::move(o.label)});
}
void Group::recv(const Tensor& tensor, int source, CallOptions o) const {
  call({CollectiveKind::recv, {}, {tensor}, {}, source, o.channel, std::move(o.label)});
}
void Group::barrier(CallOptions o) const { call({.channel = o.channel, .label = std::move(o.label)}); }

// ---- groups from groups ----

namespace {

/// A tensor over the memory of `offers`, which outlive the call: it is waited for.
Tensor bytes_of(std::span<const Offer> offers) {
  return from_blob(const_cast<Offer*>(offers.data()), {static_cast<std::int64_t>(offers.size_bytes())}, u8);
}

}  // namespace

Group Group::split(const std::vector<std::vector<int>>& lists, std::string_view name) const {
  const GroupEnd& end = end_of(end_);
  end.check_thread();
  std::vector<bool> taken(static_cast<std::size_t>(end.size()));
  const std::vector<int>* mine = nullptr;
  for (const std::vector<int>& list : lists)
    for (int rank : list) {
      check<ValueError>(rank >= 0 && rank < end.size(), "{}: rank {} is not in 0..{} of group {}", name, rank,
                        end.size() - 1, end.name());
      check<ValueError>(!taken[static_cast<std::size_t>(rank)], "{}: rank {} of group {} is listed twice",
                        name, rank, end.name());
      taken[static_cast<std::size_t>(rank)] = true;
      if (rank == end.rank()) mine = &list;
    }

  const std::vector<int> members = mine ? *mine : std::vector<int>{};
  const CallOptions call{.label = fmt::format("split of {} into {}", end.name(), lists)};
  const std::string full_name = one_line(fmt::format("{}.{}", end.name(), name));
  const Offer offer = end.transport()->offer(members, full_name);
  std::vector<Offer> offers(static_cast<std::size_t>(end.size()));
  const bool agree = end.transport()->has_peers();
  if (agree) all_gather(bytes_of(std::span(offers)), bytes_of(std::span(&offer, 1)), call);
  Group group;
  if (mine) {
    std::vector<int> world;
    for (int rank : members) world.push_back(end.world_ranks()[static_cast<std::size_t>(rank)]);
    group = Group(std::make_shared<GroupEnd>(end.transport()->join(members, offers, full_name), full_name,
                                             std::move(world)));
  }
  if (agree) barrier(call);  // so that nobody uses the group before all have joined
  return group;
}

Group Group::subgroup(std::span<const int> ranks) const {
  return split({std::vector<int>(ranks.begin(), ranks.end())}, fmt::format("[{}]", fmt::join(ranks, ",")));
}

Group Group::blocks(int count) const {
  check<ValueError>(count > 0 && size() % count == 0, "blocks: {} ranks do not divide into blocks of {}",
                    size(), count);
  std::vector<std::vector<int>> lists(static_cast<std::size_t>(size() / count));
  for (int rank = 0; rank < size(); ++rank) lists[static_cast<std::size_t>(rank / count)].push_back(rank);
  return split(lists, fmt::format("blocks({})[{}]", count, rank() / count));
}

Group Group::strided(int stride) const {
  check<ValueError>(stride > 0 && size() % stride == 0, "strided: {} ranks do not divide by a stride of {}",
                    size(), stride);
  std::vector<std::vector<int>> lists(static_cast<std::size_t>(stride));
  for (int rank = 0; rank < size(); ++rank) lists[static_cast<std::size_t>(rank % stride)].push_back(rank);
  return split(lists, fmt::format("strided({})[{}]", stride, rank() % stride));
}

}  // namespace sherd
