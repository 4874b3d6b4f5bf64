// The sums of an attention's output times its gradient, a row each.
#include "runtime/cuda/attention.cuh"

namespace sherd::cuda {
namespace {

constexpr int block = threads_per_block;

constexpr int row_threads = 8;

/// Eight threads a row, `V` elements at a time.
template <class T, int V>
__global__ void __launch_bounds__(block) row_deltas(const __grid_constant__ AttentionGradCall g) {
  const AttentionCall& c = g.forward;
  const std::int64_t row =
      static_cast<std::int64_t>(blockIdx.x) * (block / row_threads) + threadIdx.x / row_threads;
  const bool inside = row < c.batch * c.heads * c.queries;
  float total = 0;
  if (inside) {
    const HeadIndex head(c, row / c.queries);
    const std::int64_t i = row % c.queries;
    const T *o = head.rows<const T>(c.o) + i * c.o.row, *go = head.rows<const T>(g.go) + i * g.go.row;
    for (int d = static_cast<int>(threadIdx.x) % row_threads * V; d < c.width; d += row_threads * V) {
      const Packed<V, T> x = load_pack<V>(o + d), y = load_pack<V>(go + d);
#pragma unroll
      for (int j = 0; j < V; ++j) total = std::fma(widen(x.at[j]), widen(y.at[j]), total);
    }
  }
  for (int step = row_threads / 2; step > 0; step /= 2) total += __shfl_xor_sync(whole_warp, total, step);
  if (inside && threadIdx.x % row_threads == 0) g.delta[row] = total;
}

template <class T, int V>
void launch(const AttentionGradCall& g) {
  const std::int64_t rows = g.forward.batch * g.forward.heads * g.forward.queries;
  constexpr int of_block = block / row_threads;
  row_deltas<T, V><<<grid_of(blocks_of(rows, of_block)), block, 0, g.forward.stream>>>(g);
}

}  // namespace

void launch_attention_delta(const AttentionGradCall& g) {
  if (g.forward.dtype == DType::bf16)
    launch<BFloat16, wide_count<BFloat16>>(g);
  else if (g.forward.dtype == DType::f16)
    launch<Half, wide_count<Half>>(g);
  else
    launch<float, 1>(g);
}

}  // namespace sherd::cuda
