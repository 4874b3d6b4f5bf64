// Turning CUDA's error codes into exceptions.
#pragma once

#include <cuda_runtime_api.h>

#include "runtime/error.h"

namespace sherd::cuda {

/// DeviceError, whose message opens with `what`, unless `status` is success; OutOfMemoryError where it is
/// that.
inline void check_cuda(cudaError_t status, std::string_view what) {
  if (status == cudaSuccess) [[likely]]
    return;
  cudaGetLastError();  // clears the error, which the next launch would report again
  if (status == cudaErrorMemoryAllocation)
    fail<OutOfMemoryError>(
        "{}: the GPU or its driver has no memory left; use smaller batches or free tensors", what);
  fail<DeviceError>(
      "{}: CUDA says {} ({}); an error inside a kernel shows at a later call, CUDA_LAUNCH_BLOCKING=1 finds "
      "it",
      what, cudaGetErrorName(status), cudaGetErrorString(status));
}

/// Whether that is done which `status` was asked about. Forgets a "not ready", for which the next launch would
/// be blamed.
inline bool is_done(cudaError_t status, std::string_view what) {
  if (status == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  check_cuda(status, what);
  return true;
}

}  // namespace sherd::cuda
