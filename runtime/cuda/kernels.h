// Declarations for both device code and host code of this folder. Safe to include in device code: a `.cu`
// file defines kernels; everything that looks into a tensor is in a `.cpp` file.
#pragma once

#include <cuda_runtime_api.h>

#include "runtime/forward.h"
#include "runtime/kernel.h"

namespace sherd::cuda {

/// Operands of one call as device code takes them: broadcast to one shape, dimensions merged. Operand 0 is
/// the output.
struct Operands {
  static constexpr int most_operands = 6, most_dims = 8;
  DType dtype = DType::f32;      ///< of the last input
  DType out_dtype = DType::f32;  ///< of the output
  cudaStream_t stream = nullptr;
  std::int64_t numel = 0;
  int rank = 0;
  bool dense = false;       ///< every operand contiguous, and aligned for wide loads
  bool dense_rows = false;  ///< of one or two dimensions, and every operand's rows are so, or one element,
                            ///< wherever they lie
  std::int64_t sizes[most_dims];
  std::int64_t strides[most_operands][most_dims];  // in elements; 0 where broadcast
  void* data[most_operands];
};
/// Of an elementwise call; the output takes the order of the inputs where channels lie last (image_order.h).
SHERD_API Operands operands_of(Inputs in, Outputs out);
/// The same for `body(data, operands)`; images that lie in the other order than the output are brought into
/// it first where that takes less than reading them across.
SHERD_API void with_operands(Inputs in, Outputs out, void (*body)(const void* data, const Operands& operands),
                             const void* data);
template <class F>
void with_operands(Inputs in, Outputs out, const F& body) {
  with_operands(in, out, [](const void* f, const Operands& p) { (*static_cast<const F*>(f))(p); }, &body);
}

/// DeviceError, whose message opens with `op`, when the launch before was refused.
SHERD_API void check_launch(std::string_view op);

inline constexpr int threads_per_block = 256;
inline constexpr std::int64_t most_blocks_of_grid = (std::int64_t{1} << 31) - 1;  // of its first axis
/// Number of blocks for `work` threads, at most several times what fills the largest GPU: kernels loop over
/// the rest.
inline unsigned blocks_for(std::int64_t work) {
  const std::int64_t blocks = (work + threads_per_block - 1) / threads_per_block;
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks < 4096 ? blocks : 4096);
}

/// Blocks for `n` of something, `each` of which are a block's.
constexpr std::int64_t blocks_of(std::int64_t n, std::int64_t each) { return (n + each - 1) / each; }
/// `blocks` as the grid of a kernel that does not loop over the rest; NotImplementedError, and nothing is
/// launched, where a launch has no room for as many.
SHERD_API unsigned grid_of(std::int64_t blocks);
/// The same for a kernel that loops with the grid's stride.
inline unsigned looping_grid_of(std::int64_t blocks) {
  return static_cast<unsigned>(blocks < most_blocks_of_grid ? blocks : most_blocks_of_grid);
}

/// What the current device has of something, as its multiprocessors or the shared memory of a block.
int attribute_of_device(cudaDeviceAttr which);
/// Bytes of shared memory that a block may have if its kernel asks for them.
inline int most_shared_memory() { return attribute_of_device(cudaDevAttrMaxSharedMemoryPerBlockOptin); }

/// Whether every GPU here can make a kernel ready before the one before it has ended, and
/// CUDA_LAUNCH_BLOCKING=1 does not ask for launches one by one.
SHERD_API bool launches_early();

/// Adds the kernels of every file of this folder that has some; its build file lists them.
void add_kernels();

}  // namespace sherd::cuda
