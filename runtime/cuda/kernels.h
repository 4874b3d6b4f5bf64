// What device code and host code of this folder share. Safe to include in device code: a `.cu` file defines
// kernels and adds them to the table; everything that looks into a tensor is in a `.cpp` file.
#pragma once

#include <cuda_runtime_api.h>

#include <typeindex>
#include <unordered_map>

#include "runtime/backend.h"
#include "runtime/forward.h"

namespace sherd::cuda {

/// Which kernel runs which type of op.
class KernelTable {
 public:
  template <class O>
  void add(Kernel kernel) {
    kernels_[typeid(O)] = kernel;
  }
  Kernel find(std::type_index op) const {
    const auto found = kernels_.find(op);
    return found == kernels_.end() ? nullptr : found->second;
  }

 private:
  std::unordered_map<std::type_index, Kernel> kernels_;
};

/// Operands of one call as device code takes them: broadcast to one shape, dimensions merged. Operand 0 is
/// the output.
struct Plan {
  static constexpr int most_operands = 6, most_dims = 8;
  DType dtype = DType::f32;  ///< of the last input
  cudaStream_t stream = nullptr;
  std::int64_t numel = 0;
  int rank = 0;
  bool dense = false;  ///< every operand contiguous, and aligned for wide loads
  std::int64_t sizes[most_dims];
  std::int64_t strides[most_operands][most_dims];  // in elements; 0 where broadcast
  void* data[most_operands];
};
Plan plan(Inputs in, Outputs out);

/// Throws DeviceError named after `op` when the launch before was refused.
void check_launch(std::string_view op);

inline constexpr int threads_per_block = 256;
/// Blocks for `work` threads; kernels loop, so there are never more than fill the largest GPU several times.
inline unsigned blocks_for(std::int64_t work) {
  const std::int64_t blocks = (work + threads_per_block - 1) / threads_per_block;
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks < 4096 ? blocks : 4096);
}

// One of each `.cu` or `.cpp` file with kernels.
void add_unary_kernels(KernelTable& table);
void add_unary_grad_kernels(KernelTable& table);
void add_binary_kernels(KernelTable& table);
void add_binary_grad_kernels(KernelTable& table);
void add_comparison_kernels(KernelTable& table);
void add_scalar_kernels(KernelTable& table);
void add_copy_kernels(KernelTable& table);
void add_creation_kernels(KernelTable& table);
void add_matmul_kernels(KernelTable& table);
void add_sum_kernels(KernelTable& table);
void add_optimizer_kernels(KernelTable& table);
void add_layer_norm_kernels(KernelTable& table);
void add_softmax_kernels(KernelTable& table);
void add_cross_entropy_kernels(KernelTable& table);
void add_embedding_kernels(KernelTable& table);
void add_gather_kernels(KernelTable& table);
void add_extreme_kernels(KernelTable& table);
void add_topk_kernels(KernelTable& table);
void add_multinomial_kernels(KernelTable& table);
void add_patches_kernels(KernelTable& table);
void add_batch_norm_kernels(KernelTable& table);
void add_norm_kernels(KernelTable& table);
void add_attention_kernels(KernelTable& table);

}  // namespace sherd::cuda
