#include "collectives/threads/transport.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <numeric>

#include "collectives/combine.h"
#include "collectives/threads/exchange.h"
#include "runtime/backend.h"
#include "runtime/context.h"
#include "runtime/pause.h"

namespace sherd::threads {
namespace {

class ThreadLine;

/// The lines of the calling rank. While one of them waits, all are advanced, so that a rank may wait in
/// another order than its peers.
struct Lines {
  std::vector<ThreadLine*> all;
  /// Those with calls that are over and whose memory a peer was still reading.
  std::vector<ThreadLine*> holding;
  /// Lines with calls under way whose group has no handle any more: the peers still get what was posted.
  std::vector<std::shared_ptr<ThreadLine>> left_behind;

  static std::shared_ptr<Lines> current();
  /// Advances all lines but `except`; says whether anything happened.
  bool step(const ThreadLine* except = nullptr);
  /// Frees the memory of calls that are over, on any line, as far as the peers have read it. Every call of
  /// the rank does, so that what is held does not grow with the number of lines.
  void let_go();
  /// Returns when all queued calls are posted.
  void post_queued();
};

class ThreadLine final : public Line {
 public:
  struct Place {
    int channel, source, destination;
  };
  ThreadLine(Core& core, Lines& lines, int rank, Place place)
      : core_(core),
        rank_(rank),
        place_(place),
        exchange_(core.exchange(place.channel, place.source, place.destination)),
        self_(static_cast<std::size_t>(place.source < 0       ? rank
                                       : rank == place.source ? 0
                                                              : 1)),
        mine_(exchange_.lanes[self_]),
        seat_(core.seat_of(rank)),
        lines_(lines) {
    for (std::size_t lane = 0; lane < exchange_.lanes.size(); ++lane) bells_.push_back(&seat_of(lane).bell);
    sources_.resize(exchange_.lanes.size());
    lines_.all.push_back(this);
  }
  ~ThreadLine() override {
    if (core_.fault() != nullptr) forget();
    std::erase(lines_.all, this);
    std::erase(lines_.holding, this);
  }

  std::uint64_t post(const Collective& c, const Signature& signature, WhenFull full) override {
    throw_if_failed();
    if (full == WhenFull::queue && !(queue_.empty() && room())) {
      queue_.emplace_back(c, signature);
    } else {
      if (posted_ >= depth) until([&] { return queue_.empty() && room(); }, posted_ - depth);
      publish(c, signature);
    }
    lines_.let_go();
    mine_.promised.store(posted(), std::memory_order_relaxed);  // read under the mutex that a sleeper takes
    return posted() - 1;
  }
  void wait(std::uint64_t sequence) override {
    until([&] { return complete(sequence); }, sequence);
    follow(sequence, is_over(sequence) || mine_.slot(sequence).movement.rounds == 2);
    lines_.let_go();
  }
  void wait_inputs(std::uint64_t sequence) override {
    until([&] { return inputs_free(sequence); }, sequence);
    follow(sequence, true);
    lines_.let_go();
  }
  bool done(std::uint64_t sequence) override {
    throw_if_failed();
    step_all();
    return complete(sequence);
  }
  bool inputs_done(std::uint64_t sequence) override {
    throw_if_failed();
    step_all();
    return complete(sequence) && inputs_free(sequence);
  }
  std::uint64_t posted() const override { return posted_ + queue_.size(); }
  /// Whether it has calls that are not over, or memory that a peer reads.
  bool under_way() const { return (finished_ < posted() || holds_) && core_.fault() == nullptr; }
  bool has_queued() const { return !queue_.empty() && core_.fault() == nullptr; }
  /// Returns when the queued calls are posted. CollectiveError.
  void post_queued() {
    while (has_queued()) {
      const std::size_t queued = queue_.size();
      until([&] { return queue_.size() < queued; }, posted_ - depth);
    }
  }
  /// Keeps the group's core alive for this line alone, when the last handle on the group has gone.
  void outlive(std::shared_ptr<Core> core) { owned_core_ = std::move(core); }

