// What launches of kernels that NVRTC compiled have in common.
#pragma once

#include <cuda_runtime_api.h>

#include "runtime/tensor.h"

namespace sherd::cuda {

/// Whether a tensor lies as a source takes it to be: with those strides, from 16 bytes on.
bool lies_so(const Tensor& t, const Layout& layout);
bool is_dense_and_aligned(const Tensor& t);

/// Early where the device can (`launch_early`).
void launch_region(cudaKernel_t kernel, dim3 grid, dim3 block, cudaStream_t stream, void** arguments);

}  // namespace sherd::cuda
