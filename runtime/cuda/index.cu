#include "runtime/cuda/index.h"

namespace sherd::cuda {
namespace {

__global__ void __launch_bounds__(threads_per_block) find_last(const WriteRowsCall c) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * threads_per_block;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x; i < c.count;
       i += step) {
    const std::int64_t at = c.index[i];
    if (at >= 0 && at < c.rows)
      atomicMax(c.last + at, static_cast<long long>(i));
    else
      c.faults(FaultKind::write_index, at, i, c.rows);
  }
}

template <class Unit>
__global__ void __launch_bounds__(threads_per_block) write_rows(const WriteRowsCall c) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * threads_per_block,
                     units = c.row_bytes / static_cast<std::int64_t>(sizeof(Unit));
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x;
       i < c.count * units; i += step) {
    const std::int64_t row = i / units, at = c.index[row];
    if (at < 0 || at >= c.rows || c.last[at] != row) continue;
    static_cast<Unit*>(c.table)[at * units + i % units] = static_cast<const Unit*>(c.values)[i];
  }
}

template <class Unit>
bool fits(const WriteRowsCall& c) {
  const auto aligned = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p) % sizeof(Unit) == 0; };
  return c.row_bytes % static_cast<std::int64_t>(sizeof(Unit)) == 0 && aligned(c.table) && aligned(c.values);
}

}  // namespace

void launch_write_rows(const WriteRowsCall& c) {
  find_last<<<blocks_for(c.count), threads_per_block, 0, c.stream>>>(c);
  const auto write = [&]<class Unit>() {
    const auto units = c.row_bytes / static_cast<std::int64_t>(sizeof(Unit));
    write_rows<Unit><<<blocks_for(c.count * units), threads_per_block, 0, c.stream>>>(c);
  };
  if (fits<uint4>(c)) return write.template operator()<uint4>();
  if (fits<std::uint32_t>(c)) return write.template operator()<std::uint32_t>();
  write.template operator()<std::uint8_t>();
}

}  // namespace sherd::cuda
