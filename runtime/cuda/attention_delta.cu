// The sums of an attention's output times its gradient, a row each.
#include "runtime/cuda/attention.cuh"
#include "runtime/cuda/types.cuh"

namespace sherd::cuda {
namespace {

constexpr int block = threads_per_block;

/// A warp a row.
template <class T>
__global__ void __launch_bounds__(block) row_deltas(const AttentionGradCall g) {
  const AttentionCall& c = g.forward;
  const std::int64_t row =
      static_cast<std::int64_t>(blockIdx.x) * (block / warp_size) + threadIdx.x / warp_size;
  if (row >= c.batch * c.heads * c.queries) return;
  const HeadIndex head(c, row / c.queries);
  const std::int64_t i = row % c.queries;
  const T *o = head.rows<const T>(c.o) + i * c.o.row, *go = head.rows<const T>(g.go) + i * g.go.row;
  float total = 0;
  for (int d = static_cast<int>(threadIdx.x) % warp_size; d < c.width; d += warp_size)
    total = std::fma(static_cast<float>(o[d]), static_cast<float>(go[d]), total);
  total = warp_sum(total);
  if (threadIdx.x % warp_size == 0) g.delta[row] = total;
}

}  // namespace

void launch_attention_delta(const AttentionGradCall& g) {
  const std::int64_t rows = g.forward.batch * g.forward.heads * g.forward.queries;
  constexpr int warps = block / warp_size;
  for_floating(g.forward.dtype, [&]<class T>() {
    row_deltas<T><<<static_cast<unsigned>((rows + warps - 1) / warps), block, 0, g.forward.stream>>>(g);
  });
}

}  // namespace sherd::cuda
