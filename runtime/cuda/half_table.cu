#include "runtime/cuda/half_table.h"

#include "runtime/cuda/packed.cuh"

namespace sherd::cuda {
namespace {

constexpr int values = 1 << 16, table_bytes = 2 * values;
constexpr int table_threads = 1024;  // a block has a multiprocessor's memory for itself
constexpr int pack = 8, ahead = 4;   // elements, and packs of a thread on their way at a time

__global__ void __launch_bounds__(threads_per_block) list_bits(std::uint16_t* bits) {
  const unsigned i = blockIdx.x * threads_per_block + threadIdx.x;
  bits[i] = static_cast<std::uint16_t>(i);
}

__global__ void __launch_bounds__(table_threads)
    map_by_table_kernel(const std::uint16_t* table, const std::uint16_t* x, std::uint16_t* y,
                        std::int64_t n) {
  using Numbers = Packed<pack, std::uint16_t>;
  extern __shared__ uint4 memory[];
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * table_threads + threadIdx.x,
                     step = static_cast<std::int64_t>(gridDim.x) * table_threads, packs = n / pack;
  Numbers some[ahead];
  const auto fetch = [&](std::int64_t i) {
#pragma unroll
    for (int a = 0; a < ahead; ++a)
      if (i + a * step < packs) some[a] = load_pack<pack>(x + (i + a * step) * pack);
  };
  fetch(first);  // on its way while the table comes
  for (int i = static_cast<int>(threadIdx.x); i < table_bytes / 16; i += table_threads)
    memory[i] = reinterpret_cast<const uint4*>(table)[i];
  __syncthreads();
  const auto* looked_up = reinterpret_cast<const std::uint16_t*>(memory);
  for (std::int64_t i = first; i < packs; i += ahead * step) {
    if (i != first) fetch(i);
#pragma unroll
    for (int a = 0; a < ahead; ++a) {
      if (i + a * step >= packs) continue;
#pragma unroll
      for (int j = 0; j < pack; ++j) some[a].at[j] = looked_up[some[a].at[j]];
      store_pack(y + (i + a * step) * pack, some[a]);
    }
  }
  if (const std::int64_t i = packs * pack + first; i < n) y[i] = looked_up[x[i]];
}

}  // namespace

bool table_fits() { return most_shared_memory() >= table_bytes; }

void launch_list_bits(void* bits, cudaStream_t stream) {
  list_bits<<<values / threads_per_block, threads_per_block, 0, stream>>>(static_cast<std::uint16_t*>(bits));
}

void launch_map_by_table(const void* table, const void* x, void* y, std::int64_t n, cudaStream_t stream) {
  cudaFuncSetAttribute(map_by_table_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, table_bytes);
  const auto blocks = static_cast<unsigned>(attribute_of_device(cudaDevAttrMultiProcessorCount));
  map_by_table_kernel<<<blocks, table_threads, table_bytes, stream>>>(
      static_cast<const std::uint16_t*>(table), static_cast<const std::uint16_t*>(x),
      static_cast<std::uint16_t*>(y), n);
}

}  // namespace sherd::cuda
