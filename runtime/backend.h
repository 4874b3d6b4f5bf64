// What a device type offers the runtime. CPU and CUDA each implement it in a folder of their own.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "runtime/kernel.h"

namespace sherd {

class Backend {
 public:
  virtual ~Backend() = default;
  /// At least `bytes` of uninitialised memory, 64-byte aligned; throws OutOfMemoryError.
  virtual void* allocate(Device device, std::size_t bytes) = 0;
  virtual void deallocate(Device device, void* data, std::size_t bytes) noexcept = 0;
  /// Copies bytes where either side may be this device's or the host's memory; ordered after earlier work of
  /// this rank.
  virtual void copy(void* to, Device to_device, const void* from, Device from_device, std::size_t bytes) = 0;
  /// Waits until all work of this rank on the device is done.
  virtual void synchronize(Device device) = 0;
};

/// The backend of a device type that holds data; throws DeviceError when this build or machine has none.
SHERD_API Backend& backend(DeviceType type);

/// Adds a back end of the application's own and gives the device type that its devices have: `Device{type,
/// 0}`. Its kernels are added with `add_kernel`; an op without one runs its reference. `instance` must
/// outlive every tensor on it. Throws ValueError when the name is taken or no place is left.
SHERD_API DeviceType register_backend(std::string name, Backend& instance);
/// The name that an application's back end was registered under.
std::string_view backend_name(DeviceType type);
std::optional<DeviceType> backend_type(std::string_view name);

}  // namespace sherd
