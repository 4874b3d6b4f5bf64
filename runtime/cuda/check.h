// CUDA's error codes become exceptions.
#pragma once

#include <cuda_runtime_api.h>

#include "runtime/error.h"

namespace sherd::cuda {

/// Throws DeviceError, opened by `what`, unless `status` is success.
inline void check_cuda(cudaError_t status, std::string_view what) {
  if (status == cudaSuccess) [[likely]]
    return;
  cudaGetLastError();  // else the next launch would report it again
  fail<DeviceError>(
      "{}: CUDA says {} ({}); an error inside a kernel shows at a later call, CUDA_LAUNCH_BLOCKING=1 finds "
      "it",
      what, cudaGetErrorName(status), cudaGetErrorString(status));
}

}  // namespace sherd::cuda