  /// Advances calls as far as the peers allow; says whether anything happened. Never waits and never throws:
  /// an error becomes the group's fault.
  bool step() {
    bool moved = false;
    do {
      for (; !queue_.empty() && room() && core_.fault() == nullptr; queue_.pop_front(), moved = true)
        publish(queue_.front().first, queue_.front().second);
      while (finished_ < posted_ && round_ready()) {
        if (!move_round()) return moved;
        moved = true;
      }
    } while (!queue_.empty() && room() && core_.fault() == nullptr);
    return moved;
  }
  /// Frees the memory of calls that neither this rank nor a peer needs; says whether none is held any more.
  bool let_go() {
    released_ = std::max(released_, posted_ - std::min(posted_, depth));  // slots before are others' by now
    for (; released_ < finished_ && inputs_free(released_); ++released_) release(mine_.slot(released_));
    holds_ = released_ < finished_;
    return !holds_;
  }

 private:
  Slot& slot(std::size_t lane, std::uint64_t sequence) { return exchange_.lanes[lane].slot(sequence); }
  Seat& seat_of(std::size_t lane) { return core_.crew().seat(core_.seat_of(rank_of(lane))); }
  int rank_of(std::size_t lane) const {
    return place_.source < 0 ? static_cast<int>(lane) : lane == 0 ? place_.source : place_.destination;
  }
  CallPlace place(std::uint64_t sequence) const {
    return {core_.name(), core_.seats(), place_.channel, place_.source, place_.destination, sequence};
  }
  void ring() {
    for (std::size_t lane = 0; lane < bells_.size(); ++lane)
      if (lane != self_) bells_[lane]->ring();
  }

  // ---- posting ----

  bool room() { return posted_ < depth || slot_is_free(posted_ - depth); }
  void publish(const Collective& c, const Signature& signature) {
    fill(mine_.slot(posted_), c, signature);
    mine_.posted.store(++posted_, std::memory_order_seq_cst);
    ring();
  }
  void fill(Slot& slot, const Collective& c, const Signature& signature) {
    release(slot);
    slot.signature = signature;
    slot.reduction = c.reduction;
    slot.parts.clear();
    slot.on_device = lane_of(c);
    slot.eager = slot.on_device == nullptr && input_bytes(c) <= eager_bytes;
    const std::size_t segments = std::max(c.inputs.size(), c.outputs.size());
    for (std::size_t i = 0; i < segments; ++i) slot.parts.push_back(part_of(c, i, slot));
    if (slot.eager) take_along(slot, c);
    const bool slices = c.kind == CollectiveKind::all_reduce && !slot.eager;
    slot.movement = Movement::of(c, static_cast<int>(bells_.size()), slices ? 2 : 1);
    if (slot.on_device) slot.on_device->queue.mark_work(*slot.on_device->of(posted_).ready);
  }
  static void clear(Slot& slot) {
    slot.inputs.clear();
    slot.outputs.clear();
  }
  /// The memory of a call that is over for the hosts.
  void release(Slot& slot) {
    if (slot.on_device == nullptr || slot.inputs.empty() + slot.outputs.empty() == 2) return clear(slot);
    const auto lends = [&](const auto& storages) {
      return lend(exchange_.moments, std::span(storages.begin(), storages.size()));
    };
    const bool inputs = lends(slot.inputs), outputs = lends(slot.outputs);
    if (!inputs && !outputs) return clear(slot);
    free_after_moves(*exchange_.moments, slot.on_device->device, [&] { clear(slot); });
  }
  /// After a fault peers begin to read nothing more: what slots hold is given back with the line, though
  /// others may keep the group, and on this rank's own thread, which knows what its devices still do with it.
  void forget() noexcept {
    try {
      drain_own();
      for (Slot& slot : mine_.slots) release(slot);
    } catch (const std::exception&) {  // a device has failed too; what is left goes with the group
    }
  }
  /// Null for what the host moves, or has nothing to move of.
  DeviceLane* lane_of(const Collective& c) {
    if (c.inputs.empty() && c.outputs.empty()) return nullptr;
    const Device device = (c.inputs.empty() ? c.outputs : c.inputs)[0].device();
    if (device.is_cpu() || device.type == DeviceType::meta) return nullptr;
    uses_devices_ = true;
    return &exchange_.moments->lane(self_).on(device, *backend(device.type).peer_queue(device));
  }
  static Part part_of(const Collective& c, std::size_t i, Slot& slot) {
    Part part;
    part.count = counted(c)[i].numel();
    const auto address = [&](const Tensor& t, InlineVec<Ref<Storage>, 4>* keep) {
      if (keep != nullptr) keep->push_back(t.storage_ref());
      return t.device().type == DeviceType::meta || t.numel() == 0 ? nullptr : t.raw();
    };
    if (!c.inputs.empty()) part.in = address(c.inputs[i], slot.eager ? nullptr : &slot.inputs);
    if (!c.outputs.empty()) part.out = address(c.outputs[i], &slot.outputs);
    return part;
  }
  static std::int64_t input_bytes(const Collective& c) {
    std::int64_t bytes = 0;
    for (const Tensor& t : c.inputs) bytes += t.numel() * size_of(t.dtype());
    return bytes;
  }
  static void take_along(Slot& slot, const Collective& c) {
    std::byte* at = slot.inline_bytes.data();
    for (std::size_t i = 0; i < c.inputs.size(); ++i) {
      const std::int64_t bytes = c.inputs[i].numel() * size_of(c.inputs[i].dtype());
      if (slot.parts[i].in == nullptr) continue;
      std::memcpy(at, slot.parts[i].in, static_cast<std::size_t>(bytes));
      slot.parts[i].in = at;
      at += bytes;
    }
  }

