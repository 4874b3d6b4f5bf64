// Attention, as calls on plain pointers. Safe to include in device code.
#pragma once

#include "runtime/cuda/device_key.h"
#include "runtime/cuda/kernels.h"

namespace sherd::cuda {

/// A (batch, heads, rows, width) tensor by strides, in elements; the width is contiguous.
struct HeadsAt {
  void* data = nullptr;
  std::int64_t batch = 0, head = 0, row = 0;
};

enum class MaskKind : std::uint8_t { none, shows, adds };
/// A mask (batch, heads, queries, keys) by strides, in elements, 0 where it is the same for all. `shows` is
/// one byte an element, not 0 where a query sees a key; `adds` is added to the scores. The keys are
/// contiguous
/// (`key` 1), or there are two elements that stand for all (`key` 0). All strides are even and the data is
/// aligned to two elements, so that keys 2 n and 2 n + 1 are read at once, where the latter is past the last
/// too.
struct MaskAt {
  MaskKind kind = MaskKind::none;
  const void* data = nullptr;
  std::int64_t batch = 0, head = 0, row = 0;
  int key = 0;
};

/// Head h of k and v serves the heads h group, ..., h group + group - 1 of q.
/// Query i sees the keys j <= i + keys - queries when causal, else all. A row that sees none gives zeros and
/// the logsumexp -inf. Weight (row, j) is dropped where word j % 4 of the Philox counter
/// `key.offset + row ceil(keys / 4) + j / 4` is below `threshold`, row = (batch index heads + head) queries +
/// i, as on the CPU; others are multiplied by `kept`.
struct AttentionCall {
  DType dtype = DType::f32;
  std::int64_t batch = 0, heads = 0;
  int queries = 0, keys = 0, width = 0;
  float scale = 1;
  bool causal = false, dropout = false;
  std::uint32_t threshold = 0;
  float kept = 1;
  DeviceKey key;
  HeadsAt q, k, v, o;
  int group = 1;
  MaskAt mask;
  float* logsumexp =
      nullptr;            ///< dense (batch, heads, queries); of scores relative to `tops` where it is given
  float* tops = nullptr;  ///< with a mask that adds: the largest score of each row, in units of the kernel
  cudaStream_t stream = nullptr;
};

/// Gradients, in two passes: those of keys and values by tiles of keys, those of queries by tiles of queries.
/// Each tile is written by one block, so no sum depends on the order of blocks.
struct AttentionGradCall {
  AttentionCall forward;
  HeadsAt go, gq, gk, gv;
  float* delta = nullptr;  ///< room for (batch, heads, queries): the sums of o times its gradient
};

/// Of shared memory, for heads of 128 on tensor cores.
inline constexpr int gradient_bytes_on_tensor_cores = 105472;
/// Widths up to this have kernels, where a block has the shared memory that their gradient needs, else up to
/// that of narrow ones; wider heads are computed by the op's own formula.
inline constexpr int widest_head = 256, narrow_head = 64, gradient_bytes_on_plain_cores = 165888;
inline int widest_head_here() {
  return most_shared_memory() >= gradient_bytes_on_plain_cores ? widest_head : narrow_head;
}
/// On tensor cores: f16 and bf16, heads of 32, 64, 96 or, where a block has the shared memory that their
/// gradient needs, 128; all data aligned to 16 bytes and strides too.
inline bool on_tensor_cores(DType dtype, std::int64_t width) {
  const bool held = width == 32 || width == 64 || width == 96 ||
                    (width == 128 && most_shared_memory() >= gradient_bytes_on_tensor_cores);
  return size_of(dtype) == 2 && held;
}
void launch_attention_mma(const AttentionCall& call);
void launch_attention_grad_mma(const AttentionGradCall& call);
/// On plain cores: f32, any width up to `widest_head`.
void launch_attention_plain(const AttentionCall& call);
void launch_attention_grad_plain(const AttentionGradCall& call);
/// The first step of both backward kernels: fills `delta`.
void launch_attention_delta(const AttentionGradCall& call);

}  // namespace sherd::cuda
