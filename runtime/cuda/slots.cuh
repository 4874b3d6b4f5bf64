// How blocks share what a launch works on: a chunk of one slot each.
#pragma once

#include "runtime/cuda/launch.cuh"
#include "runtime/cuda/slots.h"

namespace sherd::cuda {

/// The slot that a block works on, and which of its elements.
struct Chunk {
  int slot;
  std::int64_t begin, end;

  template <class Slot, int most>
  __device__ explicit Chunk(const Slots<Slot, most>& slots) {
    int low = 0, high = slots.count;  // the last slot that begins at or before this block
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (slots.first_chunk[middle] <= blockIdx.x ? low : high) = middle;
    }
    slot = low;
    begin = (blockIdx.x - slots.first_chunk[low]) * slots.chunk;
    end = min(begin + slots.chunk, slots.slot[low].n);
  }
  /// Calls `body.operator()<V>(i)` for V elements from i on: `width` at a time where `wide`.
  template <int width, class F>
  __device__ void for_each(bool wide, const F& body) const {
    std::int64_t i = begin;
    if (wide) {
      for (i += width * static_cast<std::int64_t>(threadIdx.x); i + width <= end;
           i += width * threads_per_block)
        body.template operator()<width>(i);
      i = begin + (end - begin) / width * width;
    }
    for (i += threadIdx.x; i < end; i += threads_per_block) body.template operator()<1>(i);
  }
};

}  // namespace sherd::cuda
