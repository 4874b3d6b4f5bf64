// What regions whose kernels NVRTC compiles have in common.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>

#include "runtime/cuda/region_kernels.h"
#include "runtime/cuda/region_source.h"
#include "runtime/tensor.h"

namespace sherd::cuda {

/// What a region keeps. No source: its members run one by one.
struct RegionPlan {
  std::optional<RegionSource> source;
  std::shared_ptr<const RegionKernel> kernel{};

  /// Null until it is compiled, which a device that records waits for, since what is recorded stays so.
  cudaKernel_t get(Device device) const;
};
/// The plan that `kept` has, or a new one of `source`, whose kernel begins to be compiled.
std::shared_ptr<const RegionPlan> plan_of(std::atomic<std::shared_ptr<const void>>& kept, Device device,
                                          const std::function<std::optional<RegionSource>()>& source);

/// Whether a tensor lies as a source takes it to be: with those strides, from 16 bytes on.
bool lies_so(const Tensor& t, const Layout& layout);
bool is_dense_and_aligned(const Tensor& t);

/// Early where the device can (`launch_early`).
void launch_region(cudaKernel_t kernel, dim3 grid, dim3 block, cudaStream_t stream, void** arguments);

}  // namespace sherd::cuda
