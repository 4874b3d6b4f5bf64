// CUDA as a backend: memory from the driver's pool, one stream a rank and device, a table of kernels.
#pragma once

#include "runtime/backend.h"

namespace sherd {

/// The backend of `cuda:i`. Throws DeviceError where no GPU or no driver is. Work of a rank is in order on
/// the rank's own stream; a tensor that another rank's thread is to use needs `synchronize` on both sides of
/// the hand-over.
Backend& cuda_backend();

/// GPUs that this process can use; 0 without a driver.
SHERD_API int cuda_device_count() noexcept;

}  // namespace sherd
