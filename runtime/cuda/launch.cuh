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

/// kernel<<<grid, block, 0, stream>>>(arguments...), early where the device can (compute capability 9).
template <class... P>
void launch_early(void (*kernel)(P...), dim3 grid, dim3 block, cudaStream_t stream,
                  const std::type_identity_t<P>&... arguments) {
  void* all[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  launch_early(reinterpret_cast<const void*>(kernel), grid, block, stream, all);
}

}  // namespace sherd::cuda
