// Where a pick lies.
#pragma once

#include "runtime/cuda/picking.h"

namespace sherd::cuda {

struct PickPlace {
  std::int64_t x = 0, index = 0, value = 0;
};

/// Of pick `i`; `N` is unsigned and holds all numbers of picks, since division in 64 bits is slow.
template <class N>
__device__ PickPlace place_of(const PickWalk& w, N i) {
  PickPlace p;
  for (int a = 0; a < w.axes; ++a) {
    const N size = static_cast<N>(w.size[a]), next = a + 1 < w.axes ? i / size : 0;
    const auto at = static_cast<std::int64_t>(i - next * size);
    p.x += at * w.x_step[a];
    p.index += at * w.index_step[a];
    p.value += at * w.value_step[a];
    i = next;
  }
  return p;
}

/// Calls `f.operator()<N>()` with the type for numbers of `count` picks, which a grid's stride may pass.
template <class F>
void for_numbers_of(std::int64_t count, F&& f) {
  if (count < std::int64_t{1} << 31)
    f.template operator()<std::uint32_t>();
  else
    f.template operator()<std::uint64_t>();
}

}  // namespace sherd::cuda
