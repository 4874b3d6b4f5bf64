#include "collectives/threads/on_device.h"

#include "runtime/backend.h"
#include "runtime/context.h"

namespace sherd::threads {

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
  check<StateError>(n < most, "collectives: a rank's calls on {} would be on more than {} devices",
                    to_string(device), most);
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

}  // namespace sherd::threads
