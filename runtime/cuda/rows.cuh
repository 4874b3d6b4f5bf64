// How rows are dealt out: a warp each when they are short, else a block each; 16 bytes a load where the
// addresses allow it.
#pragma once

#include "runtime/cuda/block.cuh"

namespace sherd::cuda {

/// The row of a thread in blocks of 4 warps (Warps == 1, a row a warp) or of `Warps` (a row a block).
template <int Warps>
struct RowOfThread {
  static constexpr int groups = Warps == 1 ? 4 : 1, threads = Warps * warp_size, block = threads * groups;
  int lane = static_cast<int>(threadIdx.x) % threads;
  std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * groups + threadIdx.x / threads;
};

constexpr int most_columns_of_warp = 1024;  // longer rows have a block each

/// Calls `f.operator()<warps, V>(blocks, threads)` with the form that suits rows of `columns`.
template <class T, class F>
void with_rows(std::int64_t rows, std::int64_t columns, bool wide, F&& f) {
  const auto call = [&]<int Warps, int V>() {
    using Row = RowOfThread<Warps>;
    f.template operator()<Warps, V>(grid_of(blocks_of(rows, Row::groups)), static_cast<unsigned>(Row::block));
  };
  constexpr int V = wide_count<T>;
  if (columns <= most_columns_of_warp)
    wide ? call.template operator()<1, V>() : call.template operator()<1, 1>();
  else
    wide ? call.template operator()<8, V>() : call.template operator()<8, 1>();
}

}  // namespace sherd::cuda
