// Work of a device that was recorded instead of done, to be given to it again and again as one.
#pragma once

#include "runtime/generator.h"

namespace sherd {

/// Made by `Backend::record`. It reads and writes the memory that the recorded work named, at the addresses
/// of that time.
class DeviceRecording {
 public:
  virtual ~DeviceRecording() = default;
  /// Gives all of the work to the device, after this rank's earlier work there. What the recorded ops drew,
  /// they draw from `start` on now.
  virtual void run(RandomKey start) = 0;
};

}  // namespace sherd