  // ---- moving ----

  /// Whether all peers have come as far as the next round of the oldest unfinished call needs.
  bool round_ready() {
    for (std::size_t lane = 0; lane < exchange_.lanes.size(); ++lane) {
      if (lane == self_) continue;
      Lane& peer = exchange_.lanes[lane];
      if (round_ == 0) {
        if (peer.posted.load(std::memory_order_seq_cst) <= finished_) return false;
        if (!agrees(lane)) return false;
      } else if (peer.moved.load(std::memory_order_seq_cst) < 2 * finished_ + 1) {
        return false;
      }
    }
    return true;
  }
  bool agrees(std::size_t lane) {
    const Signature& own = mine_.slot(finished_).signature;
    const Signature& other = slot(lane, finished_).signature;
    if (own.digest == other.digest) return true;
    fail_for_mismatch();
    return false;
  }
  void fail_for_mismatch() {
    std::vector<RankCall> posts;
    for (std::size_t lane = 0; lane < exchange_.lanes.size(); ++lane)
      if (has_posted(lane, finished_)) posts.push_back({rank_of(lane), &slot(lane, finished_).signature});
    core_.fail(mismatch(place(finished_), posts));
  }
  /// False when the group failed before anything was read.
  bool move_round() {
    Slot& own = mine_.slot(finished_);
    if (!own.parts.empty()) {
      mine_.reading.store(true, std::memory_order_seq_cst);
      // Read after `reading` is set; `drain` reads `reading` after the fault is set. So one sees the other.
      const bool failed = core_.fault() != nullptr || !move_parts(own);
      mine_.reading.store(false, std::memory_order_seq_cst);
      if (failed) return false;
    }
    mine_.moved.store(2 * finished_ + static_cast<std::uint64_t>(++round_), std::memory_order_seq_cst);
    if (round_ == own.movement.rounds) {
      if (round_ == 1 && own.on_device == nullptr) own.outputs.clear();
      round_ = 0;
      mine_.finished.store(++finished_, std::memory_order_seq_cst);
      if (!own.eager && !std::exchange(holds_, true)) lines_.holding.push_back(this);
    }
    ring();
    return true;
  }
  /// What this rank takes in this round, by the host or by its device; false when the device has failed.
  bool move_parts(const Slot& own) {
    if (own.on_device != nullptr) return move_on_device(own);
    const DType dtype = own.signature.dtype;
    each_piece(
        own,
        [&](std::span<const std::byte* const> sources, std::byte* out, std::int64_t count) {
          combine(dtype, own.reduction, sources, out, count);
        },
        [](std::size_t, std::byte* out, const std::byte* from, std::int64_t bytes) {
          copy_bytes(out, from, bytes);
        });
    return true;
  }
  /// `combine(sources, out, count)` where this round reduces, else `copy(lane, out, from, bytes)`.
  template <class Combine, class Copy>
  void each_piece(const Slot& own, const Combine& combine, const Copy& copy) {
    const Movement& movement = own.movement;
    const std::int64_t element = size_of(own.signature.dtype);
    const int self = static_cast<int>(self_), size = static_cast<int>(exchange_.lanes.size());
    for (std::size_t i = 0; i < own.parts.size(); ++i) {
      const auto& [in, out, n] = own.parts[i];
      if (out == nullptr) continue;
      if (movement.combines(round_)) {
        const Piece piece = movement.piece(round_, self, self, n);
        for (int from = 0; from < size; ++from)
          sources_[static_cast<std::size_t>(from)] = source(from, i) + piece.source * element;
        combine(std::span<const std::byte* const>(sources_), out + piece.destination * element, piece.count);
        continue;
      }
      // Each rank begins with another peer, so that no two read one peer's memory at a time.
      for (int turn = 1; turn <= size; ++turn) {
        const int from = (self + turn) % size;
        const Piece piece = movement.piece(round_, from, self, n);
        if (piece.count == 0) continue;
        const auto lane = static_cast<std::size_t>(from);
        const std::byte* begin = round_ == 0 ? source(from, i) : slot(lane, finished_).parts[i].out;
        copy(lane, out + piece.destination * element, begin + piece.source * element, piece.count * element);
      }
    }
  }
  /// After the moments until which the tensors of all ranks are other work's.
  bool move_on_device(const Slot& own) try {
    PeerQueue& queue = own.on_device->queue;
    CallMoments& moments = own.on_device->of(finished_);
    for (std::size_t lane = 0; lane < exchange_.lanes.size(); ++lane) {
      DeviceLane& there = *slot(lane, finished_).on_device;
      CallMoments& theirs = there.of(finished_);
      queue.reach(there.device);
      queue.follow(round_ == 0 ? *theirs.ready : *theirs.moved[0]);
    }
    std::vector<PeerCopy> copies;
    std::vector<std::vector<const std::byte*>> sources;
    std::vector<PeerCombination> combinations;
    std::vector<Device> devices;
    for (std::size_t lane = 0; lane < exchange_.lanes.size(); ++lane)
      devices.push_back(slot(lane, finished_).on_device->device);
    sources.reserve(own.parts.size());
    each_piece(
        own,
        [&](std::span<const std::byte* const> from, std::byte* out, std::int64_t count) {
          sources.emplace_back(from.begin(), from.end());
          combinations.push_back({sources.back(), out, count});
        },
        [&](std::size_t lane, std::byte* out, const std::byte* from, std::int64_t bytes) {
          if (out != from) copies.push_back({out, from, devices[lane], static_cast<std::size_t>(bytes)});
        });
    if (!copies.empty()) queue.copy(copies);
    if (!combinations.empty()) queue.combine(own.signature.dtype, own.reduction, combinations, devices);
    DeviceEvent& moved = *moments.moved[static_cast<std::size_t>(round_)];
    queue.mark(moved);
    own.on_device->latest.store(&moved, std::memory_order_seq_cst);
    return true;
  } catch (const std::exception& e) {
    core_.fail(device_failed(place(finished_), {rank_, &own.signature}, e.what()));
    return false;
  }
  /// Whether the slot of call `sequence` may be another call's by now.
  bool is_over(std::uint64_t sequence) const { return sequence + depth < posted_; }
  /// What this rank computes from now on follows what it moved of call `sequence`, and `all`: what peers did.
  void follow(std::uint64_t sequence, bool all) {
    if (!uses_devices_) return;
    if (is_over(sequence)) {
      // What a device moves it moves in order: the oldest call that is still known came later than this one.
      // The latest is one too, but may be just under way.
      sequence = posted_ - depth;
      all = true;
      if (mine_.slot(sequence).on_device == nullptr || !slot_is_free(sequence) ||
          !exchange_.moments->one_device_each()) {
        exchange_.moments->lane(self_).each([&](DeviceLane& mine) {
          exchange_.moments->each_latest([&](DeviceEvent& latest) { mine.queue.work_follows(latest); });
        });
        return;
      }
    }
    const Slot& own = mine_.slot(sequence);
    if (own.on_device == nullptr) return;
    const auto last = static_cast<std::size_t>(own.movement.rounds - 1);
    for (std::size_t lane = 0; lane < exchange_.lanes.size(); ++lane) {
      if (lane != self_ && !all) continue;
      exchange_.moments->lane(lane).each(
          [&](DeviceLane& theirs) { own.on_device->queue.work_follows(*theirs.of(sequence).moved[last]); });
    }
  }
  const std::byte* source(int lane, std::size_t i) {
    return slot(static_cast<std::size_t>(lane), finished_).parts[i].in;
  }

