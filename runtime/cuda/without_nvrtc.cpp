// A build without NVRTC: no region has a kernel.
#include "runtime/cuda/nvrtc.h"
#include "runtime/cuda/region_kernels.h"
#include "runtime/error.h"

namespace sherd::cuda {

bool has_nvrtc() { return false; }
std::string nvrtc_identity(const std::string&) { return {}; }
std::string compile_source(const std::string&, const std::string&) {
  fail<DeviceError>("nvrtc: Sherd was built without it");
}
std::shared_ptr<const RegionKernel> region_kernel(const std::string&, int) {
  fail<DeviceError>("nvrtc: Sherd was built without it");
}
RegionKernelCounts finish_region_kernels() { return {}; }

}  // namespace sherd::cuda
