// The CPU exchanges the number at each place, from the last one on, with that at a drawn place at or before
// it. What comes to a place is known without doing so. A number leaves place p with the next exchange that
// draws p, and goes to the place k of that exchange; there it stays until k is drawn itself, by a place
// beyond k and so earlier. So followed back from where it is taken: the number that exchange i takes from
// place p was brought by the exchange before, that of the smallest k > i that drew p, which took it from
// place k; and if there is none, it is p. Sorted by what they drew, exchanges lie beside the ones before
// them.
#include "runtime/cuda/random_order.h"

#include "runtime/cuda/sort.h"
#include "runtime/random.h"

namespace sherd::cuda {
namespace {

using Word = std::uint32_t;

/// The place that each exchange draws, and its own.
__global__ void __launch_bounds__(threads_per_block) draw_places(DeviceKey at, Word n, Pairs<Word> to) {
  const RandomKey key = at.read();
  const Word step = gridDim.x * threads_per_block;
  for (Word i = 2 * (blockIdx.x * threads_per_block + threadIdx.x); i < n; i += 2 * step) {
    const PhiloxWords words = philox(key.seed, key.offset + i / 2);
    for (Word j = 0; j < 2 && i + j < n; ++j) {
      const std::uint64_t bits = words[2 * j] | std::uint64_t{words[2 * j + 1]} << 32;
      to.keys[i + j] = static_cast<Word>(__umul64hi(bits, i + j + 1));
      to.places[i + j] = i + j;
    }
  }
}

/// before[k]: the smallest place beyond k that drew k; 0 remains where there is none.
__global__ void __launch_bounds__(threads_per_block) link(Pairs<Word> sorted, Word n, Word* before) {
  const Word step = gridDim.x * threads_per_block;
  for (Word i = blockIdx.x * threads_per_block + threadIdx.x; i < n; i += step) {
    const Word drawn = sorted.keys[i], place = sorted.places[i];
    const bool first =
        place > drawn && (i == 0 || sorted.keys[i - 1] != drawn || sorted.places[i - 1] == drawn);
    if (first) before[drawn] = place;
  }
}

__global__ void __launch_bounds__(threads_per_block)
    follow(Pairs<Word> sorted, Word n, const Word* before, std::int64_t* out) {
  const Word step = gridDim.x * threads_per_block;
  for (Word i = blockIdx.x * threads_per_block + threadIdx.x; i < n; i += step) {
    Word number = sorted.keys[i];
    if (i + 1 < n && sorted.keys[i + 1] == number) {
      number = sorted.places[i + 1];
      while (const Word next = before[number]) number = next;
    }
    out[sorted.places[i]] = number;
  }
}

std::int64_t rounded(std::int64_t bytes) { return blocks_of(bytes, 256) * 256; }

}  // namespace

std::int64_t RandomOrderCall::scratch_bytes() const {
  return 4 * rounded(n * static_cast<std::int64_t>(sizeof(Word))) +
         static_cast<std::int64_t>(sort_pairs_bytes(n));
}

void launch_random_order(const RandomOrderCall& c) {
  auto* at = static_cast<unsigned char*>(c.scratch);
  const auto list = [&] {
    auto* const from = reinterpret_cast<Word*>(at);
    at += rounded(c.n * static_cast<std::int64_t>(sizeof(Word)));
    return from;
  };
  Pairs<Word> pairs[2];
  for (Pairs<Word>& each : pairs) each = {list(), list()};
  const auto n = static_cast<Word>(c.n);
  int bits = 1;
  while (std::int64_t{1} << bits < c.n) ++bits;
  const unsigned blocks = blocks_for(c.n);
  draw_places<<<blocks_for((c.n + 1) / 2), threads_per_block, 0, c.stream>>>(c.key, n, pairs[0]);
  launch_sort_pairs(pairs, c.n, bits, at, c.stream);
  Word* const before = pairs[1].keys;
  cudaMemsetAsync(before, 0, static_cast<std::size_t>(c.n) * sizeof(Word), c.stream);
  link<<<blocks, threads_per_block, 0, c.stream>>>(pairs[0], n, before);
  follow<<<blocks, threads_per_block, 0, c.stream>>>(pairs[0], n, before, c.out);
}

}  // namespace sherd::cuda
