// Attention's backward on tensor cores, in two passes. In the first a warp holds 16 keys and queries pass by,
// scores transposed; in the second it holds 16 queries and keys pass by. So every sum stays in registers, and
// weights become operands of the next product where they are.
#include "runtime/cuda/attention_mma.cuh"

namespace sherd::cuda {
namespace {

constexpr int tile = 64, step_tiles = 4;   // rows of a tile in shared memory; C tiles side by side in a step
constexpr int step_rows = 8 * step_tiles;  // queries or keys that a warp takes at once

/// One step's scores and gradients of weights, then weights and gradients of scores.
struct StepScores {
  float p[step_tiles][4] = {}, ds[step_tiles][4] = {};
};

/// p += a times `rows`, ds += b times `others`, rows from `r` on; a(d, operand) and b load left operands.
template <class T, int Width, class A, class B>
__device__ void add_scores(StepScores& s, const A& a, const B& b, const TileRows<Width>& rows,
                           const TileRows<Width>& others, int r) {
#pragma unroll
  for (int d = 0; d < Width / 16; ++d) {
    std::uint32_t left[4], left_of_gradient[4];
    a(d, left);
    b(d, left_of_gradient);
#pragma unroll
    for (int n = 0; n < step_tiles / 2; ++n) {
      std::uint32_t right[4];
      load_right_of_rows(right, rows, r + 16 * n, 16 * d);
      multiply<T>(s.p[2 * n], left, right[0], right[1]);
      multiply<T>(s.p[2 * n + 1], left, right[2], right[3]);
      load_right_of_rows(right, others, r + 16 * n, 16 * d);
      multiply<T>(s.ds[2 * n], left_of_gradient, right[0], right[1]);
      multiply<T>(s.ds[2 * n + 1], left_of_gradient, right[2], right[3]);
    }
  }
}

/// What the exponent does not apply to the scores.
__device__ inline void scale_scores(StepScores& s, const ScoreScale& scale) {
  if (scale.before == 1) return;
#pragma unroll
  for (auto& c : s.p)
#pragma unroll
    for (float& x : c) x *= scale.before;
}

/// -inf where a bool mask, in four bits a tile, shows nothing.
__device__ inline void show_scores(StepScores& s, unsigned shown) {
#pragma unroll
  for (int n = 0; n < step_tiles; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) s.p[n][e] = shown >> (4 * n + e) & 1 ? s.p[n][e] : lowest<float>();
}

/// -inf where `seen(row half, column)` is false; `masked` says that it may be.
template <class F>
__device__ void mask_scores(StepScores& s, bool masked, const F& seen) {
  if (!masked) return;
  const int column = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int n = 0; n < step_tiles; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) s.p[n][e] = seen(e / 2, 8 * n + column + e % 2) ? s.p[n][e] : lowest<float>();
}

/// The largest score of query `i`, which a mask was added to; any number where it sees nothing.
__device__ inline float top_of(const AttentionCall& c, std::int64_t first_row, int i) {
  const float top = c.tops[first_row + min(i, c.queries - 1)];
  return top == lowest<float>() ? 0.f : top;
}

/// out += weights times `rows` from `r` on.
template <class T, int Width>
__device__ void add_products(float (&out)[Width / 8][4], const float (&weights)[step_tiles][4],
                             const TileRows<Width>& rows, int r) {
#pragma unroll
  for (int n = 0; n < step_tiles / 2; ++n) {
    std::uint32_t left[4];
    as_left<T>(left, weights[2 * n], weights[2 * n + 1]);
#pragma unroll
    for (int d = 0; d < Width / 16; ++d) {
      std::uint32_t right[4];
      load_right(right, rows, r + 16 * n, 16 * d);
      multiply<T>(out[2 * d], left, right[0], right[1]);
      multiply<T>(out[2 * d + 1], left, right[2], right[3]);
    }
  }
}

/// One element: the weight as the values saw it but for the common factor, and the gradient of its score.
__device__ inline void weigh(float& p, float& ds, float scale, float shift, float delta, bool kept,
                             float factor) {
  const float e = fast_exp2(__fmaf_rn(p, scale, -shift));
  ds = e * __fmaf_rn(kept ? ds : 0.f, factor, -delta);
  p = kept ? e : 0.f;
}

/// logsumexp in powers of two. A row that sees nothing is masked, so any number does.
__device__ inline float shift_of(float logsumexp) {
  return logsumexp == lowest<float>() ? 0.f : logsumexp * log2_of_e;
}

template <class T, int Width>
__global__ void __launch_bounds__(attention_threads, Width <= 64 ? 3 : 2)
    backward_keys(const __grid_constant__ AttentionGradCall call, int key_tiles) {
  constexpr int R = TileRows<Width>::row;
  constexpr bool hold = Width <= 64;  // the left operands, where registers have room
  extern __shared__ __align__(16) std::uint16_t memory[];
  const AttentionCall& c = call.forward;
  const TileRows<Width> k{memory}, v{memory + tile * R};
  const auto queries = [&](int stage) { return TileRows<Width>{memory + (2 + stage) * tile * R}; };
  const auto grads = [&](int stage) { return TileRows<Width>{memory + (4 + stage) * tile * R}; };
  float* statistics = reinterpret_cast<float*>(memory + 6 * tile * R);
  const auto shifts = [&](int stage) { return statistics + 2 * stage * tile; };
  const auto deltas = [&](int stage) { return statistics + (2 * stage + 1) * tile; };

  const HeadIndex head = HeadIndex::sharing(c, blockIdx.x / key_tiles);  // the first of those that share
  const int j = static_cast<int>(blockIdx.x % key_tiles) * tile;
  const int warp = static_cast<int>(threadIdx.x) / warp_size,
            lane = static_cast<int>(threadIdx.x) % warp_size;
  const int begin = min(first_query(c, j), c.queries) / tile, end = (c.queries + tile - 1) / tile;
  const int head_steps = end - begin, steps = head_steps * c.group;
  const ScoreScale scale(c);
  const auto copy_step = [&](int step) {
    const int stage = step % 2, sharer = step / head_steps, i = (begin + step % head_steps) * tile;
    copy_rows<tile, Width, attention_threads>(queries(stage), bits_of(head, c.q) + sharer * c.q.head, c.q.row,
                                              i, c.queries);
    copy_rows<tile, Width, attention_threads>(grads(stage), bits_of(head, call.go) + sharer * call.go.head,
                                              call.go.row, i, c.queries);
    // A row beyond the last has weights of 2^-infinity.
    if (const int r = static_cast<int>(threadIdx.x); r < tile) {
      const bool inside = i + r < c.queries;
      const std::int64_t row = head.first_row(c) + static_cast<std::int64_t>(sharer) * c.queries + i + r;
      shifts(stage)[r] = inside ? shift_of(c.logsumexp[row]) : -lowest<float>();
      deltas(stage)[r] = inside ? call.delta[row] : 0.f;
    }
  };
  copy_rows<tile, Width, attention_threads>(k, shared_bits(c, head, c.k), c.k.row, j, c.keys);
  copy_rows<tile, Width, attention_threads>(v, shared_bits(c, head, c.v), c.v.row, j, c.keys);
  if (steps > 0) copy_step(0);
  end_copies();

  float gk[Width / 8][4] = {}, gv[Width / 8][4] = {};
  std::uint32_t held_k[hold ? Width / 16 : 1][4], held_v[hold ? Width / 16 : 1][4];
  const int mine = j + 16 * warp;  // this warp's first key
  HeadMask mask(c, head);
  std::int64_t first_row = head.first_row(c);
  for (int step = 0, at = begin; step < steps; ++step) {
    if (step + 1 < steps) copy_step(step + 1);
    end_copies();
    wait_copies<1>();
    __syncthreads();
    if (hold && step == 0) {
#pragma unroll
      for (int d = 0; d < (hold ? Width / 16 : 0); ++d) {
        load_left(held_k[d], k, 16 * warp, 16 * d);
        load_left(held_v[d], v, 16 * warp, 16 * d);
      }
    }
    const auto left_of = [&](const TileRows<Width>& rows, const auto& held) {
      return [&, rows](int d, std::uint32_t(&left)[4]) {
        if constexpr (hold) {
#pragma unroll
          for (int x = 0; x < 4; ++x) left[x] = held[d][x];
        } else {
          load_left(left, rows, 16 * warp, 16 * d);
        }
      };
    };
    const TileRows<Width> q = queries(step % 2), go = grads(step % 2);
    const float *shift = shifts(step % 2), *delta = deltas(step % 2);
#pragma unroll 1
    for (int r = 0; r < tile; r += step_rows) {
      const int i = at * tile + r;  // the first query of the step
      if (mine >= keys_seen(c, i + step_rows - 1)) continue;
      unsigned shown = 0;
      if (c.mask.kind == MaskKind::shows) {
#pragma unroll
        for (int n = 0; n < step_tiles; ++n) shown |= shown_to_keys(mask, i + 8 * n, mine) << 4 * n;
        if (!__any_sync(whole_warp, shown != 0)) continue;
      }
      StepScores s;
      add_scores<T>(s, left_of(k, held_k), left_of(v, held_v), q, go, r);
      scale_scores(s, scale);
      if (c.mask.kind == MaskKind::shows) show_scores(s, shown);
      if (c.mask.kind == MaskKind::adds) {
#pragma unroll
        for (int n = 0; n < step_tiles; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int query = i + 8 * n + lane % 4 * 2 + e % 2;
            s.p[n][e] += log2_bias(mask.at<T>(query, mine + lane / 4 + e / 2 * 8));
            s.p[n][e] -= top_of(c, first_row, query);
          }
      }
      mask_scores(s, mine + 16 > keys_seen(c, i), [&](int half, int column) {
        return mine + lane / 4 + half * 8 < keys_seen(c, i + column);
      });
#pragma unroll
      for (int n = 0; n < step_tiles; ++n) {
        const unsigned kept = c.dropout ? kept_of_keys(c, first_row + i + 8 * n, mine) : 0xfu;
        const int column = 8 * n + lane % 4 * 2;
        const float2 row_shift = *reinterpret_cast<const float2*>(shift + r + column);
        const float2 row_delta = *reinterpret_cast<const float2*>(delta + r + column);
#pragma unroll
        for (int e = 0; e < 4; ++e)
          weigh(s.p[n][e], s.ds[n][e], scale.inside, e % 2 ? row_shift.y : row_shift.x,
                e % 2 ? row_delta.y : row_delta.x, kept >> e & 1, c.kept);
      }
      add_products<T, Width>(gv, s.p, go, r);
      add_products<T, Width>(gk, s.ds, q, r);
    }
    __syncthreads();
    if (++at == end) {
      at = begin;
      mask.next();
      first_row += c.queries;
    }
  }
  wait_copies<0>();
  auto *to_k = head.shared_rows<std::uint16_t>(c, call.gk),
       *to_v = head.shared_rows<std::uint16_t>(c, call.gv);
#pragma unroll
  for (int d = 0; d < Width / 8; ++d) {
    store_tile<T>(to_k, call.gk.row, mine, c.keys, 8 * d, gk[d], c.scale, c.scale);
    store_tile<T>(to_v, call.gv.row, mine, c.keys, 8 * d, gv[d], c.kept, c.kept);
  }
}

template <class T, int Width>
__global__ void __launch_bounds__(attention_threads, Width <= 64 ? 3 : 2)
    backward_queries(const __grid_constant__ AttentionGradCall call, int row_tiles) {
  constexpr int R = TileRows<Width>::row;
  extern __shared__ __align__(16) std::uint16_t memory[];
  const AttentionCall& c = call.forward;
  const TileRows<Width> q{memory}, go{memory + tile * R};
  const auto keys = [&](int stage) { return TileRows<Width>{memory + (2 + stage) * tile * R}; };
  const auto values = [&](int stage) { return TileRows<Width>{memory + (4 + stage) * tile * R}; };

  const HeadIndex head(c, blockIdx.x / row_tiles);
  const int first = (row_tiles - 1 - static_cast<int>(blockIdx.x % row_tiles)) * tile;
  const int warp = static_cast<int>(threadIdx.x) / warp_size,
            lane = static_cast<int>(threadIdx.x) % warp_size;
  const int end = (keys_seen(c, min(first + tile, c.queries) - 1) + tile - 1) / tile;
  const ScoreScale scale(c);
  const auto copy_step = [&](int at) {
    copy_rows<tile, Width, attention_threads>(keys(at % 2), shared_bits(c, head, c.k), c.k.row, at * tile,
                                              c.keys);
    copy_rows<tile, Width, attention_threads>(values(at % 2), shared_bits(c, head, c.v), c.v.row, at * tile,
                                              c.keys);
  };
  copy_rows<tile, Width, attention_threads>(q, bits_of(head, c.q), c.q.row, first, c.queries);
  copy_rows<tile, Width, attention_threads>(go, bits_of(head, call.go), call.go.row, first, c.queries);
  if (end > 0) copy_step(0);
  end_copies();

  const int mine = first + 16 * warp;  // this warp's first query
  const HeadMask mask(c, head);
  float shift[2], delta[2], top[2] = {};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int i = mine + lane / 4 + 8 * h;
    const bool inside = i < c.queries;
    shift[h] = inside ? shift_of(c.logsumexp[head.first_row(c) + i]) : 0.f;
    delta[h] = inside ? call.delta[head.first_row(c) + i] : 0.f;
    if (c.mask.kind == MaskKind::adds) top[h] = top_of(c, head.first_row(c), i);
  }
  float gq[Width / 8][4] = {};
  std::uint32_t held_q[Width / 16][4], held_go[Width / 16][4];
  for (int at = 0; at < end; ++at) {
    if (at + 1 < end) copy_step(at + 1);
    end_copies();
    wait_copies<1>();
    __syncthreads();
    if (at == 0) {
#pragma unroll
      for (int d = 0; d < Width / 16; ++d) {
        load_left(held_q[d], q, 16 * warp, 16 * d);
        load_left(held_go[d], go, 16 * warp, 16 * d);
      }
    }
    const auto left_of = [&](const auto& held) {
      return [&](int d, std::uint32_t(&left)[4]) {
#pragma unroll
        for (int x = 0; x < 4; ++x) left[x] = held[d][x];
      };
    };
#pragma unroll 1
    for (int r = 0; r < tile; r += step_rows) {
      const int j = at * tile + r;  // the first key of the step
      if (j >= keys_seen(c, mine + 15)) continue;
      unsigned shown = 0;
      if (c.mask.kind == MaskKind::shows) {
#pragma unroll
        for (int n = 0; n < step_tiles; ++n) shown |= shown_to_queries(mask, mine, j + 8 * n) << 4 * n;
        if (!__any_sync(whole_warp, shown != 0)) continue;
      }
      StepScores s;
      add_scores<T>(s, left_of(held_q), left_of(held_go), keys(at % 2), values(at % 2), r);
      scale_scores(s, scale);
      if (c.mask.kind == MaskKind::shows) show_scores(s, shown);
      if (c.mask.kind == MaskKind::adds) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const T* biases = mask.row<T>(mine + lane / 4 + 8 * h);
#pragma unroll
          for (int n = 0; n < step_tiles; ++n) {
            const float2 bias = log2_biases(mask, biases, j + 8 * n + lane % 4 * 2);
            s.p[n][2 * h] = s.p[n][2 * h] + bias.x - top[h];
            s.p[n][2 * h + 1] = s.p[n][2 * h + 1] + bias.y - top[h];
          }
        }
      }
      mask_scores(s, j + step_rows > keys_seen(c, mine), [&](int half, int column) {
        return j + column < keys_seen(c, mine + lane / 4 + half * 8);
      });
#pragma unroll
      for (int n = 0; n < step_tiles; ++n) {
        const unsigned kept = c.dropout ? kept_of_queries(c, head.first_row(c) + mine, j + 8 * n) : 0xfu;
#pragma unroll
        for (int e = 0; e < 4; ++e)
          weigh(s.p[n][e], s.ds[n][e], scale.inside, shift[e / 2], delta[e / 2], kept >> e & 1, c.kept);
      }
      add_products<T, Width>(gq, s.ds, keys(at % 2), r);
    }
    __syncthreads();
  }
  wait_copies<0>();
  auto* to = head.rows<std::uint16_t>(call.gq);
