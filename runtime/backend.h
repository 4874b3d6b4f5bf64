// What a device type offers the runtime. CPU and CUDA each implement it in a folder of their own.
#pragma once

#include <cstddef>
#include <span>
#include <typeindex>

#include "runtime/device.h"

namespace sherd {

class Tensor;
using Inputs = std::span<const Tensor>;
using Outputs = std::span<Tensor>;
/// Runs the op at `op` (of the type it was registered for) on inputs and outputs of this device.
using Kernel = void (*)(const void* op, Inputs in, Outputs out);

class Backend {
 public:
  virtual ~Backend() = default;
  /// At least `bytes` of uninitialised memory, 64-byte aligned; throws OutOfMemoryError.
  virtual void* allocate(Device device, std::size_t bytes) = 0;
  virtual void deallocate(Device device, void* data, std::size_t bytes) noexcept = 0;
  /// Copies bytes where either side may be this device's or the host's memory; ordered after earlier work of
  /// this rank.
  virtual void copy(void* to, Device to_device, const void* from, Device from_device, std::size_t bytes) = 0;
  /// The kernel for ops of this type, or null.
  virtual Kernel kernel(std::type_index op) const = 0;
  /// Waits until all work of this rank on the device is done.
  virtual void synchronize(Device device) = 0;
};

/// The backend of a device type that holds data; throws DeviceError when this build or machine has none.
SHERD_API Backend& backend(DeviceType type);

}  // namespace sherd
