// What a trial of several algorithms needs. Safe to include in device code.
#pragma once

#include "runtime/cuda/kernels.h"

namespace sherd::cuda {

/// `n` numbers between -1 and 1, in no order and always the same, of a floating dtype; for u8, 8-bit floats
/// between -2 and 2 of either format.
void launch_noise(DType dtype, void* out, std::int64_t n, cudaStream_t stream);
/// Makes `n` numbers of a floating dtype their ReLU.
void launch_relu(DType dtype, void* numbers, std::int64_t n, cudaStream_t stream);
/// Sets `differ` to 1 where two pieces of memory of an even number of bytes are not equal.
void launch_compare(const void* a, const void* b, std::size_t bytes, int* differ, cudaStream_t stream);

}  // namespace sherd::cuda
