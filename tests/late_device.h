// A device that works later, for tests of what orders a device's work: each rank's queues on it are threads
// of their own that dawdle at random, and memory that is freed is overwritten first. Its kernels are the
// CPU's.
#pragma once

#include "runtime/device.h"

namespace sherd::test {

/// The device "late:index", registered on first use.
Device late_device(int index = 0);
/// The same as "late-network:0" and so on, which is connected with those of other processes of the machine.
Device late_network_device(int index = 0);

}  // namespace sherd::test
