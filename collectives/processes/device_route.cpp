#include "collectives/processes/device_route.h"

#include <algorithm>
#include <utility>

#include "runtime/backend.h"

namespace sherd::processes {
namespace {

/// Whether one network can join the devices of these ranks.
bool reach_each_other(std::span<const NetworkCard> cards) {
  for (std::size_t i = 0; i < cards.size(); ++i) {
    if (!cards[i].reaches) return false;
    const auto same = [&](const NetworkCard& other) { return other.device == cards[i].device; };
    if (!cards[i].shares && std::ranges::any_of(cards.subspan(i + 1), same)) return false;
  }
  return true;
}

}  // namespace

void GivenCalls::begin(PeerQueue& queue, std::uint64_t sequence) {
  oldest();  // forgets those that are over
  Given& given = calls_.emplace_back(sequence, queue.make_event(), queue.make_event());
  queue.mark(*given.begun);
}

void GivenCalls::end(PeerQueue& queue) {
  queue.mark(*calls_.back().moved);
  calls_.back().ended = true;
}

std::optional<std::uint64_t> GivenCalls::oldest() {
  while (!calls_.empty() && calls_.front().ended && calls_.front().moved->reached()) calls_.pop_front();
  if (calls_.empty()) return {};
  return calls_.front().sequence;
}

bool GivenCalls::waits_too_long() {
  constexpr std::chrono::milliseconds grace{500};
  if (!oldest() || !calls_.front().begun->reached()) return false;
  const auto now = std::chrono::steady_clock::now();
  std::optional<std::chrono::steady_clock::time_point>& since = calls_.front().waits_since;
  if (!since) since = now;
  return now - *since > grace;
}

DeviceRoute::DeviceRoute(Device device, std::size_t self)
    : device_(device), self_(self), offer_(backend(device.type).network_offer(device, self == 0)) {}

PeerQueue& DeviceRoute::own() const { return *backend(device_.type).peer_queue(device_); }

void DeviceRoute::choose(std::span<const NetworkCard> cards) {
  way_ = reach_each_other(cards) ? Way::network : Way::host;
  NetworkOffer own = std::exchange(offer_, {});
  if (way_ == Way::host) return;
  NetworkCard first = cards[0];
  first.sums = std::ranges::all_of(cards, &NetworkCard::sums);
  network_ = backend(device_.type)
                 .connect(device_, std::move(own), first, static_cast<int>(self_),
                          static_cast<int>(cards.size()));
}

void DeviceRoute::posted(std::uint64_t sequence, Device device) {
  if (PeerQueue* queue = backend(device.type).peer_queue(device))  // else nothing runs beside anything else
    queue->mark_work(*moments_->lane(0).on(device, *queue).of(sequence).ready);
}

void DeviceRoute::follow_post(std::uint64_t sequence, Device device) {
  if (PeerQueue* queue = backend(device.type).peer_queue(device))
    queue->work_follows(*moments_->lane(0).on(device, *queue).of(sequence).ready);
}

void DeviceRoute::begin(std::uint64_t sequence) {
  network_->queue().follow(*moments().of(sequence).ready);
  given_.begin(network_->queue(), sequence);
}

void DeviceRoute::end(std::uint64_t sequence) {
  DeviceLane& lane = moments();
  DeviceEvent& moved = *lane.of(sequence).moved[0];
  network_->queue().mark(moved);
  given_.end(network_->queue());
  lane.latest.store(&moved, std::memory_order_seq_cst);
}

void DeviceRoute::release(std::span<const Ref<Storage>> storages, const std::function<void()>& drop) const {
  if (lend(moments_, storages))
    free_after_moves(*moments_, device_, drop);
  else
    drop();
}

}  // namespace sherd::processes
