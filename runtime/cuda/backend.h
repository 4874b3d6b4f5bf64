// CUDA as a back end: memory from the driver's pool, one stream for each rank and device, kernels in the
// table.
#pragma once

#include "runtime/backend.h"

namespace sherd {

/// The back end of `cuda:i`. DeviceError without a GPU or a driver. The work of a rank runs in order on the
/// rank's own stream; before another rank's thread uses a tensor, the one that used it calls `synchronize`.
Backend& cuda_backend();

/// Waits for the calling rank's work on the GPUs that it used, if any.
void cuda_synchronize();

/// GPUs that this process can use; 0 without a driver.
SHERD_API int cuda_device_count() noexcept;

}  // namespace sherd
