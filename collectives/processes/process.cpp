#include "collectives/processes/process.h"

#include <sched.h>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/lsan_interface.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <thread>

#include "collectives/launch_report.h"
#include "collectives/processes/line.h"
#include "runtime/context.h"
#include "runtime/pause.h"

namespace sherd::processes {
namespace {

static_assert(std::is_trivially_copyable_v<Header>);

/// What a process gives to all others when they meet.
struct Card {
  Door door;
  GroupKey key;
};
static_assert(std::is_trivially_copyable_v<Card>);

constexpr int last_looks = 200;  // for frames of a dead process that are still on their way
/// How long the process that decides on a fault's text may be stopped before another one does.
constexpr std::chrono::milliseconds decision_time{500};

struct Slot {
  std::shared_ptr<Process> process;
};

/// Reports to `sherd launch`, which ends the job when a rank ends while others wait for it to join; after
/// that the ranks notice it themselves.
void report(LaunchReport::Kind kind, const Launch& launch) {
  tell_launcher(std::getenv(launch_socket_variable), {kind, launch.rank, 0});
}

}  // namespace

void LeaveToWire::operator()([[maybe_unused]] Lent* lent) const noexcept {
#if defined(__SANITIZE_ADDRESS__)
  __lsan_ignore_object(lent);
#endif
}

void Patience::pause() {
  ++looks_;
  if (looks_ < spins_) {
    pause_briefly();
  } else if (looks_ < spins_ + 20) {
    ::sched_yield();  // on a busy core each may cost a time slice; who sleeps is woken sooner
  } else {
    std::this_thread::sleep_for(std::chrono::microseconds(looks_ < spins_ + 1000 ? 20 : 200));
  }
}

/// What the rank does for its peers while it waits for a device.
class Process::Going final : public WaitingWork {
 public:
  explicit Going(Process& process) : process_(process) {}
  void go_on() noexcept override {
    if (process_.forked()) return;
    try {
      process_.progress();
      process_.step_others(nullptr);
    } catch (const std::exception&) {  // the rank's next call throws it
    }
  }