  // ---- waiting ----

  bool gone(std::size_t lane) {
    return seat_of(lane).presence.load(std::memory_order_seq_cst) != Presence::here;
  }
  /// Whether all peers are done with this rank's slot; one that has left reads nothing more.
  bool peers_finished(std::uint64_t sequence) {
    for (std::size_t lane = 0; lane < exchange_.lanes.size(); ++lane)
      if (lane != self_ && exchange_.lanes[lane].finished.load(std::memory_order_seq_cst) <= sequence &&
          !gone(lane))
        return false;
    return true;
  }
  /// Peers may have finished a call before this rank: its own part counts too.
  bool slot_is_free(std::uint64_t sequence) { return finished_ > sequence && peers_finished(sequence); }
  bool inputs_free(std::uint64_t sequence) {
    return sequence < posted_ && (is_over(sequence) || mine_.slot(sequence).eager || slot_is_free(sequence));
  }
  /// Whether outputs hold their values and are free: in two rounds peers read them too.
  bool complete(std::uint64_t sequence) {
    if (finished_ <= sequence) return false;
    const bool shared = !is_over(sequence) && mine_.slot(sequence).movement.rounds == 2;
    return !shared || peers_finished(sequence);
  }

  void throw_if_failed() {
    const Fault* fault = core_.fault();
    if (fault == nullptr) return;
    drain();
    core_.crew().seat(seat_).heard = *fault;
    fault->raise(core_.seats());
  }
  /// Waits until no peer reads memory of this group: one that begins later sees the fault first. Takes as
  /// long as a copy.
  void drain() {
    for (ThreadLine* line : lines_.all)
      if (&line->core_ == &core_) line->drain_own();
  }
  void drain_own() {
    for (Lane& lane : exchange_.lanes)
      while (&lane != &mine_ && lane.reading.load(std::memory_order_seq_cst)) pause_briefly();
    if (uses_devices_) exchange_.moments->wait();
  }

