// What all attention kernels share: which tile a block works on, who sees whom, which weights are dropped.
#pragma once

#include "runtime/cuda/attention.h"
#include "runtime/cuda/block.cuh"
#include "runtime/random.h"

namespace sherd::cuda {

/// One (batch, head) pair.
struct HeadIndex {
  std::int64_t index, batch, head;
  __device__ HeadIndex(const AttentionCall& c, std::int64_t at)
      : index(at), batch(at / c.heads), head(at % c.heads) {}

  /// The first of q's heads that share one of k and v, `at` in (batch, heads of k).
  __device__ static HeadIndex sharing(const AttentionCall& c, std::int64_t at) { return {c, at * c.group}; }

  template <class T>
  __device__ T* rows(const HeadsAt& x) const {
    return static_cast<T*>(x.data) + batch * x.batch + head * x.head;
  }
  /// Of k, v and their gradients.
  template <class T>
  __device__ T* shared_rows(const AttentionCall& c, const HeadsAt& x) const {
    return static_cast<T*>(x.data) + batch * x.batch + head / c.group * x.head;
  }
  /// Where the head's row in `logsumexp` and `delta` begins.
  __device__ std::int64_t first_row(const AttentionCall& c) const { return index * c.queries; }
};

/// Keys that query `i` sees.
__device__ inline int keys_seen(const AttentionCall& c, int i) {
  if (!c.causal) return c.keys;
  const int seen = i + c.keys - c.queries + 1;
  return seen < 0 ? 0 : seen < c.keys ? seen : c.keys;
}
/// The first query that sees key `j`.
__device__ inline int first_query(const AttentionCall& c, int j) {
  const int first = c.causal ? j - (c.keys - c.queries) : 0;
  return first < 0 ? 0 : first;
}

/// The mask of a head. Queries and keys past the last read the last one's.
struct HeadMask {
  const MaskAt& m;
  std::int64_t from;
  int queries, keys;
  __device__ HeadMask(const AttentionCall& c, const HeadIndex& head)
      : m(c.mask), from(head.batch * m.batch + head.head * m.head), queries(c.queries), keys(c.keys) {}

  template <class T>
  __device__ const T* row(int i) const {
    return static_cast<const T*>(m.data) + from + min(i, queries - 1) * m.row;
  }
  /// The next of the heads that share keys and values.
  __device__ void next() { from += m.head; }
  template <class T>
  __device__ T at(int i, int j) const {
    return row<T>(i)[min(j, keys - 1) * m.key];
  }
  /// Elements j and j + 1 of a row, for an even j.
  template <class Pair, class T>
  __device__ Pair pair(const T* row, int j) const {
    return *reinterpret_cast<const Pair*>(row + min(j, (keys - 1) / 2 * 2) * m.key);
  }
};

/// A number of a mask, from which kernels may take a difference and a multiple: they stay finite.
__device__ inline float bias_of(float x) {
  constexpr float least = -1.7e38f;
  return x < least && x > lowest<float>() ? least : x;
}

/// The four words of the weights (row, j) with the same j / 4; `row` counts over all heads.
__device__ inline PhiloxWords weight_words(const AttentionCall& c, std::int64_t row, int j) {
  const auto counters = static_cast<std::uint64_t>((c.keys + 3) / 4);
  const RandomKey key = c.key.read();
  return philox(key.seed,
                key.offset + static_cast<std::uint64_t>(row) * counters + static_cast<std::uint64_t>(j / 4));
}

/// words[i], without an array in memory.
__device__ inline std::uint32_t word_of(const PhiloxWords& words, int i) {
  const std::uint32_t low = i & 1 ? words[1] : words[0], high = i & 1 ? words[3] : words[2];
  return i & 2 ? high : low;
}

inline std::int64_t tiles(int n, int tile) { return (n + tile - 1) / tile; }

}  // namespace sherd::cuda