 private:
  Process& process_;
};

std::shared_ptr<Process> Process::current(const Launch& launch) {
  Slot& slot = Context::current().slot<Slot>();
  if (!slot.process) slot.process = std::make_shared<Process>(launch);
  return slot.process;
}

// ---- start and end ----

Process::Process(const Launch& launch) {
  report(LaunchReport::Kind::joining, launch);
  start(launch);
  report(LaunchReport::Kind::joined, launch);
}

void Process::start(const Launch& launch) {
  wire_ = connect_wire(launch);
  rank_ = wire_->rank();
  spins_ = spins_for(launch);
  peers_.resize(static_cast<std::size_t>(wire_->size()));
  watch_ = std::make_unique<Watch>(rank_, size(),
                                   launch.local_size == size() ? Reach::this_machine : Reach::network);
  wire_->meet([&](const Vigil& vigil) {
    const Card own{watch_->door(), draw_group_key()};
    std::vector<Card> cards(peers_.size());
    wire_->all_gather(&own, cards.data(), sizeof own);
    key_ = cards[0].key;
    std::vector<Door> doors;
    for (const Card& card : cards) doors.push_back(card.door);
    watch_->connect(doors, vigil);
  });
  go_deaf(wire_->open([this](int process) { watch_->cut(process); }));
  throw_if_deaf();
}

Process::~Process() {
  if (!watch_) return;
  going_.reset();
  lines_.clear();
  for (Patience patience(spins_); !forked() && !retired_.empty(); patience.pause()) {
    // Who has gone has closed its ends, or broken them off.
    if (!clean_ || in_run_ || std::ranges::any_of(peers_, [](const Peer& p) { return p.goodbye || p.died; }))
      for (Retired& r : retired_) r.network->abort();
    progress();
  }
  if (forked()) {
    clean_ = false;
  } else if (in_run_) {  // the program ends inside a body: no goodbye, so the peers see a death
    clean_ = false;
  } else {
    Notice goodbye = notice(Notice::Kind::goodbye);
    goodbye.flag = clean_;
    announce(std::move(goodbye));
  }
  if (clean_ && all_said_goodbye() && wire_->end()) std::unique_ptr<Lent>(lent_.release()).reset();
}

/// Waits for the goodbyes of all processes; false when one had a fault or died.
bool Process::all_said_goodbye() {
  Patience patience(spins_);
  for (;;) {
    progress();
    if (!deafness_.empty()) return false;
    bool all = true;
    for (int p = 0; p < size(); ++p) {
      if (p == rank_) continue;
      if (peer(p).died || (peer(p).goodbye && !peer(p).goodbye->flag)) return false;
      all = all && peer(p).goodbye;
    }
    if (all) return true;
    patience.pause();
  }
}

// ---- runs ----

std::uint32_t Process::begin_run() {
  in_run_ = true;
  heard_.reset();
  return run_;
}

void Process::leave(std::uint32_t run, Departure how, const std::string& reason) {
  if (forked()) return;
  Notice departed = notice(Notice::Kind::departed);
  departed.group.run = run;
  departed.how = how;
  departed.text = parting(how, reason, heard());
  if (heard_) departed.ranks.assign(heard_->ranks.begin(), heard_->ranks.end());
  announce(departed);
  if (how == Departure::threw) orphans_.clear();
  settle(run);
  orphans_.clear();
  departed.flag = true;
  announce(departed);
  in_run_ = false;
  run_ = run + 1;
  next_number_ = 0;
  forget_dropped();
  watch_->forget(run);
}

void Process::settle(std::uint32_t run) {
  Patience patience(spins_);
  while (deafness_.empty() && !settled(run)) {
    if (progress() || step_others(nullptr))
      patience.reset();
    else
      patience.pause();
  }
}

/// Whether the peers have taken what this rank posted, or will take no more.
bool Process::settled(std::uint32_t run) {
  std::erase_if(orphans_, [](const auto& line) { return line->hopeless() || line->idle(); });
  if (!orphans_.empty()) return false;
  if (std::ranges::any_of(lines_, [](const auto& entry) { return entry.second->owes(); })) return false;
  if (!std::ranges::all_of(retired_, [](Retired& r) { return !r.given.oldest(); })) return false;
  return std::ranges::all_of(lent_->sending, [&](const auto& entry) { return deaf(entry.first, run); });
}

void Process::announce(Notice notice) {
  for (int p = 0; p < size(); ++p) {
    if (p == rank_) continue;
    notice.value = peer(p).sent;
    watch_->send(p, notice);
  }
}

Notice Process::notice(Notice::Kind kind) const {
  Notice notice;
  notice.kind = kind;
  return notice;
}

// ---- groups ----

std::shared_ptr<GroupCore> Process::make_world() {
  std::vector<int> all(static_cast<std::size_t>(size()));
  std::iota(all.begin(), all.end(), 0);
  GroupKey key = key_;
  std::memcpy(key.data(), &run_, sizeof run_);
  return make_group({run_, 0}, std::move(all), "world", key);
}

std::shared_ptr<GroupCore> Process::make_group(GroupId id, std::vector<int> members, std::string name,
                                               const GroupKey& key) {
  const auto place = std::ranges::find(members, rank_) - members.begin();
  auto core = std::make_shared<GroupCore>(
      GroupCore{id, std::move(members), static_cast<int>(place), std::move(name)});
  core->key = key;
  number_used(id.number);
  groups_[id] = core;
  forget_dropped();
  const auto early = early_.find(id);
  if (early == early_.end()) return core;
  const std::vector<Watch::News> news = std::move(early->second);
  early_.erase(early);
  for (const Watch::News& n : news) apply(n.process, n.notice);
  return core;
}

/// Whether a group may yet be made here: its number is above all that this process has used.
bool Process::to_come(GroupId id) const {
  return id.run > run_ || (id.run == run_ && id.number >= next_number_);
}

/// Forgets groups without a handle, and what came for them.
void Process::forget_dropped() {
  std::erase_if(groups_, [](const auto& entry) { return entry.second.expired(); });
  const auto dropped = [&](GroupId id) { return !groups_.contains(id) && !to_come(id); };
  std::erase_if(mail_, [&](const auto& entry) { return dropped(entry.first.group); });
  std::erase_if(early_, [&](const auto& entry) { return dropped(entry.first); });
}

void Process::fail(GroupCore& core, Fault fault) {
  if (core.fault || core.reported) return;
  clean_ = false;
  Notice report = notice(Notice::Kind::report);
  report.group = core.id;
  report.sequence = fault.sequence;
  report.ranks.assign(fault.ranks.begin(), fault.ranks.end());
  report.members.assign(core.members.begin(), core.members.end());
  report.text = std::move(fault.text);
  core.reported = report;
  core.reported_at = std::chrono::steady_clock::now();
  for (int member : core.members) {
    if (member == rank_) return watch_->decide(report);
    if (peer(member).died || peer(member).goodbye) continue;
    return watch_->send(member, report);
  }
}

void Process::fail(const LineId& line, std::uint64_t sequence, const Signature& signature, int peer,
                   const std::string& failure) {
  const std::shared_ptr<GroupCore> core = group(line.group);
  if (!core) return;  // no handle is left, so nobody could be told
  const CallPlace place{core->name, core->members, line.channel, line.source, line.destination, sequence};
  const auto other = std::ranges::find(core->members, peer) - core->members.begin();
  fail(*core, not_moved(place, {core->rank, &signature}, static_cast<int>(other), failure));
}

void Process::raise(const Fault& fault, const GroupCore& core) {
  heard_ = fault;
  fault.raise(core.members);
}

void Process::press(GroupCore& core) {
  if (core.fault || std::chrono::steady_clock::now() - core.reported_at < decision_time) return;
  watch_->decide(*core.reported);
}

void Process::begin_renewal(GroupCore& core) {
  clean_ = false;
  if (!core.fault) core.fault = renewing(core.name, core.members, core.rank, heard());
}

void Process::ask_renewal(GroupCore& core) {
  core.renewals[rank_] = {next_number_, draw_group_key()};
  Notice renewal = notice(Notice::Kind::renewal);
  renewal.group = core.id;
  renewal.offer = core.renewals[rank_];
  // With the fault, because this notice may reach a member before the decision, which goes over another
  // connection.
  renewal.sequence = core.fault->sequence;
  renewal.ranks.assign(core.fault->ranks.begin(), core.fault->ranks.end());
  renewal.text = core.fault->text;
  for (int member : core.members) {
    if (member == rank_) continue;
    ++peer(member).renewals_sent;
    watch_->send(member, renewal);
  }
}

void Process::fail_renewal(GroupCore& core, Fault fault) {
  Notice failed = notice(Notice::Kind::renewal_fault);
  failed.group = core.id;
  failed.sequence = fault.sequence;
  failed.ranks.assign(fault.ranks.begin(), fault.ranks.end());
  failed.text = fault.text;
  for (int member : core.members)
    if (member != rank_) watch_->send(member, failed);
  if (!core.renewal_fault) core.renewal_fault = std::move(fault);
}

std::shared_ptr<GroupCore> Process::group(GroupId id) const {
  const auto found = groups_.find(id);
  return found == groups_.end() ? nullptr : found->second.lock();
}

bool Process::has_done(const Waiter& waiter) const {
  if (waiter.line.group.run < run_) return true;  // that body is over, as the waiter will hear
  const Peer& p = peer(waiter.process);
  if (p.sent + p.renewals_sent > waiter.received) return true;
  if (waiter.renews) return false;
  // Its group has failed: the waiter will hear of that and wait no more.
  if (const std::shared_ptr<GroupCore> core = group(waiter.line.group); core && core->fault) return true;
  const auto line = lines_.find(waiter.line);
  return line != lines_.end() && line->second->posted() > waiter.sequence;
}

std::optional<Gone> Process::gone(int process, std::uint32_t run) const {
  const Peer& p = peer(process);
  const bool all_here = p.died.has_value();
  const auto departed = p.departed.find(run);
  if (departed != p.departed.end() && (all_here || p.received >= departed->second.value))
    return Gone{departed->second.how,
                departed->second.text,
                {departed->second.ranks.begin(), departed->second.ranks.end()}};
  if (p.goodbye && (all_here || p.received >= p.goodbye->value))
    return Gone{Departure::left, parting(Departure::left, {}, nullptr), {}};
  if (all_here) return Gone{Departure::died, parting(Departure::died, p.died->text, nullptr), {}};
  return {};
}

bool Process::deaf(int process, std::uint32_t run) const {
  const Peer& p = peer(process);
  if (p.died || p.goodbye) return true;
  const auto departed = p.departed.find(run);
  return departed != p.departed.end() && (departed->second.flag || departed->second.how == Departure::threw);
}

// ---- lines ----

void Process::add(const LineId& id, ProcessLine& line) {
  lines_[id] = &line;
  const auto mail = mail_.find(id);
  if (mail == mail_.end()) return;
  for (Frame& frame : mail->second) line.take(std::move(frame));
  mail_.erase(mail);
}
void Process::remove(const LineId& id) {
  const auto found = lines_.find(id);
  std::erase(holding_, found->second);
  lines_.erase(found);
}
void Process::adopt(std::unique_ptr<ProcessLine> line) {
  if (in_run_) orphans_.push_back(std::move(line));
}

void Process::retire(Retired retired) { retired_.push_back(std::move(retired)); }

void Process::close_retired() {
  std::erase_if(retired_, [&](Retired& r) { return close(r); });
}

/// Whether it is closed. Connections are broken off whose group has failed, or where the device waits though
/// a peer is gone, which has given what it was to give or never will.
bool Process::close(Retired& r) {
  const auto is_gone = [&](int process) { return process != rank_ && gone(process, r.core->id.run); };
  bool aborted = r.core->fault.has_value();
  try {
    aborted = aborted || (std::ranges::any_of(r.processes, is_gone) && r.given.waits_too_long());
    if (aborted) r.network->abort();
    return !r.given.oldest() && r.network->close();
  } catch (const std::exception&) {
    if (aborted) return true;  // the device has failed
    r.network->abort();        // its other ends are gone
    return false;
  }
}

void Process::go_on_while_waiting() {
  if (!going_) going_ = std::make_unique<Going>(*this);
}

void Process::let_go() {
  std::erase_if(holding_, [](ProcessLine* line) { return line->let_go(); });
  std::erase_if(orphans_, [](const auto& line) { return line->hopeless() || line->idle(); });
}

void Process::abandon(Abandoned left) {
  const auto cancelled = [&](Wire::Ticket& ticket) { return wire_->cancel(ticket).empty(); };
  if (!forked() && !std::ranges::all_of(left.receives, cancelled)) return lose(std::move(left.keep));
  lent_->abandoned.push_back(std::move(left));
  if (!forked()) look_at_abandoned();
}

void Process::look_at_abandoned() {
  std::erase_if(lent_->abandoned, [&](Abandoned& left) {
    withdraw(left);
    return over(left);
  });
}

/// All members hear of a fault, so none completes a call for want of which another waits.
void Process::withdraw(Abandoned& left) {
  for (Abandoned::Sent& sent : left.sends) {
    const bool ended = peer(sent.to).died || peer(sent.to).goodbye;  // nobody is there to be told
    if (sent.withdrawn || ended || !(left.core->fault || deaf(sent.to, left.core->id.run))) continue;
    wire_->withdraw(sent.to, sent.tag, sent.tickets);
    sent.withdrawn = true;
  }
}

/// Whether the wire is done with them, or nobody will know.
bool Process::over(std::vector<Wire::Ticket>& tickets, Abandoned& left) {
  std::erase_if(tickets, [&](Wire::Ticket& ticket) {
    bool over = false;
    const bool known = wire_->test(ticket, over).empty();
    if (!known) lose(std::exchange(left.keep, {}));
    return over || !known;
  });
  return tickets.empty();
}
bool Process::over(Abandoned& left) {
  bool all = over(left.receives, left);
  for (Abandoned::Sent& sent : left.sends) all = over(sent.tickets, left) && all;
  return all;
}

void Process::lose(std::vector<Ref<Storage>> memory) {
  clean_ = false;
  std::ranges::move(memory, std::back_inserter(lent_->lost));
}

bool Process::step_others(const ProcessLine* line) {
  bool moved = false;
  for (const auto& [id, other] : lines_)
    if (other != line) moved = other->step() || moved;
  return moved;
}

// ---- frames ----

Frame Process::take_frame() {
  if (spare_.empty()) return Frame::make();
  Frame frame = std::move(spare_.back());
  spare_.pop_back();
  return frame;
}

void Process::send(int to, Frame frame) {
  const Header& header = frame.header();
  Wire::Ticket ticket;
  const Failure failed = wire_->send(to, frame, ticket);
  if (!failed.empty()) return fail(header.line, header.sequence, header.signature, to, failed);
  ++peer(to).sent;
  lent_->sending[to].push_back({ticket, std::move(frame)});
  reap();
}

/// Takes back frames that have been sent.
void Process::reap() {
  for (auto& [to, frames] : lent_->sending) reap(to, frames);
  std::erase_if(lent_->sending, [](const auto& entry) { return entry.second.empty(); });
}

void Process::reap(int to, std::deque<Sending>& frames) {
  for (; !frames.empty(); frames.pop_front()) {
    Sending& oldest = frames.front();
    bool over = false;
    const Failure failed = wire_->test(oldest.ticket, over);
    if (failed.empty() && !over) return;
    if (failed.empty()) {
      give_back(std::move(oldest.frame));
      continue;
    }
    const Header& header = oldest.frame.header();
    fail(header.line, header.sequence, header.signature, to, failed);
    lent_->lost_frames.push_back(std::move(oldest.frame));
  }
}

int Process::next_tags(int to) {
  const std::uint32_t pairs = static_cast<std::uint32_t>(wire_->last_tag()) / 2;
  return 2 * static_cast<int>(peer(to).tags++ % pairs);
}

/// Where `why` says so, no frame can be received any more: not a fault of one group.
void Process::go_deaf(Failure why) {
  if (why.empty()) return;
  clean_ = false;
  deafness_ = std::move(why);
}

void Process::throw_if_deaf() const {
  check<StateError>(deafness_.empty(), "processes: {}; this process can receive nothing more", deafness_);
}

/// Takes frames in the order in which their sender sent them.
bool Process::receive() {
  for (bool any = false;; any = true) {
    bool came = false;
    if (deafness_.empty()) go_deaf(wire_->take(incoming_, came));
    if (!came) return any;
    deliver(std::exchange(incoming_, take_frame()));
  }
}

void Process::deliver(Frame frame) {
  const Header& header = frame.header();
  ++peer(header.from).received;
  const auto line = lines_.find(header.line);
  if (line != lines_.end()) return line->second->take(std::move(frame));
  const GroupId id = header.line.group;
  if (group(id) || to_come(id)) return mail_[header.line].push_back(std::move(frame));
  give_back(std::move(frame));
}

bool Process::progress() {
  const bool news = watch_->any_news();
  if (news) take_news();
  const bool any = receive();
  reap();
  if (!lent_->abandoned.empty()) look_at_abandoned();
  close_retired();
  return any || news;
}

// ---- news ----

void Process::take_news() {
  for (Watch::News& n : watch_->take_news()) apply(n.process, std::move(n.notice));
}

void Process::apply(int process, Notice notice) {
  switch (notice.kind) {
    case Notice::Kind::departed:
      if (notice.group.run >= run_) peer(process).departed[notice.group.run] = std::move(notice);
      return;
    case Notice::Kind::goodbye:
      peer(process).goodbye = std::move(notice);
      return;
    case Notice::Kind::died:
      clean_ = false;
      for (int looks = 0; looks < last_looks; ++looks)
        if (receive()) looks = 0;
      peer(process).died = std::move(notice);
      return;
    case Notice::Kind::report:  // answered by the watch
      return;
    case Notice::Kind::chain:
      return circles_.hear_chain(std::move(notice.waiters));
    case Notice::Kind::circle:
      return circles_.hear_circle(notice.waiters);
    case Notice::Kind::fault:
    case Notice::Kind::renewal:
    case Notice::Kind::renewal_fault:
      break;
  }
  clean_ = false;
  if (notice.kind == Notice::Kind::renewal) ++peer(process).renewals_received;
  const std::shared_ptr<GroupCore> core = group(notice.group);
  if (!core) {
    if (to_come(notice.group)) early_[notice.group].push_back({process, std::move(notice)});
    return;
  }
  if (notice.kind == Notice::Kind::renewal) core->renewals[process] = notice.offer;
  std::optional<Fault>& fault =
      notice.kind == Notice::Kind::renewal_fault ? core->renewal_fault : core->fault;
  if (!fault)
    fault = Fault{std::move(notice.text), {notice.ranks.begin(), notice.ranks.end()}, notice.sequence};
}

}  // namespace sherd::processes
