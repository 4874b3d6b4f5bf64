// Attention's forward on tensor cores: tiles of queries stay, tiles of keys and values pass by (Dao, 2023).
#include "runtime/cuda/attention_mma.cuh"

namespace sherd::cuda {
namespace {

constexpr int key_tile = 64;

/// 16-row tiles of queries that a warp holds: as many as the registers have room for, or as leave room for
/// more blocks, where heads are so narrow that copying takes longer than multiplying.
constexpr int held(int width) { return width == 64 ? 2 : 1; }
constexpr int blocks_at_once(int width) { return width == 32 ? 4 : 2; }

/// The state of one warp's rows.
template <class T, int Width>
struct WarpRows {
  static constexpr int M = held(Width), key_tiles = key_tile / 8;
  const AttentionCall& c;
  const HeadMask mask;
  const ScoreScale scale;
  const std::int64_t row;  ///< of the first query, counted over all heads
  const int first;         ///< query
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
  float out[M][Width / 8][4] = {};
  float top[M][2], total[M][2];

  __device__ WarpRows(const AttentionCall& call, const HeadIndex& head, int first)
      : c(call), mask(call, head), scale(call), row(head.first_row(call) + first), first(first) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) top[m][h] = lowest<float>(), total[m][h] = 0;
  }

  __device__ int query(int m, int h) const { return first + 16 * m + lane / 4 + 8 * h; }

  /// Takes in the keys from `key` on.
  __device__ void add(const std::uint32_t (&q)[M][Width / 16][4], const TileRows<Width>& keys,
                      const TileRows<Width>& values, int key) {
    if (key >= keys_seen(c, first + 16 * M - 1)) return;
    unsigned shown[M] = {};
    if (c.mask.kind == MaskKind::shows && !look(shown, key)) return;
    float s[M][key_tiles][4] = {};
#pragma unroll
    for (int d = 0; d < Width / 16; ++d)
#pragma unroll
      for (int n = 0; n < key_tiles / 2; ++n) {
        std::uint32_t b[4];
        load_right_of_rows(b, keys, 16 * n, 16 * d);
#pragma unroll
        for (int m = 0; m < M; ++m) {
          multiply<T>(s[m][2 * n], q[m][d], b[0], b[1]);
          multiply<T>(s[m][2 * n + 1], q[m][d], b[2], b[3]);
        }
      }
    if (scale.before != 1) for_scores(s, [&](int, int, int, float& x) { x *= scale.before; });
    if (c.mask.kind == MaskKind::shows) show(s, shown);
    if (c.mask.kind == MaskKind::adds) add_biases(s, key);
    if (key + key_tile > keys_seen(c, first))
      for_scores(s, [&](int m, int h, int j, float& x) {
        if (key + j >= keys_seen(c, query(m, h))) x = lowest<float>();
      });
    weigh(s);
    if (c.dropout) {
#pragma unroll
      for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < key_tiles; ++n) {
          const unsigned kept = kept_of_queries(c, row + 16 * m, key + 8 * n);
#pragma unroll
          for (int e = 0; e < 4; ++e) s[m][n][e] = kept >> e & 1 ? s[m][n][e] : 0.f;
        }
    }
#pragma unroll
    for (int n = 0; n < key_tiles / 2; ++n) {
      std::uint32_t p[M][4];
#pragma unroll
      for (int m = 0; m < M; ++m) as_left<T>(p[m], s[m][2 * n], s[m][2 * n + 1]);
#pragma unroll
      for (int d = 0; d < Width / 16; ++d) {
        std::uint32_t b[4];
        load_right(b, values, 16 * n, 16 * d);
#pragma unroll
        for (int m = 0; m < M; ++m) {
          multiply<T>(out[m][2 * d], p[m], b[0], b[1]);
          multiply<T>(out[m][2 * d + 1], p[m], b[2], b[3]);
        }
      }
    }
  }

  /// What a bool mask shows of the keys from `key` on, four bits a tile; false where that is nothing.
  __device__ bool look(unsigned (&shown)[M], int key) const {
    unsigned all = 0;
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int n = 0; n < key_tiles; ++n)
        shown[m] |= shown_to_queries(mask, first + 16 * m, key + 8 * n) << 4 * n;
      all |= shown[m];
    }
    return __any_sync(whole_warp, all != 0);
  }
  __device__ static void show(float (&s)[M][key_tiles][4], const unsigned (&shown)[M]) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int n = 0; n < key_tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[m][n][e] = shown[m] >> (4 * n + e) & 1 ? s[m][n][e] : lowest<float>();
  }
  __device__ void add_biases(float (&s)[M][key_tiles][4], int key) const {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const T* biases = mask.row<T>(query(m, h));
#pragma unroll
        for (int n = 0; n < key_tiles; ++n) {
          const float2 bias = log2_biases(mask, biases, key + 8 * n + lane % 4 * 2);
          s[m][n][2 * h] += bias.x;
          s[m][n][2 * h + 1] += bias.y;
        }
      }
  }

  /// Calls `body(m, half, column, score)` for every score.
  template <class F>
  __device__ void for_scores(float (&s)[M][key_tiles][4], const F& body) const {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int n = 0; n < key_tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) body(m, e / 2, 8 * n + lane % 4 * 2 + e % 2, s[m][n][e]);
  }

  /// Scores become weights relative to the largest score so far.
  __device__ void weigh(float (&s)[M][key_tiles][4]) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float larger = top[m][h];