  /// Waits for `ready`, which depends on call `sequence` of this line. Spins briefly, then sleeps.
  template <class Ready>
  void until(const Ready& ready, std::uint64_t sequence) {
    step();
    for (int spins = 0; !ready(); ++spins) {
      throw_if_failed();
      if (step()) {
        spins = 0;
      } else if (spins < core_.crew().spins()) {
        pause_briefly();
        if (spins % 64 == 63) step_others();
      } else if (!step_others()) {
        look_for_a_mismatch();
        look_for_the_missing(sequence);
        sleep(ready, sequence);
      }
    }
  }
  bool step_others() { return lines_.step(this); }
  /// The peers of another line may wait there for this rank's part before they come to this one.
  void step_all() {
    step();
    step_others();
  }
  template <class Ready>
  void sleep(const Ready& ready, std::uint64_t sequence) {
    if (core_.fault() != nullptr) return;
    const std::optional<Need> need = need_of(sequence);
    if (need) core_.crew().begin_wait(seat_, *need);
    // Returns if the need was met meanwhile: the next call states the new need, by which circles are found.
    core_.crew().seat(seat_).bell.sleep_unless([&] {
      return core_.fault() != nullptr || step() || step_others() || ready() || someone_left(sequence) ||
             (need && need->over());
    });
    if (need) core_.crew().end_wait(seat_);
  }
  bool has_posted(std::size_t lane, std::uint64_t sequence) {
    return exchange_.lanes[lane].posted.load(std::memory_order_seq_cst) > sequence;
  }
  bool has_moved(std::size_t lane, std::uint64_t sequence) {
    return exchange_.lanes[lane].moved.load(std::memory_order_seq_cst) > 2 * sequence;
  }
  /// The lanes of ranks that have left and can no longer give what the oldest unfinished call needs.
  std::vector<std::size_t> missing(std::uint64_t sequence) {
    std::vector<std::size_t> lanes;
    if (finished_ > sequence || finished_ == posted_) return lanes;
    for (std::size_t lane = 0; lane < exchange_.lanes.size(); ++lane) {
      // Presence is read first; then all that a rank posted before it left is visible.
      if (lane == self_ || !gone(lane)) continue;
      if (round_ == 0 ? !has_posted(lane, finished_) : !has_moved(lane, finished_)) lanes.push_back(lane);
    }
    return lanes;
  }
  bool someone_left(std::uint64_t sequence) { return !missing(sequence).empty(); }
  /// Compares the posts that are there, though some ranks may still be missing.
  void look_for_a_mismatch() {
    if (round_ > 0 || finished_ == posted_) return;
    for (std::size_t lane = 0; lane < exchange_.lanes.size(); ++lane)
      if (lane != self_ && has_posted(lane, finished_) && !agrees(lane)) return;
  }
  void look_for_the_missing(std::uint64_t sequence) {
    const std::vector<std::size_t> lanes = missing(sequence);
    if (lanes.empty()) return;
    // Who left of itself, rather than because of a fault that it had heard of, knows most.
    const auto cause =
        std::ranges::find_if(lanes, [&](std::size_t lane) { return !seat_of(lane).heard.has_value(); });
    const std::size_t lane = cause == lanes.end() ? lanes[0] : *cause;
    const Seat& seat = seat_of(lane);
    const bool threw = seat.presence.load(std::memory_order_seq_cst) == Presence::threw;
    const std::uint64_t calls = exchange_.lanes[lane].posted.load(std::memory_order_seq_cst);
    std::optional<Signature> last;
    if (calls > 0) last = slot(lane, calls - 1).signature;
    std::size_t made = 0, missed = 0;
    for (std::size_t l = 0; l < exchange_.lanes.size(); ++l) made += has_posted(l, finished_);
    for (std::size_t l : lanes) missed += !seat_of(l).heard.has_value();
    const Leaver leaver{rank_of(lane), threw ? Departure::threw : Departure::left, seat.parting,
                        seat.heard ? std::span<const int>(seat.heard->ranks) : std::span<const int>(), last};
    core_.fail(departed(place(finished_), leaver, {rank_, &mine_.slot(finished_).signature}, made, missed));
  }
  std::optional<Need> need_of(std::uint64_t sequence) {
    const std::uint64_t at = std::min(sequence, finished_);
    if (at >= posted_) return {};  // it is queued: peers have come, and need only go on
    for (std::size_t lane = 0; lane < exchange_.lanes.size(); ++lane)
      if (lane != self_ && !has_posted(lane, at))
        return Need{core_.seat_of(rank_of(lane)),
                    &exchange_.lanes[lane].posted,
                    &exchange_.lanes[lane].promised,
                    at,
                    &core_,
                    place(at),
                    mine_.slot(at).signature};
    return {};
  }

