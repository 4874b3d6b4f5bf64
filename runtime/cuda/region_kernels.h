// Kernels of fused regions, which the process compiles once each, beside the ranks that want them.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <memory>
#include <string>

namespace sherd::cuda {

class RegionKernel {
 public:
  /// Null until it is there, and where it cannot be had.
  cudaKernel_t get() const { return kernel_.load(std::memory_order_acquire); }
  /// Until it is there, or cannot be had.
  void wait() const { over_.wait(false); }

 private:
  friend class RegionKernels;
  std::atomic<cudaKernel_t> kernel_ = nullptr;
  std::atomic<bool> over_ = false;
};

/// The kernel `region` of a source behind `region_headers`, for a device; begins to compile it.
std::shared_ptr<const RegionKernel> region_kernel(const std::string& text, int device);

/// Waits for all that were begun, and says how many there are, how many of them were compiled by this
/// process, and how many cannot be had.
struct RegionKernelCounts {
  std::size_t all = 0, compiled = 0, failed = 0;
};
RegionKernelCounts finish_region_kernels();

}  // namespace sherd::cuda