#pragma unroll
        for (int n = 0; n < key_tiles; ++n) larger = fmaxf(larger, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
        larger = fmaxf(larger, __shfl_xor_sync(whole_warp, larger, 1));
        larger = fmaxf(larger, __shfl_xor_sync(whole_warp, larger, 2));
        const float shift = larger == lowest<float>() ? 0.f : larger * scale.inside;
        const float shrink = fast_exp2(__fmaf_rn(top[m][h], scale.inside, -shift));
        top[m][h] = larger;
        float sum = 0;
#pragma unroll
        for (int n = 0; n < key_tiles; ++n)
#pragma unroll
          for (int e = 2 * h; e < 2 * h + 2; ++e) {
            s[m][n][e] = fast_exp2(__fmaf_rn(s[m][n][e], scale.inside, -shift));
            sum += s[m][n][e];
          }
        total[m][h] = __fmaf_rn(total[m][h], shrink, sum);
#pragma unroll
        for (int d = 0; d < Width / 8; ++d) {
          out[m][d][2 * h] *= shrink;
          out[m][d][2 * h + 1] *= shrink;
        }
      }
  }

  __device__ void write(std::uint16_t* o) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
      float factor[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sum = total[m][h];
        sum += __shfl_xor_sync(whole_warp, sum, 1);
        sum += __shfl_xor_sync(whole_warp, sum, 2);
        // A row that sees nothing has the sum 0 and gives zeros; NaN stays.
        factor[h] = sum == 0 ? 0.f : c.kept / sum;
        if (lane % 4 != 0 || query(m, h) >= c.queries) continue;
        const std::int64_t at = row + 16 * m + lane / 4 + 8 * h;
        const float shift = top[m][h] * (scale.inside * ln_of_2);
        c.logsumexp[at] = (c.tops != nullptr ? 0.f : shift) + math::log(sum);
        if (c.tops != nullptr) c.tops[at] = top[m][h];
      }
#pragma unroll
      for (int d = 0; d < Width / 8; ++d)
        store_tile<T>(o, c.o.row, first + 16 * m, c.queries, 8 * d, out[m][d], factor[0], factor[1]);
    }
  }
};

template <class T, int Width>
__global__ void __launch_bounds__(attention_threads, blocks_at_once(Width))
    forward(const __grid_constant__ AttentionCall c, int row_tiles) {
  constexpr int M = held(Width), query_tile = 64 * M, R = TileRows<Width>::row;
  extern __shared__ __align__(16) std::uint16_t memory[];
  const TileRows<Width> q{memory};
  const auto keys = [&](int stage) { return TileRows<Width>{memory + (query_tile + stage * key_tile) * R}; };
  const auto values = [&](int stage) {
    return TileRows<Width>{memory + (query_tile + (2 + stage) * key_tile) * R};
  };
  const HeadIndex head(c, blockIdx.x / row_tiles);
  const int first =
      (row_tiles - 1 - static_cast<int>(blockIdx.x % row_tiles)) * query_tile;  // long ones first
  const int warp = static_cast<int>(threadIdx.x) / warp_size;
  const int end = keys_seen(c, min(first + query_tile, c.queries) - 1),
            steps = (end + key_tile - 1) / key_tile;
  const auto copy_step = [&](int step) {
    copy_rows<key_tile, Width, attention_threads>(keys(step % 2), shared_bits(c, head, c.k), c.k.row,
                                                  step * key_tile, c.keys);
    copy_rows<key_tile, Width, attention_threads>(values(step % 2), shared_bits(c, head, c.v), c.v.row,
                                                  step * key_tile, c.keys);
  };
  copy_rows<query_tile, Width, attention_threads>(q, bits_of(head, c.q), c.q.row, first, c.queries);
  if (steps > 0) copy_step(0);
  end_copies();
  const int mine = first + warp * 16 * M;
  WarpRows<T, Width> rows(c, head, mine);
  std::uint32_t left[M][Width / 16][4];
  for (int step = 0; step < steps; ++step) {
    if (step + 1 < steps) copy_step(step + 1);
    end_copies();
    wait_copies<1>();
    __syncthreads();
    if (step == 0) {
#pragma unroll
      for (int m = 0; m < M; ++m)
#pragma unroll
        for (int d = 0; d < Width / 16; ++d) load_left(left[m][d], q, (warp * M + m) * 16, 16 * d);
    }
    rows.add(left, keys(step % 2), values(step % 2), step * key_tile);
    __syncthreads();
  }
  wait_copies<0>();
  rows.write(head.rows<std::uint16_t>(c.o));
}

}  // namespace

void launch_attention_mma(const AttentionCall& c) {
  for_mma_form(c, [&]<class T, int Width>() {
    constexpr int query_tile = 64 * held(Width);
    constexpr int bytes = 2 * (query_tile + 4 * key_tile) * TileRows<Width>::row;
    const std::int64_t row_tiles = tiles(c.queries, query_tile);
    cudaFuncSetAttribute(forward<T, Width>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    forward<T, Width><<<grid_of(c.batch * c.heads * row_tiles), attention_threads, bytes, c.stream>>>(
        c, static_cast<int>(row_tiles));
  });
}

}  // namespace sherd::cuda
