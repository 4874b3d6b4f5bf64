// What a rank goes on with while its host waits for a device.
#pragma once

#include <thread>

#include "runtime/export.h"

namespace sherd {

/// Work of a rank for which the devices of other ranks may wait, and with them this rank's own device. Counts
/// from its construction to its end, both on the rank's thread.
class SHERD_API WaitingWork {
 public:
  WaitingWork();
  WaitingWork(const WaitingWork&) = delete;
  WaitingWork& operator=(const WaitingWork&) = delete;
  virtual ~WaitingWork();
  /// Goes as far as is possible without waiting for peers. May wait for a device, and so be called within.
  virtual void go_on() noexcept = 0;
};

/// Whether the calling rank has any. Where it has none, the host may sleep until the device is done.
SHERD_API bool works_while_waiting() noexcept;
/// Goes on with all of the calling rank's.
SHERD_API void work_while_waiting() noexcept;

/// Returns when `over()`, which asks a device.
template <class Over>
void wait_for_device(const Over& over) {
  while (!over()) {
    work_while_waiting();
    std::this_thread::yield();
  }
}

}  // namespace sherd
