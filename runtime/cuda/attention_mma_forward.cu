// Attention's forward on tensor cores: tiles of queries stay, tiles of keys and values pass by (Dao, 2023).
#include "runtime/cuda/attention_mma.cuh"

namespace sherd::cuda {
namespace {

constexpr int tile = 64, key_tiles = tile / 8;  // queries or keys in shared memory; C tiles across the keys

/// 16 queries against a tile of keys.
using Scores = float[key_tiles][4];

/// The state of one warp's 16 queries.
template <class T, int Width, bool dropout>
struct WarpRows {
  const AttentionCall& c;
  const ScoreScale scale;
  const std::int64_t row;  ///< of the first query, counted over all heads
  const int first;         ///< query
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
  std::uint32_t left[Width / 16][4];  ///< the queries
  float out[Width / 8][4] = {};
  float top[2] = {lowest<float>(), lowest<float>()}, total[2] = {};

  __device__ WarpRows(const AttentionCall& call, std::int64_t row, int first)
      : c(call), scale(call.scale), row(row), first(first) {}

  __device__ int query(int h) const { return first + lane / 4 + 8 * h; }

  __device__ void hold(const TileRows<Width>& queries, int r) {
#pragma unroll
    for (int d = 0; d < Width / 16; ++d) load_left(left[d], queries, r, 16 * d);
  }

  __device__ void score(Scores& s, const TileRows<Width>& keys) const {
#pragma unroll
    for (auto& c : s)
#pragma unroll
      for (float& x : c) x = 0;
#pragma unroll
    for (int d = 0; d < Width / 16; ++d)
#pragma unroll
      for (int n = 0; n < key_tiles / 2; ++n) {
        std::uint32_t b[4];
        load_right_of_rows(b, keys, 16 * n, 16 * d);
        multiply<T>(s[2 * n], left[d], b[0], b[1]);
        multiply<T>(s[2 * n + 1], left[d], b[2], b[3]);
      }
  }

  /// What the exponent does not apply, and -inf where a query does not see a key; keys from `key` on.
  __device__ void mask(Scores& s, int key) const {
    if (scale.before != 1) for_scores(s, [&](int, int, float& x) { x *= scale.before; });
    if (key + tile > keys_seen(c, first))
      for_scores(s, [&](int h, int j, float& x) {
        if (key + j >= keys_seen(c, query(h))) x = lowest<float>();
      });
  }

  /// Takes in masked scores and the values they belong to.
  __device__ void add(Scores& s, const TileRows<Width>& values, int key) {
    weigh(s);
    if constexpr (dropout) {
#pragma unroll
      for (int n = 0; n < key_tiles; ++n) {
        const unsigned kept = kept_of_queries(c, row, key + 8 * n);
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] = kept >> e & 1 ? s[n][e] : 0.f;
      }
    }
#pragma unroll
    for (int n = 0; n < key_tiles / 2; ++n) {
      std::uint32_t p[4];
      as_left<T>(p, s[2 * n], s[2 * n + 1]);
#pragma unroll
      for (int d = 0; d < Width / 16; ++d) {
        std::uint32_t b[4];
        load_right(b, values, 16 * n, 16 * d);
        multiply<T>(out[2 * d], p, b[0], b[1]);
        multiply<T>(out[2 * d + 1], p, b[2], b[3]);
      }
    }
  }

  /// Calls `body(half, column, score)` for every score.
  template <class F>
  __device__ void for_scores(Scores& s, const F& body) const {
#pragma unroll
    for (int n = 0; n < key_tiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) body(e / 2, 8 * n + lane % 4 * 2 + e % 2, s[n][e]);
  }