  std::shared_ptr<Core> owned_core_;  // only of a line that was left behind
  Core& core_;
  int rank_;
  Place place_;
  Exchange& exchange_;
  std::size_t self_;
  Lane& mine_;
  int seat_;
  Lines& lines_;  // alive as long as the transport, or the owner of a line that was left behind
  std::vector<Bell*> bells_;
  std::vector<const std::byte*> sources_;
  std::uint64_t posted_ = 0, finished_ = 0, released_ = 0;  // released: calls whose memory is freed
  bool holds_ = false;                                      // it is one of `Lines::holding`
  int round_ = 0;
  bool uses_devices_ = false;
  std::deque<std::pair<Collective, Signature>> queue_;  // numbered on from `posted_`
};

/// Shared with the transports, so that it lives as long as they do.
std::shared_ptr<Lines> Lines::current() {
  struct Slot {
    std::shared_ptr<Lines> lines = std::make_shared<Lines>();
  };
  return Context::current().slot<Slot>().lines;
}

bool Lines::step(const ThreadLine* except) {
  bool moved = false;
  for (ThreadLine* line : all)
    if (line != except) moved = line->step() || moved;
  let_go();
  if (!left_behind.empty()) {
    const auto over = std::ranges::stable_partition(left_behind, &ThreadLine::under_way);
    const std::vector<std::shared_ptr<ThreadLine>> gone(over.begin(), over.end());
    left_behind.erase(over.begin(), over.end());
  }
  return moved;
}

void Lines::let_go() {
  std::erase_if(holding, [](ThreadLine* line) { return line->let_go(); });
}

void Lines::post_queued() {
  for (;;) {
    const auto waiting = std::ranges::find_if(all, &ThreadLine::has_queued);
    if (waiting == all.end()) return;
    const std::vector<std::shared_ptr<ThreadLine>> kept(left_behind);  // or one may end within its own wait
    (*waiting)->post_queued();
  }
}

class ThreadTransport final : public Transport {
 public:
  ThreadTransport(std::shared_ptr<Core> core, int rank)
      : core_(std::move(core)), lines_(Lines::current()), rank_(rank) {}
  ~ThreadTransport() override {
    core_->meetings().leave(rank_);
    for (auto& line : channels_) leave_behind(std::move(line));
    for (auto& [place, line] : messages_) leave_behind(std::move(line));
  }
  int rank() const override { return rank_; }
  int size() const override { return core_->size(); }
  const GroupKey& key() const override { return core_->key(); }

