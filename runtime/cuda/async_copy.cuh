// Copies from global to shared memory that go on while a thread computes. A thread that reads only what it
// copied itself needs no barrier.
#pragma once

namespace sherd::cuda {

/// 16 bytes at addresses that 16 divides.
__device__ inline void copy_async(void* shared, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   static_cast<unsigned>(__cvta_generic_to_shared(shared))),
               "l"(from)
               : "memory");
}
/// What this thread copied since the last call belongs together.
__device__ inline void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits for this thread's groups but the `Later` newest.
template <int Later>
__device__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Later) : "memory");
}

}  // namespace sherd::cuda
