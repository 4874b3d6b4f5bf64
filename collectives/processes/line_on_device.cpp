// The calls of a `ProcessLine` whose tensors lie on a device.
#include <cstring>

#include "collectives/processes/line.h"
#include "runtime/backend.h"

namespace sherd::processes {
namespace {

/// How long the end of a peer, by which the connections among devices end too, may take to be heard of.
constexpr std::chrono::seconds news_time{1};

}  // namespace

void ProcessLine::use_device(Device device) {
  if (!route_) route_.emplace(device, self_);
  check<DeviceError>(
      route_->way() != DeviceRoute::Way::network || route_->device() == device,
      "group {}, channel {}: its processes are connected by {}, and this call's tensors are on "
      "{}; use another group for another device",
      core_->name, id_.channel, route_->device(), device);
}

/// Before the call is known to peers.
void ProcessLine::post_on_device(Call& call) {
  const bool may_combine =
      route_->way() != DeviceRoute::Way::host && call.movement.combines(0) && !network_sums(call);
  std::int64_t bytes = 0;
  for (std::size_t lane = 0; lane < lanes() && may_combine; ++lane)
    if (lane != self_) bytes += bytes_between(call, 0, lane, self_);
  if (bytes > 0) call.peers_parts = Storage::allocate(call.device, static_cast<std::size_t>(bytes));
  route_->posted(call.sequence, call.device);
}

/// All ranks have posted the call.
void ProcessLine::begin_on_device(Call& call) try {
  if (route_->way() == DeviceRoute::Way::unknown) {
    std::vector<NetworkCard> cards(lanes());
    for (std::size_t lane = 0; lane < lanes(); ++lane)
      if (lane == self_)
        cards[lane] = route_->card();
      else if (header(lane).bytes == sizeof(NetworkCard))
        std::memcpy(&cards[lane], inbox_[lane].front().payload(), sizeof(NetworkCard));
    route_->choose(cards);
    if (route_->way() == DeviceRoute::Way::network) process_->go_on_while_waiting();
  }
  if (route_->way() == DeviceRoute::Way::network) {
    use_device(call.device);
    stage_ = Stage::connecting;
    return;
  }
  bring_to_host(call);
  for (std::size_t lane = 0; lane < lanes(); ++lane)
    if (lane != self_) send_pieces(lane, call);
  begin_first_round();
} catch (const std::exception& e) {
  fail_on_device(e.what());
}

/// The host's memory takes the place of the device's.
void ProcessLine::bring_to_host(Call& call) {
  route_->follow_post(call.sequence, call.device);
  for (std::size_t i = 0; i < call.parts.size(); ++i) {
    if (const OnDevice& in = call.device_inputs[i]; in.storage) {
      const Ref<Storage> host = Storage::allocate(Device::cpu(), in.bytes);
      backend(call.device.type).copy(host->data(), Device::cpu(), in.data, call.device, in.bytes);
      call.parts[i].in = static_cast<const std::byte*>(host->data());
      call.inputs.push_back(host);
    }
    if (const OnDevice& out = call.device_outputs[i]; out.storage) {
      const Ref<Storage> host = Storage::allocate(Device::cpu(), out.bytes);
      call.parts[i].out = static_cast<std::byte*>(host->data());
      call.outputs.push_back(host);
      call.landings.push_back({out, host});
    }
  }
  call.device_inputs.clear();
  call.device_outputs.clear();
  call.peers_parts = nullptr;
}

/// Moves to their devices what finished calls before `end` have put on the host, in the order of the calls.
/// Not when they finish, which is found at any time: after it the rank's work so far follows no more.
void ProcessLine::land(std::uint64_t end) {
  for (; landed_ < end; ++landed_) {
    Call& own = call(landed_);
    for (const Landing& l : own.landings) {
      const Device there = l.to.storage->device();
      backend(there.type).copy(l.to.data, there, l.host->data(), Device::cpu(), l.to.bytes);
    }
    own.landings.clear();
  }
}

/// What the rank computes from now on finds the outputs of call `sequence` and of those before.
void ProcessLine::reach(std::uint64_t sequence) {
  land(sequence + 1);
  const bool over = sequence + depth < posted_;
  if (!route_ || route_->way() != DeviceRoute::Way::network || (!over && call(sequence).device.is_cpu()))
    return;
  // What the network is given it moves in order: the oldest call that is still known came later than one that
  // is over, whose own moment is by now that of a call which may be just under way.
  if (over && finished_ > posted_ - depth && !call(posted_ - depth).device.is_cpu())
    sequence = posted_ - depth;
  route_->follow(sequence);
}

/// Goes on with the oldest unfinished call; says whether anything happened.
bool ProcessLine::step_on_device(Call& call) try {
  if (network_failure_ || !route_->network().ready()) return false;
  const bool first = stage_ == Stage::exchanging;
  if (stage_ == Stage::connecting) {
    route_->begin(call.sequence);
    given_ = call.signature;
    exchange(call, 0);
    stage_ = Stage::exchanging;
    return true;
  }
  const bool summed = network_sums(call);
  if (first && !summed && call.movement.combines(0)) combine_on_device(call);
  if (first && !summed && call.movement.rounds == 2) {
    exchange(call, 1);
    stage_ = Stage::spreading;
    return true;
  }
  route_->end(call.sequence);
  end_call();
  return true;
} catch (const std::exception& e) {
  network_failure_ = {e.what(), std::chrono::steady_clock::now()};
  return false;
}

void ProcessLine::exchange(Call& call, int round) {
  if (call.signature.kind == CollectiveKind::all_gather) return gather(call);
  if (round == 0 && network_sums(call)) return sum(call);
  const bool combines = call.movement.combines(round);
  std::vector<NetworkMessage> messages;
  auto* at = call.peers_parts ? static_cast<std::byte*>(call.peers_parts->data()) : nullptr;
  std::vector<PeerCopy> own;
  for (std::size_t lane = 0; lane < lanes(); ++lane) {
    const auto peer = static_cast<int>(lane);
    if (lane != self_)
      pieces(call, round, self_, lane, [&](const Part& part, Piece piece) {
        // Only read; peers' `receive` has the other type.
        auto* from = const_cast<std::byte*>(round == 0 ? part.in : part.out) + piece.source * call.element;
        messages.push_back(
            {NetworkMessage::Way::send, peer, from, static_cast<std::size_t>(piece.count * call.element)});
      });
    if (combines) from_lane_[lane] = at;
    if (lane == self_ && (combines || round > 0)) continue;
    pieces(call, round, lane, self_, [&](const Part& part, Piece piece) {
      const auto bytes = static_cast<std::size_t>(piece.count * call.element);
      std::byte* to = combines ? at : part.out + piece.destination * call.element;
      if (combines) at += bytes;
      const std::byte* from = part.in + piece.source * call.element;
      if (lane != self_)
        messages.push_back({NetworkMessage::Way::receive, peer, to, bytes});
      else if (to != from)
        own.push_back({to, from, call.device, bytes});
    });
  }
  if (!own.empty()) route_->network().queue().copy(own);
  if (!messages.empty()) route_->network().exchange(messages);
}

void ProcessLine::gather(Call& call) {
  std::vector<NetworkGather> gathers;
  for (const Part& part : call.parts)
    if (part.count > 0)
      gathers.push_back({part.in, part.out, static_cast<std::size_t>(part.count * call.element)});
  if (!gathers.empty()) route_->network().gather(gathers);
}

bool ProcessLine::network_sums(const Call& call) {
  return route_->way() == DeviceRoute::Way::network && call.movement.combines(0) &&
         route_->network().sums(call.signature.dtype, call.reduction);
}

void ProcessLine::sum(Call& call) {
  std::vector<NetworkSum> sums;
  for (const Part& part : call.parts)
    if (part.count > 0) sums.push_back({part.in, part.out, part.count});
  const bool slices = call.signature.kind == CollectiveKind::reduce_scatter;
  if (!sums.empty())
    route_->network().sum(call.signature.dtype, call.reduction,
                          slices ? NetworkShare::slice : NetworkShare::whole, sums);
}

void ProcessLine::combine_on_device(Call& call) {
  std::vector<std::vector<const std::byte*>> sources;
  std::vector<PeerCombination> combinations;
  sources.reserve(call.parts.size());
  pieces(call, 0, self_, self_, [&](const Part& part, Piece piece) {
    std::vector<const std::byte*>& from = sources.emplace_back(lanes());
    for (std::size_t lane = 0; lane < lanes(); ++lane) {
      if (lane == self_) from_lane_[lane] = part.in + piece.source * call.element;
      from[lane] = from_lane_[lane];
      from_lane_[lane] += piece.count * call.element;  // pieces of one rank are alike on all lanes
    }
    combinations.push_back({from, part.out + piece.destination * call.element, piece.count});
  });
  if (!combinations.empty())
    route_->network().queue().combine(call.signature.dtype, call.reduction, combinations);
}

/// This rank is the one to blame: its device, or its connections while all peers are there.
void ProcessLine::fail_on_device(std::string_view what) {
  process_->fail(*core_, device_failed(place(finished_), {core_->rank, &call(finished_).signature}, what));
}

/// Ends on the device what can never complete.
void ProcessLine::look_at_device() {
  if (route_->way() != DeviceRoute::Way::network) return;
  if (core_->reported && !core_->fault) process_->press(*core_);
  if (core_->fault) return route_->network().abort();
  if (core_->reported) return;
  if (network_failure_ && std::chrono::steady_clock::now() - network_failure_->second > news_time)
    return fail_on_device(network_failure_->first);
  for (std::size_t lane = 0; lane < lanes(); ++lane) {
    if (lane == self_) continue;
    const std::optional<Gone> gone = process_->gone(processes_[lane], id_.group.run);
    if (!gone) continue;
    if (!route_->given().waits_too_long()) continue;
    return process_->fail(*core_,
                          departed(place(*route_->given().oldest()),
                                   {rank_of(lane), gone->how, gone->parting, gone->blames, last_[lane]},
                                   {rank_of(self_), &given_}, lanes(), 1));
  }
}

/// The memory of a call that the hosts are done with.
void ProcessLine::release_on_device(Call& call) {
  std::vector<Ref<Storage>> storages;
  for (std::vector<OnDevice>* tensors : {&call.device_inputs, &call.device_outputs}) {
    for (OnDevice& t : *tensors)
      if (t.storage) storages.push_back(std::move(t.storage));
    tensors->clear();
  }
  if (call.peers_parts) storages.push_back(std::exchange(call.peers_parts, nullptr));
  route_->release(storages, [&] { storages.clear(); });
}

/// The device may wait for this rank's other work, so nobody waits for it here: the process keeps the network
/// until the device is through with it, and memory goes in the device's order.
void ProcessLine::leave_device() {
  const bool given = stage_ == Stage::exchanging || stage_ == Stage::spreading;
  if (process_->forked()) return route_->forsake();
  if (core_->fault || stage_ != Stage::calls) route_->network().abort();
  if (given) route_->end(call(finished_).sequence);
  for (Call& c : calls_)
    if (!c.device.is_cpu()) release_on_device(c);
  process_->retire({route_->leave(), std::move(route_->given()), core_, processes_});
}

}  // namespace sherd::processes
