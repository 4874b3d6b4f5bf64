#include "collectives/processes/line.h"

#include <algorithm>
#include <cstring>

#include "collectives/combine.h"
#include "runtime/backend.h"

namespace sherd::processes {
namespace {

constexpr std::int64_t slices_from = 32 << 10;  // bytes of an all_reduce that are worth two rounds

/// The host for a call without tensors.
Device device_of(const Collective& c) {
  const Tensors& some = c.inputs.empty() ? c.outputs : c.inputs;
  return some.empty() ? Device::cpu() : some[0].device();
}

/// Set within a scope.
class Stepping {
 public:
  explicit Stepping(bool& flag) : flag_(flag) { flag_ = true; }
  ~Stepping() { flag_ = false; }
  Stepping(const Stepping&) = delete;
  Stepping& operator=(const Stepping&) = delete;

 private:
  bool& flag_;
};

}  // namespace

ProcessLine::ProcessLine(std::shared_ptr<Process> process, std::shared_ptr<GroupCore> core, LineId id)
    : process_(std::move(process)), core_(std::move(core)), id_(id), calls_(depth), tags_(open_at_peers) {
  if (id.source < 0) {
    processes_ = core_->members;
    self_ = static_cast<std::size_t>(core_->rank);
  } else {
    for (int rank : {id.source, id.destination})
      processes_.push_back(core_->members[static_cast<std::size_t>(rank)]);
    self_ = core_->rank == id.source ? 0 : 1;
  }
  inbox_.resize(lanes());
  last_.resize(lanes());
  from_lane_.resize(lanes());
  sources_.resize(lanes());
  process_->add(id_, *this);
}

ProcessLine::~ProcessLine() {
  process_->remove(id_);
  if (route_ && route_->way() == DeviceRoute::Way::network) leave_device();
  Abandoned left{.core = core_, .receives = {}, .sends = {}, .keep = {}};
  for (const Message& m : receives_) left.receives.push_back(m.ticket);
  for (const Call& c : calls_) {
    for (const Message& m : c.sends) left.sends.push_back(leave(m));
    std::ranges::copy(memory_of(c), std::back_inserter(left.keep));
  }
  if (core_->fault) std::ranges::move(leave_tags(), std::back_inserter(left.sends));
  if (!left.receives.empty() || !left.sends.empty()) process_->abandon(std::move(left));
  decline();
}

/// By which peers may not have received what the wire has sent.
std::vector<Abandoned::Sent> ProcessLine::leave_tags() {
  std::vector<Abandoned::Sent> left;
  for (std::uint64_t sequence = posted_ - std::min(posted_, open_at_peers); sequence < posted_; ++sequence)
    for (std::size_t lane = 0; lane < lanes(); ++lane)
      for (int round = 0; round < 2 && tags(sequence)[lane] >= 0; ++round)
        left.push_back({processes_[lane], tags(sequence)[lane] + round, {}});
  return left;
}

/// What the call that is under way was to receive.
void ProcessLine::decline() {
  const Call& own = call(finished_);
  if (process_->forked() || stage_ == Stage::calls || !own.device.is_cpu()) return;
  for (std::size_t lane = 0; lane < lanes(); ++lane)
    for (int round = 0; round < own.movement.rounds && lane != self_; ++round) {
      const std::int64_t bytes = bytes_between(own, round, lane, self_);
      if (bytes > 0 && (round > 0 || !within_frame(own, bytes)))
        process_->wire().decline(processes_[lane], header(lane).tag + round);
    }
}

/// What the wire may read or write for the call.
std::vector<Ref<Storage>> ProcessLine::memory_of(const Call& call) const {
  std::vector<Ref<Storage>> memory = call.inputs;
  memory.insert(memory.end(), call.outputs.begin(), call.outputs.end());
  if (staging_) memory.push_back(staging_);
  return memory;
}

int ProcessLine::rank_of(std::size_t lane) const {
  return id_.source < 0 ? static_cast<int>(lane) : lane == 0 ? id_.source : id_.destination;
}

CallPlace ProcessLine::place(std::uint64_t sequence) const {
  return {core_->name, core_->members, id_.channel, id_.source, id_.destination, sequence};
}

// ---- posting ----

std::uint64_t ProcessLine::post(const Collective& c, const Signature& signature, WhenFull full) {
  throw_if_failed();
  if (full == WhenFull::queue && !(queue_.empty() && room())) {
    queue_.emplace_back(c, signature);
    process_->let_go();
    return posted() - 1;
  }
  if (posted_ >= depth) until([&] { return queue_.empty() && room(); }, [&] { return posted_ - depth; });
  publish(c, signature);
  process_->let_go();
  return posted_ - 1;
}

bool ProcessLine::room() { return posted_ < depth || (finished_ > posted_ - depth && sent(call(posted_))); }

void ProcessLine::publish(const Collective& c, const Signature& signature) {
  Call& own = call(posted_);
  fill(own, c, signature);
  for (std::size_t lane = 0; lane < lanes(); ++lane)
    if (lane != self_) send_to(lane, own);
  ++posted_;
}

void ProcessLine::fill(Call& call, const Collective& c, const Signature& signature) {
  if (posted_ >= depth) {
    land(posted_ - depth + 1);
    release(call);
  }
  call.sequence = posted_;
  call.signature = signature;
  call.reduction = c.reduction;
  call.moves = (!c.inputs.empty() || !c.outputs.empty()) && device_of(c).type != DeviceType::meta;
  call.element = size_of(signature.dtype);
  call.sends.clear();
  tags(posted_).assign(lanes(), -1);
  const bool slices = c.kind == CollectiveKind::all_reduce && signature.total * call.element >= slices_from;
  call.movement = Movement::of(c, static_cast<int>(lanes()), slices ? 2 : 1);
  fill_parts(call, c);
}

void ProcessLine::fill_parts(Call& call, const Collective& c) {
  call.parts.clear();
  call.inputs.clear();
  call.outputs.clear();
  call.device = call.moves ? device_of(c) : Device::cpu();
  if (!call.device.is_cpu()) use_device(call.device);
  for (std::size_t i = 0; i < std::max(c.inputs.size(), c.outputs.size()); ++i) {
    Part part{nullptr, nullptr, counted(c)[i].numel()};
    const auto take = [&](const Tensors& tensors, std::vector<Ref<Storage>>& keep,
                          std::vector<OnDevice>& on_device) -> std::byte* {
      const bool there = call.moves && i < tensors.size() && tensors[i].numel() > 0;
      if (!call.device.is_cpu()) on_device.emplace_back();
      if (!there) return nullptr;
      const Tensor& t = tensors[i];
      if (!call.device.is_cpu())
        on_device.back() = {t.storage_ref(), t.raw(), static_cast<std::size_t>(t.spec().bytes())};
      else
        keep.push_back(t.storage_ref());
      return t.raw();
    };
    part.in = take(c.inputs, call.inputs, call.device_inputs);
    part.out = take(c.outputs, call.outputs, call.device_outputs);
    call.parts.push_back(part);
  }
  if (!call.device.is_cpu()) post_on_device(call);
}

std::int64_t ProcessLine::bytes_between(const Call& call, int round, std::size_t from, std::size_t to) const {
  std::int64_t bytes = 0;
  pieces(call, round, from, to, [&](const Part&, Piece piece) { bytes += piece.count * call.element; });
  return bytes;
}

void ProcessLine::send_to(std::size_t lane, Call& call) {
  const std::int64_t bytes = bytes_between(call, 0, self_, lane);
  const bool eager = within_frame(call, bytes);
  const int to = processes_[lane];
  if (!eager || call.movement.rounds == 2) tags(posted_)[lane] = process_->next_tags(to);
  Frame frame = process_->take_frame();
  Header header;
  header.line = id_;
  header.tag = tags(posted_)[lane];
  header.sequence = posted_;
  header.bytes = eager ? static_cast<std::uint32_t>(bytes) : 0;
  header.from = process_->rank();
  header.signature = call.signature;
  std::byte* at = frame.payload();
  if (!call.device.is_cpu() && route_->way() == DeviceRoute::Way::unknown) {
    header.bytes = sizeof(NetworkCard);
    std::memcpy(at, &route_->card(), sizeof(NetworkCard));
  } else if (eager) {
    pieces(call, 0, self_, lane, [&](const Part& part, Piece piece) {
      const std::int64_t n = piece.count * call.element;
      std::memcpy(at, part.in + piece.source * call.element, static_cast<std::size_t>(n));
      at += n;
    });
  }
  std::memcpy(frame.bytes.get(), &header, sizeof header);
  process_->send(to, std::move(frame));
  if (!eager && call.device.is_cpu()) send_pieces(lane, call);
}

/// What does not come within a frame.
void ProcessLine::send_pieces(std::size_t lane, Call& call) {
  pieces(call, 0, self_, lane, [&](const Part& part, Piece piece) {
    send_piece(call, lane, tags(call.sequence)[lane], part.in + piece.source * call.element,
               piece.count * call.element);
  });
}

void ProcessLine::send_piece(Call& call, std::size_t lane, int tag, const std::byte* data,
                             std::int64_t bytes) {
  const std::int64_t step = process_->wire().message_bytes(bytes);
  for (; bytes > 0; data += step, bytes -= step) {
    Wire::Ticket ticket;
    const Failure failed = process_->wire().send(processes_[lane], tag, data, std::min(bytes, step), ticket);
    if (!failed.empty()) return break_off(call, lane, failed);
    call.sends.push_back({ticket, lane, tag});
  }
}

void ProcessLine::receive_piece(std::size_t lane, int tag, std::byte* data, std::int64_t bytes) {
  const std::int64_t step = process_->wire().message_bytes(bytes);
  for (; bytes > 0; data += step, bytes -= step) {
    Wire::Ticket ticket;
    const Failure failed =
        process_->wire().receive(processes_[lane], tag, data, std::min(bytes, step), ticket);
    if (!failed.empty()) return break_off(call(finished_), lane, failed);
    receives_.push_back({ticket, lane, tag});
  }
}

// ---- moving ----

void ProcessLine::take(Frame frame) {
  const auto from = std::ranges::find(processes_, frame.header().from);
  inbox_[static_cast<std::size_t>(from - processes_.begin())].push_back(std::move(frame));
}

bool ProcessLine::let_go() {
  released_ = std::max(released_, posted_ - std::min(posted_, depth));  // places before are others' by now
  for (; released_ < finished_ && sent(call(released_)); ++released_) release(call(released_));
  holds_ = released_ < finished_;
  return !holds_;
}

void ProcessLine::release(Call& call) {
  call.inputs.clear();
  call.outputs.clear();
  if (call.device_inputs.empty() && call.device_outputs.empty()) return;
  release_on_device(call);
}

bool ProcessLine::step() {
  if (stepping_) return false;
  const Stepping scope(stepping_);
  bool moved = false;
  if (route_) look_at_device();
  for (; !queue_.empty() && !core_->fault && !core_->reported && room(); queue_.pop_front(), moved = true)
    publish(queue_.front().first, queue_.front().second);
  while (finished_ < posted_ && !core_->fault && !core_->reported) {
    Call& own = call(finished_);
    switch (stage_) {
      case Stage::calls:
        if (!all_called()) return moved;
        if (!own.device.is_cpu())
          begin_on_device(own);
        else
          begin_first_round();
        break;
      case Stage::first_round:
        if (!received()) return moved;
        if (own.movement.combines(0)) {
          // Combining in place overwrites an input that may still be on its way to a peer.
          if (own.movement.rounds == 1 && own.signature.kind == CollectiveKind::all_reduce && !sent(own))
            return moved;
          combine_parts(own);
        }
        if (own.movement.rounds == 1)
          end_call();
        else
          stage_ = Stage::inputs_read;
        break;
      case Stage::inputs_read:
        if (!sent(own)) return moved;
        begin_second_round();
        break;
      case Stage::second_round:
        if (!received()) return moved;
        end_call();
        break;
      case Stage::connecting:
      case Stage::exchanging:
      case Stage::spreading:
        if (!step_on_device(own)) return moved;
        break;
    }
    moved = true;
  }
  return moved;
}

/// Whether every peer has posted the oldest unfinished call; a different call is a fault.
bool ProcessLine::all_called() {
  bool all = true;
  const Signature& own = call(finished_).signature;
  for (std::size_t lane = 0; lane < lanes(); ++lane) {
    if (lane == self_) continue;
    if (inbox_[lane].empty()) {
      all = false;
    } else if (header(lane).signature.digest != own.digest) {
      process_->fail(*core_, mismatch(place(finished_), posts()));
      return false;
    }
  }
  return all;
}

/// Those of the oldest unfinished call that have come.
std::vector<RankCall> ProcessLine::posts() {
  std::vector<RankCall> here;
  for (std::size_t lane = 0; lane < lanes(); ++lane)
    if (lane == self_)
      here.push_back({rank_of(lane), &call(finished_).signature});
    else if (!inbox_[lane].empty())
      here.push_back({rank_of(lane), &header(lane).signature});
  return here;
}

void ProcessLine::begin_first_round() {
  Call& own = call(finished_);
  const bool combines = own.movement.combines(0);
  std::int64_t staged = 0;
  const auto beside = [&](std::size_t lane, std::int64_t bytes) {
    return lane != self_ && bytes > 0 && !within_frame(own, bytes);
  };
  for (std::size_t lane = 0; lane < lanes(); ++lane) {
    const std::int64_t bytes = bytes_between(own, 0, lane, self_);
    if (combines && beside(lane, bytes)) staged += bytes;
  }
  staging_ = staged > 0 ? Storage::allocate(Device::cpu(), static_cast<std::size_t>(staged)) : nullptr;
  auto* at = staged > 0 ? static_cast<std::byte*>(staging_->data()) : nullptr;
  for (std::size_t lane = 0; lane < lanes(); ++lane) {
    const std::int64_t bytes = bytes_between(own, 0, lane, self_);
    if (!beside(lane, bytes)) continue;
    if (combines) {
      from_lane_[lane] = at;
      pieces(own, 0, lane, self_, [&](const Part&, Piece piece) {  // one message each, as they are sent
        receive_piece(lane, header(lane).tag, at, piece.count * own.element);
        at += piece.count * own.element;
      });
    } else {
      receive_placed(lane, own, 0, header(lane).tag);
    }
  }
  for (std::size_t lane = 0; lane < lanes(); ++lane) {
    const std::int64_t bytes = bytes_between(own, 0, lane, self_);
    if (beside(lane, bytes)) continue;
    if (lane != self_) from_lane_[lane] = inbox_[lane].front().payload();
    if (!combines) place_pieces(lane, own);
  }
  stage_ = Stage::first_round;
}

/// Receives into the outputs.
void ProcessLine::receive_placed(std::size_t lane, Call& call, int round, int tag) {
  pieces(call, round, lane, self_, [&](const Part& part, Piece piece) {
    receive_piece(lane, tag, part.out + piece.destination * call.element, piece.count * call.element);
  });
}

/// Copies into the outputs what is here already: this rank's own pieces, and those that came within a frame.
void ProcessLine::place_pieces(std::size_t lane, Call& call) {
  const std::byte* at = from_lane_[lane];
  pieces(call, 0, lane, self_, [&](const Part& part, Piece piece) {
    const std::int64_t bytes = piece.count * call.element;
    if (lane == self_) at = part.in + piece.source * call.element;
    copy_bytes(part.out + piece.destination * call.element, at, bytes);
    at += bytes;
  });
}

void ProcessLine::combine_parts(Call& call) {
  pieces(call, 0, self_, self_, [&](const Part& part, Piece piece) {
    for (std::size_t lane = 0; lane < lanes(); ++lane) {
      if (lane == self_) from_lane_[lane] = part.in + piece.source * call.element;
      sources_[lane] = from_lane_[lane];
      from_lane_[lane] += piece.count * call.element;  // pieces of one rank are alike on all lanes
    }
    combine(call.signature.dtype, call.reduction, sources_, part.out + piece.destination * call.element,
            piece.count);
  });
}

void ProcessLine::begin_second_round() {
  Call& own = call(finished_);
  for (std::size_t lane = 0; lane < lanes(); ++lane) {
    if (lane == self_) continue;
    receive_placed(lane, own, 1, header(lane).tag + 1);
    pieces(own, 1, self_, lane, [&](const Part& part, Piece piece) {
      send_piece(own, lane, tags(finished_)[lane] + 1, part.out + piece.source * own.element,
                 piece.count * own.element);
    });
  }
  stage_ = Stage::second_round;
}

void ProcessLine::end_call() {
  for (std::size_t lane = 0; lane < lanes(); ++lane) {
    if (lane == self_) continue;
    last_[lane] = header(lane).signature;
    process_->give_back(std::move(inbox_[lane].front()));
    inbox_[lane].pop_front();
  }
  staging_ = nullptr;
  stage_ = Stage::calls;
  if (call(finished_).movement.rounds == 1) call(finished_).outputs.clear();
  ++finished_;
  if (!holds_ && !let_go()) process_->hold(*this);
}

/// A message could not be moved: nothing of this line is complete any more.
void ProcessLine::break_off(const Call& call, std::size_t lane, const Failure& failed) {
  broken_ = true;
  process_->fail(id_, call.sequence, call.signature, processes_[lane], failed);
}

/// Whether there is no more to hear of a message: the wire is done with it, or does not say.
bool ProcessLine::completed(Call& call, Message& message) {
  bool over = false;
  const Failure failed = process_->wire().test(message.ticket, over);
  if (failed.empty()) return over;
  process_->lose(memory_of(call));
  break_off(call, message.lane, failed);
  return true;
}

void ProcessLine::stop_receiving() {
  for (Message& m : receives_) (void)process_->wire().cancel(m.ticket);  // what cannot be, `test` tells
}

bool ProcessLine::still_receives() {
  std::erase_if(receives_, [&](Message& m) {
    bool over = false;
    if (!process_->wire().test(m.ticket, over).empty()) {
      process_->lose(memory_of(call(finished_)));
      return true;
    }
    if (over) return true;
    if (!process_->gone(processes_[m.lane], id_.group.run)) return false;
    process_->abandon(
        {.core = core_, .receives = {m.ticket}, .sends = {}, .keep = memory_of(call(finished_))});
    return true;
  });
  return !receives_.empty();
}

bool ProcessLine::received() {
  std::erase_if(receives_, [&](Message& m) { return completed(call(finished_), m); });
  return receives_.empty() && !broken_;
}

/// Whether the peers have read what this rank sends for `call`; one that has left reads nothing more.
bool ProcessLine::sent(Call& call) {
  std::erase_if(call.sends, [&](Message& m) {
    if (completed(call, m)) return true;
    if (!process_->deaf(processes_[m.lane], id_.group.run)) return false;
    process_->abandon({.core = core_, .receives = {}, .sends = {leave(m)}, .keep = memory_of(call)});
    return true;
  });
  return call.sends.empty() && !broken_;
}

bool ProcessLine::idle() {
  step();
  bool all = finished_ == posted();
  for (Call& c : calls_) all = sent(c) && all;
  return all;
}

// ---- waiting ----

void ProcessLine::wait(std::uint64_t sequence) {
  // In two rounds peers read the outputs too.
  until(
      [&] {
        return finished_ > sequence &&
               (sequence + depth < posted_ || call(sequence).movement.rounds == 1 || sent(call(sequence)));
      },
      [&] { return sequence; });
  reach(sequence);
  process_->let_go();
}

void ProcessLine::wait_inputs(std::uint64_t sequence) {
  until([&] { return finished_ > sequence && (sequence + depth < posted_ || sent(call(sequence))); },
        [&] { return sequence; });
  if (route_ && route_->way() == DeviceRoute::Way::network) route_->follow(sequence);
  if (sequence + depth >= posted_) release(call(sequence));
  process_->let_go();
}

bool ProcessLine::done(std::uint64_t sequence) {
  step_all();
  const bool over = finished_ > sequence && (sequence + depth < posted_ ||
                                             call(sequence).movement.rounds == 1 || sent(call(sequence)));
  if (over) reach(sequence);
  return over;
}

bool ProcessLine::inputs_done(std::uint64_t sequence) {
  step_all();
  return finished_ > sequence && (sequence + depth < posted_ || sent(call(sequence)));
}

/// The peers of another line may wait there for this rank's part before they come to this one.
void ProcessLine::step_all() {
  throw_if_failed();
  process_->progress();
  step();
  process_->step_others(this);
}

void ProcessLine::throw_if_failed() {
  if (core_->reported && !core_->fault) process_->press(*core_);
  if (core_->fault) {
    if (route_) look_at_device();
    process_->raise(*core_->fault, *core_);
  }
  process_->throw_if_deaf();
}

/// Waits for `ready`, which depends on the end of call `first()`.
template <class Ready, class First>
void ProcessLine::until(const Ready& ready, const First& first) {
  const Circles::Wait wait(process_->circles(), [&] { return need(first()); });
  Patience patience(process_->spins());
  for (;;) {
    const bool moved = process_->progress();
    if (step() || moved) patience.reset();
    if (ready()) return;
    throw_if_failed();
    if (patience.spinning() && patience.looks() % 64 != 63) {
      patience.pause();
    } else if (process_->step_others(this)) {
      patience.reset();
    } else {
      look_for_the_missing();
      process_->circles().ask();
      patience.pause();
    }
  }
}

/// The post without which call `sequence` cannot end: the first one that the oldest unfinished call lacks.
std::optional<Need> ProcessLine::need(std::uint64_t sequence) const {
  if (core_->fault || core_->reported || stage_ != Stage::calls) return {};
  if (finished_ > sequence || finished_ == posted_) return {};
  for (std::size_t lane = 0; lane < lanes(); ++lane)
    if (lane != self_ && inbox_[lane].empty())
      return Need{processes_[lane], id_,
                  finished_,        core_.get(),
                  place(finished_), calls_[finished_ % depth].signature};
  return {};
}

/// The lanes of peers that have left and can no longer give what the oldest unfinished call needs.
std::vector<std::size_t> ProcessLine::missing() {
  std::vector<std::size_t> found;
  if (finished_ == posted_) return found;
  const std::uint32_t run = id_.group.run;
  for (std::size_t lane = 0; lane < lanes(); ++lane)
    if (lane != self_ && stage_ == Stage::calls && inbox_[lane].empty() &&
        process_->gone(processes_[lane], run))
      found.push_back(lane);
  const bool between_devices =
      stage_ == Stage::connecting || stage_ == Stage::exchanging || stage_ == Stage::spreading;
  for (std::size_t lane = 0; lane < lanes() && between_devices; ++lane) {
    const std::optional<Gone> gone = lane != self_ ? process_->gone(processes_[lane], run) : std::nullopt;
    if (gone && (gone->how != Departure::left || network_failure_)) found.push_back(lane);
  }
  for (const Message& m : receives_) {
    const std::optional<Gone> gone = process_->gone(processes_[m.lane], run);
    if (gone && gone->how != Departure::left) found.push_back(m.lane);
  }
  return found;
}

void ProcessLine::look_for_the_missing() {
  if (core_->fault || core_->reported) return;
  const std::vector<std::size_t> found = missing();
  if (found.empty()) return;
  const auto gone = [&](std::size_t lane) { return *process_->gone(processes_[lane], id_.group.run); };
  // Who left of itself, rather than because of a fault that it had heard of, knows most.
  const auto cause = std::ranges::find_if(found, [&](std::size_t lane) { return gone(lane).blames.empty(); });
  const std::size_t lane = cause == found.end() ? found[0] : *cause;
  const Gone how = gone(lane);
  std::optional<Signature> last = last_[lane];
  if (!inbox_[lane].empty()) last = header(lane).signature;
  const auto missed =
      std::ranges::count_if(found, [&](std::size_t other) { return gone(other).blames.empty(); });
  process_->fail(*core_, departed(place(finished_), {rank_of(lane), how.how, how.parting, how.blames, last},
                                  {rank_of(self_), &call(finished_).signature}, posts().size(),
                                  static_cast<std::size_t>(missed)));
}

}  // namespace sherd::processes