#pragma unroll
  for (int d = 0; d < Width / 8; ++d)
    store_tile<T>(to, call.gq.row, mine, c.queries, 8 * d, gq[d], c.scale, c.scale);
}

}  // namespace

void launch_attention_grad_mma(const AttentionGradCall& call) {
  const AttentionCall& c = call.forward;
  for_mma_form(c, [&]<class T, int Width>() {
    constexpr int rows = 6 * tile * 2 * TileRows<Width>::row;
    constexpr int bytes = rows + 4 * tile * static_cast<int>(sizeof(float));
    static_assert(bytes <= gradient_bytes_on_tensor_cores);
    const std::int64_t key_tiles = tiles(c.keys, tile), row_tiles = tiles(c.queries, tile);
    cudaFuncSetAttribute(backward_keys<T, Width>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    cudaFuncSetAttribute(backward_queries<T, Width>, cudaFuncAttributeMaxDynamicSharedMemorySize, rows);
    if (key_tiles > 0)
      backward_keys<T, Width>
          <<<grid_of(c.batch * (c.heads / c.group) * key_tiles), attention_threads, bytes, c.stream>>>(
              call, static_cast<int>(key_tiles));
    backward_queries<T, Width><<<grid_of(c.batch * c.heads * row_tiles), attention_threads, rows, c.stream>>>(
        call, static_cast<int>(row_tiles));
  });
}

}  // namespace sherd::cuda
