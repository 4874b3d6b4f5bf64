// Kernels that the device makes ready while the one before them in the stream still runs: in a chain of small
// ones that is most of their time.
#pragma once

#include <type_traits>

#include "runtime/cuda/kernels.h"

namespace sherd::cuda {

/// The first line of a kernel that `launch_early` launches: waits until all that was before it in the stream
/// is done, then lets the next one be made ready.
__device__ inline void wait_for_earlier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// kernel<<<grid, block, 0, stream>>>(arguments...), early where the device can (compute capability 9). By
/// the CUDA runtime of whoever compiles it, which alone knows the kernel.
template <class... P>
void launch_early(void (*kernel)(P...), dim3 grid, dim3 block, cudaStream_t stream,
                  const std::type_identity_t<P>&... arguments) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = launches_early() ? 1 : 0;
  void* all[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel),
                      all);  // check_launch() says how it went
}

}  // namespace sherd::cuda
