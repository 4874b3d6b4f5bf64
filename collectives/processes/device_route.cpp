#include "collectives/processes/device_route.h"

#include <algorithm>

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

DeviceRoute::DeviceRoute(Device device, std::size_t self)
    : device_(device), self_(self), card_(backend(device.type).network_card(device, self == 0)) {}

PeerQueue& DeviceRoute::own() const { return *backend(device_.type).peer_queue(device_); }

void DeviceRoute::choose(std::span<const NetworkCard> cards) {
  way_ = reach_each_other(cards) ? Way::network : Way::host;
  if (way_ == Way::host) return;
  network_ = backend(device_.type)
                 .connect(device_, cards[0], static_cast<int>(self_), static_cast<int>(cards.size()));
  begun_ = network_->queue().make_event();
}

void DeviceRoute::begin(std::uint64_t sequence) {
  network_->queue().follow(*moments().of(sequence).ready);
  network_->queue().mark(*begun_);
  last_ = sequence;
  waits_since_.reset();
}

void DeviceRoute::end(std::uint64_t sequence) {
  DeviceLane& lane = moments();
  DeviceEvent& moved = *lane.of(sequence).moved[0];
  network_->queue().mark(moved);
  lane.latest.store(&moved, std::memory_order_seq_cst);
}

void DeviceRoute::release(std::span<const Ref<Storage>> storages, const std::function<void()>& drop) const {
  if (lend(moments_, storages))
    free_after_moves(*moments_, device_, drop);
  else
    drop();
}

Retired DeviceRoute::leave() {
  std::unique_ptr<DeviceEvent> last = network_->queue().make_event();
  network_->queue().mark(*last);
  return {std::move(network_), std::move(begun_), std::move(last)};
}

std::optional<std::uint64_t> DeviceRoute::under_way() {
  if (!last_) return {};
  DeviceEvent* latest = moments().latest.load(std::memory_order_seq_cst);
  if (latest == moments().of(*last_).moved[0].get() && latest->reached()) last_.reset();
  return last_;
}

bool DeviceRoute::waits_too_long() {
  if (!begun_->reached()) return false;
  const auto now = std::chrono::steady_clock::now();
  if (!waits_since_) waits_since_ = now;
  return now - *waits_since_ > grace;
}

}  // namespace sherd::processes
