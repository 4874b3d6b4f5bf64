#include "runtime/cuda/triangle.h"

#include "runtime/cuda/block.cuh"

namespace sherd::cuda {
namespace {

template <int V, class Bits>
__global__ void __launch_bounds__(threads_per_block) triangle(const TriangleCall c) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * threads_per_block;
  const bool small = c.n <= 0x7fffffff;  // division in 64 bits is slow
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x; i < c.n / V;
       i += step) {
    const std::int64_t line =
        small ? static_cast<std::uint32_t>(i * V) / static_cast<std::uint32_t>(c.columns) : i * V / c.columns;
    const std::int64_t row =
        small ? static_cast<std::uint32_t>(line) % static_cast<std::uint32_t>(c.rows) : line % c.rows;
    const std::int64_t apart = i * V - line * c.columns - row - c.offset;  // past the diagonal
    Packed<V, Bits> pack = load_pack<V>(static_cast<const Bits*>(c.x) + i * V);
#pragma unroll
    for (int j = 0; j < V; ++j)
      if (c.lower ? apart + j > 0 : apart + j < 0) pack.at[j] = 0;
    store_pack(static_cast<Bits*>(c.y) + i * V, pack);
  }
}

template <class Bits>
void launch_bits(const TriangleCall& c) {
  constexpr int V = wide_count<Bits>;
  if (wide_rows<Bits>(c.columns, static_cast<const Bits*>(c.x), static_cast<const Bits*>(c.y)))
    triangle<V, Bits><<<blocks_for(c.n / V), threads_per_block, 0, c.stream>>>(c);
  else
    triangle<1, Bits><<<blocks_for(c.n), threads_per_block, 0, c.stream>>>(c);
}

}  // namespace

void launch_triangle(const TriangleCall& c) {
  switch (c.bytes) {
    case 1:
      return launch_bits<std::uint8_t>(c);
    case 2:
      return launch_bits<std::uint16_t>(c);
    case 4:
      return launch_bits<std::uint32_t>(c);
    default:
      return launch_bits<std::uint64_t>(c);
  }
}

}  // namespace sherd::cuda
