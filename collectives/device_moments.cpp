#include "collectives/device_moments.h"

#include "runtime/backend.h"
#include "runtime/context.h"
#include "runtime/inline_vec.h"

namespace sherd {

DeviceLane::DeviceLane(Device device, PeerQueue& queue) : device(device), queue(queue) {
  for (CallMoments& call : calls) {
    call.ready = queue.make_event();
    for (auto& moved : call.moved) moved = queue.make_event();
  }
}

DeviceLane& DeviceLanes::on(Device device, PeerQueue& queue) {
  const std::size_t n = count_.load(std::memory_order_relaxed);
  for (std::size_t i = 0; i < n; ++i)
    if (lanes_[i]->device == device) return *lanes_[i];
  check<StateError>(n < most, "collectives: a rank's calls on {} would be on more than {} devices", device,
                    most);
  lanes_[n] = std::make_unique<DeviceLane>(device, queue);
  count_.store(n + 1, std::memory_order_seq_cst);
  return *lanes_[n];
}

void Moments::wait() const {
  each_latest([](DeviceEvent& latest) { latest.wait(); });
}

void Moments::wait_for_all() const {
  for (const DeviceLanes& lane : lanes_)
    lane.each([](const DeviceLane& on) {
      for (const CallMoments& call : on.calls) call.ready->wait();
    });
  wait();
}

void Moments::before_free(Device device) noexcept {
  if (Context::current_or_null() == nullptr) return;  // a thread that ended has waited for its devices
  try {
    PeerQueue* queue = backend(device.type).peer_queue(device);
    each_latest([&](DeviceEvent& latest) { queue->work_follows(latest); });
  } catch (const std::exception&) {  // the device has failed, and nothing uses its memory again
  }
}

bool lend(const std::shared_ptr<Moments>& moments, std::span<const Ref<Storage>> storages) {
  bool last = false;
  for (const Ref<Storage>& storage : storages) {
    storage->lend(moments);
    last = last || storage->use_count() == 1;
  }
  return last;
}

void free_after_moves(const Moments& moments, Device device, const std::function<void()>& drop) {
  InlineVec<DeviceEvent*, 8> moved;
  moments.each_to_come([&](DeviceEvent& latest) { moved.push_back(&latest); });
  if (moved.empty()) return drop();
  // Not by the queue that moved it, which may be gone when a rank that ends comes to this.
  backend(device.type).peer_queue(device)->free_after({moved.begin(), moved.size()}, drop);
}

}  // namespace sherd