  bool reaches(Device device) const override {
    return Transport::reaches(device) || backend(device.type).peer_queue(device) != nullptr;
  }
  Line& channel(int index) override {
    std::unique_ptr<ThreadLine>& line = channels_[static_cast<std::size_t>(index)];
    if (!line) line = make_line({index, -1, -1});
    return *line;
  }
  Line& messages(int index, int source, int destination) override {
    std::unique_ptr<ThreadLine>& line = messages_[{index, source, destination}];
    if (!line) line = make_line({index, source, destination});
    return *line;
  }

  Offer offer(std::span<const int> members, const std::string& name) override {
    if (members.empty() || members[0] != rank_) return {};
    const auto made = std::make_shared<Core>(core_->crew_ref(), seats_of(members), name);
    return {core_->offer(made), made->key()};
  }
  std::unique_ptr<Transport> join(std::span<const int> members, std::span<const Offer> offers,
                                  const std::string& name) override {
    std::shared_ptr<Core> core = core_->accept(offers[static_cast<std::size_t>(members[0])].number);
    if (!core || core->seats() != seats_of(members)) refuse_to_join(name);
    const auto place = std::ranges::find(members, rank_) - members.begin();
    return make_end(std::move(core), static_cast<int>(place));
  }

  std::unique_ptr<Transport> renew() override {
    Core::Renewal& renewal = core_->renewal();
    const auto ready = [&] { return renewal.ready.load(std::memory_order_seq_cst); };
    ask(renewal);
    std::optional<Fault>& heard = core_->crew().seat(core_->seat_of(rank_)).heard;
    core_->fail(renewing(core_->name(), core_->seats(), rank_, heard ? &*heard : nullptr));
    core_->ring_all();
    while (!ready()) {
      if (const Fault* fault = renewal.fault.load(std::memory_order_seq_cst)) {
        heard = *fault;
        fault->raise(core_->seats());
      }
      if (const std::vector<int> gone = gone_ranks(); !gone.empty() && !ready()) raise_gone(gone);
      sleep_until_asked(renewal, ready);
    }
    auto renewed = std::make_unique<ThreadTransport>(take(renewal), rank_);
    renewed->renewed_ = true;
    return renewed;
  }
  bool failed() const override { return core_->fault() != nullptr; }

  void step() override {
    while (lines_->step()) {
    }
  }
  MeetingBoard* meetings() override { return &core_->meetings(); }
  void give_up(const Signature& signature, int channel, std::string_view why) noexcept override {
    const ThreadLine* line = channels_[static_cast<std::size_t>(channel)].get();
    const std::uint64_t calls = line != nullptr ? line->posted() : 0;
    core_->fail(device_failed({core_->name(), core_->seats(), channel, -1, -1, calls > 0 ? calls - 1 : 0},
                              {rank_, &signature}, why));
  }

