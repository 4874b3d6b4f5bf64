// Work of a device that was recorded instead of done, to be given to it again and again as one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "runtime/generator.h"

namespace sherd {

/// Work of a rank for a device, in parts that may be given to it one after the other, and what else holds.
struct WorkInParts {
  struct Part {
    std::size_t bytes;                 ///< that it uses: what uses few leaves room on the device for others
    std::vector<std::uint32_t> after;  ///< earlier parts that it must follow; others may run beside it
  };
  std::vector<Part> parts;
  std::function<void(std::uint32_t part)> give;  ///< gives a part to the device
};

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