  /// Scores become weights relative to the largest score so far.
  __device__ void weigh(Scores& s) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float larger = top[h];
#pragma unroll
      for (int n = 0; n < key_tiles; ++n) larger = fmaxf(larger, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
      larger = fmaxf(larger, __shfl_xor_sync(whole_warp, larger, 1));
      larger = fmaxf(larger, __shfl_xor_sync(whole_warp, larger, 2));
      const float shift = larger == lowest<float>() ? 0.f : larger * scale.inside;
      const float shrink = fast_exp2(__fmaf_rn(top[h], scale.inside, -shift));
      top[h] = larger;
      float sum = 0;
#pragma unroll
      for (int n = 0; n < key_tiles; ++n)
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; ++e) {
          s[n][e] = fast_exp2(__fmaf_rn(s[n][e], scale.inside, -shift));
          sum += s[n][e];
        }
      total[h] = __fmaf_rn(total[h], shrink, sum);
#pragma unroll
      for (int d = 0; d < Width / 8; ++d) {
        out[d][2 * h] *= shrink;
        out[d][2 * h + 1] *= shrink;
      }
    }
  }

  __device__ void write(std::uint16_t* o) {
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = total[h];
      sum += __shfl_xor_sync(whole_warp, sum, 1);
      sum += __shfl_xor_sync(whole_warp, sum, 2);
      // A row that sees nothing has the sum 0 and gives zeros; NaN stays.
      factor[h] = sum == 0 ? 0.f : c.kept / sum;
      if (lane % 4 == 0 && query(h) < c.queries)
        c.logsumexp[row + lane / 4 + 8 * h] = top[h] * (scale.inside * ln_of_2) + math::log(sum);
    }
#pragma unroll
    for (int d = 0; d < Width / 8; ++d)
      store_tile<T>(o, c.o.row, first, c.queries, 8 * d, out[d], factor[0], factor[1]);
  }
};

/// The products of the next keys' scores run beside the exponentials of these.
template <class T, int Width, bool dropout>
__global__ void __launch_bounds__(attention_threads, Width <= 64 ? 3 : 2)
    forward(const __grid_constant__ AttentionCall c, int row_tiles) {
  constexpr int R = TileRows<Width>::row;
  extern __shared__ __align__(16) std::uint16_t memory[];
  const TileRows<Width> q{memory};
  const auto keys = [&](int step) { return TileRows<Width>{memory + (1 + step % 2) * tile * R}; };
  const auto values = [&](int step) { return TileRows<Width>{memory + (3 + step % 2) * tile * R}; };
  const HeadIndex head(c, blockIdx.x / row_tiles);
  const int first = (row_tiles - 1 - static_cast<int>(blockIdx.x % row_tiles)) * tile;  // long ones first
  const int warp = static_cast<int>(threadIdx.x) / warp_size, mine = first + warp * 16;
  const int steps = (keys_seen(c, min(first + tile, c.queries) - 1) + tile - 1) / tile;
  const auto copy = [&](const TileRows<Width>& to, const HeadsAt& from, int row, int end) {
    copy_rows<tile, Width, attention_threads>(to, bits_of<T>(head, from), from.row, row, end);
  };
  const auto copy_keys = [&](int step) {
    if (step < steps) copy(keys(step), c.k, step * tile, c.keys);
  };
  const auto copy_values = [&](int step) {
    if (step < steps) copy(values(step), c.v, step * tile, c.keys);
  };
  copy(q, c.q, first, c.queries);
  copy_keys(0);
  end_copies();
  copy_keys(1);
  copy_values(0);
  end_copies();
  WarpRows<T, Width, dropout> rows(c, head.first_row(c) + mine, mine);
  wait_copies<1>();
  __syncthreads();
  if (steps > 0) {
    rows.hold(q, 16 * warp);
    Scores s, next;
    rows.score(s, keys(0));
    for (int step = 0; step + 1 < steps; ++step) {
      wait_copies<0>();
      __syncthreads();
      copy_keys(step + 2);
      copy_values(step + 1);
      end_copies();
      rows.mask(s, step * tile);
      rows.score(next, keys(step + 1));
      rows.add(s, values(step), step * tile);
#pragma unroll
      for (int n = 0; n < key_tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] = next[n][e];
    }
    wait_copies<0>();
    __syncthreads();
    rows.mask(s, (steps - 1) * tile);
    rows.add(s, values(steps - 1), (steps - 1) * tile);
  }
  wait_copies<0>();
  rows.write(head.rows<std::uint16_t>(c.o));
}

}  // namespace

void launch_attention_mma(const AttentionCall& c) {
  for_mma_form(c, [&]<class T, int Width, bool dropout>() {
    constexpr int bytes = 2 * 5 * tile * TileRows<Width>::row;
    const std::int64_t row_tiles = tiles(c.queries, tile);
    cudaFuncSetAttribute(forward<T, Width, dropout>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    forward<T, Width, dropout>
        <<<static_cast<unsigned>(c.batch * c.heads * row_tiles), attention_threads, bytes, c.stream>>>(
            c, static_cast<int>(row_tiles));
  });
}

}  // namespace sherd::cuda