 private:
  std::unique_ptr<ThreadLine> make_line(ThreadLine::Place place) {
    if (renewed_) core_->crew().seat(core_->seat_of(rank_)).heard.reset();  // this rank goes on
    return std::make_unique<ThreadLine>(*core_, *lines_, rank_, place);
  }
  std::vector<int> seats_of(std::span<const int> ranks) const {
    std::vector<int> seats;
    for (int rank : ranks) seats.push_back(core_->seat_of(rank));
    return seats;
  }
  void leave_behind(std::unique_ptr<ThreadLine> line) {
    if (!line || !line->under_way()) return;
    line->outlive(core_);
    lines_->left_behind.push_back(std::move(line));
  }
  void ask(Core::Renewal& renewal) {
    const std::scoped_lock lock(renewal.mutex);
    renewal.asked[static_cast<std::size_t>(rank_)].store(1, std::memory_order_seq_cst);
    if (!std::ranges::all_of(renewal.asked, [](const auto& asked) { return asked.load() > 0; })) return;
    renewal.next = std::make_shared<Core>(core_->crew_ref(), core_->seats(), core_->name());
    renewal.ready.store(true, std::memory_order_seq_cst);
  }
  /// The last rank to take it leaves none: a group that somebody keeps would keep all that it became.
  std::shared_ptr<Core> take(Core::Renewal& renewal) {
    const std::scoped_lock lock(renewal.mutex);
    return ++renewal.taken == renewal.asked.size() ? std::move(renewal.next) : renewal.next;
  }
  template <class Ready>
  void sleep_until_asked(Core::Renewal& renewal, const Ready& ready) {
    const auto late =
        std::ranges::find_if(renewal.asked, [](const auto& asked) { return asked.load() == 0; });
    if (late == renewal.asked.end()) return;  // the last rank is just asking
    const int seat = core_->seat_of(rank_);
    core_->crew().begin_wait(seat, {core_->seat_of(static_cast<int>(late - renewal.asked.begin())),
                                    &*late,
                                    &*late,
                                    0,
                                    core_.get(),
                                    {core_->name(), core_->seats()},
                                    {},
                                    true});
    // Peers may need this rank's part of other calls before they can renew.
    core_->crew().seat(seat).bell.sleep_unless([&] {
      return lines_->step() || ready() || renewal.fault.load() != nullptr || late->load() > 0 ||
             !gone_ranks().empty();
    });
    core_->crew().end_wait(seat);
  }
  std::vector<int> gone_ranks() {
    std::vector<int> gone;
    for (int rank = 0; rank < core_->size(); ++rank)
      if (core_->crew().seat(core_->seat_of(rank)).presence.load(std::memory_order_seq_cst) != Presence::here)
        gone.push_back(rank);
    return gone;
  }
  /// Throws, naming all ranks that have left: some left only because they could not renew.
  [[noreturn]] void raise_gone(const std::vector<int>& gone) {
    std::string names;
    for (int rank : gone) names += fmt::format("{}rank {} is gone", names.empty() ? "" : ", ", rank);
    throw CollectiveError(
        fmt::format("renew of group {}: {}; only groups of the others can go on", core_->name(), names), gone,
        0);
  }

  std::shared_ptr<Core> core_;
  std::shared_ptr<Lines> lines_;
  int rank_;
  bool renewed_ = false;
  std::array<std::unique_ptr<ThreadLine>, max_channels> channels_;
  std::map<std::array<int, 3>, std::unique_ptr<ThreadLine>> messages_;
};

}  // namespace

std::shared_ptr<Core> make_world(std::shared_ptr<Crew> crew) {
  std::vector<int> seats(static_cast<std::size_t>(crew->size()));
  std::iota(seats.begin(), seats.end(), 0);
  return std::make_shared<Core>(std::move(crew), std::move(seats), "world");
}

void post_queued() { Lines::current()->post_queued(); }

std::unique_ptr<Transport> make_end(std::shared_ptr<Core> core, int rank) {
  return std::make_unique<ThreadTransport>(std::move(core), rank);
}

}  // namespace sherd::threads
