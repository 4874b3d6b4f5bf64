// Copies from global to shared memory that go on while a thread computes. A thread that reads only what it
// copied itself needs no barrier.
#pragma once

namespace sherd::cuda {

/// 4, 8 or 16 bytes at addresses that their number divides.
template <int Bytes = 16>
__device__ void copy_async(void* shared, const void* from) {
  const auto to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  if constexpr (Bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(Bytes) : "memory");
}
/// What this thread copied since the last call belongs together.
__device__ inline void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits for this thread's groups but the `Later` newest.
template <int Later>
__device__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Later) : "memory");
}

}  // namespace sherd::cuda
