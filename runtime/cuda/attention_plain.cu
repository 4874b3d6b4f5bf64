// Attention in f32 on plain cores: square tiles of scores, products from shared memory.
#include "runtime/cuda/attention.cuh"

namespace sherd::cuda {
namespace {

constexpr int side = 16, block = side * side;  // threads: `side` down and across a tile

/// Rows of a head in shared memory as floats, four of which are read at once. Those of a row lie in an order
/// of the row's own, so that eight rows' are in different banks.
template <int Width>
struct SharedRows {
  static constexpr int fours = Width / 4;
  float4* at;
  __device__ float4& operator()(int r, int four) const { return at[r * fours + (four ^ r % 8)]; }
  __device__ float& element(int r, int d) const { return (&(*this)(r, d / 4).x)[d % 4]; }
  /// `count` rows from `first`, zeros beyond them and beyond the width; several on their way at a time.
  template <int Tile>
  __device__ void load(const float* from, std::int64_t stride, int first, int count, int width) const {
    constexpr int ahead = 8;
    static_assert(Tile * Width % (ahead * block) == 0);
    for (int begin = static_cast<int>(threadIdx.x); begin < Tile * Width; begin += ahead * block) {
      float loaded[ahead];
#pragma unroll
      for (int a = 0; a < ahead; ++a) {
        const int r = (begin + a * block) / Width, d = (begin + a * block) % Width;
        loaded[a] = r < count && d < width ? from[(first + r) * stride + d] : 0.f;
      }
#pragma unroll
      for (int a = 0; a < ahead; ++a)
        element((begin + a * block) / Width, (begin + a * block) % Width) = loaded[a];
    }
  }
};

/// Numbers of a tile's rows, four of which are read at once.
template <int Tile>
struct Scores {
  static constexpr int row = Tile + 4;  // eight rows' begin in different banks
  float* at;
  __device__ float& operator()(int r, int j) const { return at[r * row + j]; }
  __device__ float4 four(int r, int j) const { return *reinterpret_cast<const float4*>(at + r * row + j); }
};

/// Neighbouring features that are a thread's.
template <int Width>
constexpr int pack = Width / side < 4 ? Width / side : 4;

/// Where a thread works: rows y + side r of a tile, and columns x + side c of scores.
struct Thread {
  int x = static_cast<int>(threadIdx.x) % side, y = static_cast<int>(threadIdx.x) / side;
  /// The c-th of its features.
  template <int Width>
  __device__ int feature(int c) const {
    return (x + c / pack<Width> * side) * pack<Width> + c % pack<Width>;
  }
};

/// acc[r][c] = a(row, :) . b(column, :).
template <int N, int Width>
__device__ void dots(const SharedRows<Width>& a, const SharedRows<Width>& b, float (&acc)[N][N]) {
  const Thread t;
#pragma unroll
  for (int r = 0; r < N; ++r)
#pragma unroll
    for (int c = 0; c < N; ++c) acc[r][c] = 0;
#pragma unroll 2
  for (int four = 0; four < Width / 4; ++four) {
    float4 y[N];
#pragma unroll
    for (int c = 0; c < N; ++c) y[c] = b(t.x + side * c, four);
#pragma unroll
    for (int r = 0; r < N; ++r) {
      const float4 x = a(t.y + side * r, four);
#pragma unroll
      for (int c = 0; c < N; ++c) {
        acc[r][c] = std::fma(x.x, y[c].x, acc[r][c]);
        acc[r][c] = std::fma(x.y, y[c].y, acc[r][c]);
        acc[r][c] = std::fma(x.z, y[c].z, acc[r][c]);
        acc[r][c] = std::fma(x.w, y[c].w, acc[r][c]);
      }
    }
  }
}

/// acc[r][c] += sum over j of weights(row, j) rows(j, feature c).
template <int N, int Tile, int Width>
__device__ void add_products(const SharedRows<Width>& rows, const Scores<Tile>& weights,
                             float (&acc)[N][Width / side]) {
  constexpr int V = pack<Width>;
  const Thread t;
#pragma unroll 1
  for (int j = 0; j < Tile; j += 4) {
    float w[N][4];
#pragma unroll
    for (int r = 0; r < N; ++r) {
      const float4 four = weights.four(t.y + side * r, j);
      w[r][0] = four.x, w[r][1] = four.y, w[r][2] = four.z, w[r][3] = four.w;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int c = 0; c < Width / side; c += V) {
        const auto x = load_pack<V>(&rows.element(j + i, t.feature<Width>(c)));
#pragma unroll
        for (int k = 0; k < V; ++k)
#pragma unroll
          for (int r = 0; r < N; ++r) acc[r][c + k] = std::fma(w[r][i], x.at[k], acc[r][c + k]);
      }
  }
}

template <int N, int Width>
__device__ void write(float* to, std::int64_t stride, int first, int count, int width,
                      const float (&acc)[N][Width / side], const float (&factor)[N]) {
  const Thread t;
#pragma unroll
  for (int r = 0; r < N; ++r)
#pragma unroll
    for (int c = 0; c < Width / side; ++c) {
      const int row = t.y + side * r, d = t.feature<Width>(c);
      if (row < count && d < width) to[(first + row) * stride + d] = acc[r][c] * factor[r];
    }
}

/// Over the 16 threads of one row.
__device__ float row_max(float x) {
  for (int step = side / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(whole_warp, x, step));
  return x;
}
__device__ float row_sum(float x) {
  for (int step = side / 2; step > 0; step /= 2) x += __shfl_xor_sync(whole_warp, x, step);
  return x;
}

/// 0 for a dropped weight, `kept` for others.
__device__ float keep(const AttentionCall& c, std::int64_t row, int j) {
  return word_of(weight_words(c, row, j), j % 4) < c.threshold ? 0.f : c.kept;
}

/// Calls `body(r, n, seen, keep)` for a thread's scores of the tile from query `first` and key `j` on, in a
/// loop without branches where no weight is dropped. `row` is the head's first, counted over all heads.
template <int N, class Body>
__device__ void for_scores(const AttentionCall& c, std::int64_t row, int first, int j, const Body& body) {
  const Thread t;
  const auto each = [&](const auto& kept) {
#pragma unroll
    for (int r = 0; r < N; ++r) {
      const int i = first + t.y + side * r, seen = i < c.queries ? keys_seen(c, i) : 0;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const int key = j + t.x + side * n;
        body(r, n, key < seen, kept(row + i, key));
      }
    }
  };
  if (c.dropout)
    each([&](std::int64_t of, int key) { return keep(c, of, key); });
  else
    each([](std::int64_t, int) { return 1.f; });
}

/// What is added to a thread's scores of the tile from query `first` and key `j` on; -inf where a bool mask
/// hides. False where no thread of the block sees anything, so that the tile has no part in anything.
template <int N>
__device__ bool biases_of(const HeadMask& mask, int first, int j, float (&bias)[N][N]) {
  if (mask.m.kind == MaskKind::none) {
#pragma unroll
    for (int r = 0; r < N; ++r)
#pragma unroll
      for (int n = 0; n < N; ++n) bias[r][n] = 0;
    return true;
  }
  const bool shows = mask.m.kind == MaskKind::shows;
  const Thread t;
  bool sees = false;
#pragma unroll
  for (int r = 0; r < N; ++r)
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const int i = first + t.y + side * r, key = j + t.x + side * n;
      if (shows)
        bias[r][n] = mask.at<std::uint8_t>(i, key) != 0 ? 0.f : lowest<float>();
      else
        bias[r][n] = bias_of(mask.at<float>(i, key));
      sees = sees || bias[r][n] != lowest<float>();
    }
  return __syncthreads_or(sees) != 0;
}
__device__ float biased(float score, float bias) { return bias == lowest<float>() ? bias : score + bias; }

/// Blocks that a multiprocessor has registers for, at least.
constexpr int blocks_at_once(int width) { return width <= 64 ? 2 : 1; }

template <int Width, int Tile>
__global__ void __launch_bounds__(block, blocks_at_once(Width))
    forward(const AttentionCall c, int row_tiles) {
  constexpr int N = Tile / side;
  constexpr int size = Tile * SharedRows<Width>::fours;
  extern __shared__ float4 memory[];
  const SharedRows<Width> q{memory}, k{q.at + size}, v{k.at + size};
  const Scores<Tile> p{&v.at[size].x};
  const HeadIndex head(c, blockIdx.x / row_tiles);
  const int first = (row_tiles - 1 - static_cast<int>(blockIdx.x % row_tiles)) * Tile;  // long rows first
  const int count = min(Tile, c.queries - first);
  const Thread t;
  const HeadMask mask(c, head);
  q.template load<Tile>(head.rows<const float>(c.q), c.q.row, first, count, c.width);
  float out[N][Width / side] = {}, top[N], total[N];
#pragma unroll
  for (int r = 0; r < N; ++r) top[r] = lowest<float>(), total[r] = 0;
  const int end = keys_seen(c, first + count - 1);
  for (int j = 0; j < end; j += Tile) {
    const int here = min(Tile, c.keys - j);
    float bias[N][N];
    if (!biases_of(mask, first, j, bias)) continue;
    __syncthreads();
    k.template load<Tile>(head.shared_rows<const float>(c, c.k), c.k.row, j, here, c.width);
    v.template load<Tile>(head.shared_rows<const float>(c, c.v), c.v.row, j, here, c.width);
    __syncthreads();
    float s[N][N];
    dots(q, k, s);
#pragma unroll
    for (int r = 0; r < N; ++r) {
      const int i = first + t.y + side * r, seen = i < c.queries ? keys_seen(c, i) : 0;
      float larger = top[r];
#pragma unroll
      for (int n = 0; n < N; ++n) {
        s[r][n] = j + t.x + side * n < seen ? biased(s[r][n] * c.scale, bias[r][n]) : lowest<float>();
        larger = s[r][n] > larger ? s[r][n] : larger;
      }
      larger = row_max(larger);
      const float shift = LogSum<float>::shift(larger), shrink = math::exp(top[r] - shift);
      top[r] = larger;
      float sum = 0;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float e = math::exp(s[r][n] - shift);
        s[r][n] = j + t.x + side * n < seen ? e : 0.f;
        sum += s[r][n];
      }
      total[r] = total[r] * shrink + row_sum(sum);
#pragma unroll
      for (int d = 0; d < Width / side; ++d) out[r][d] *= shrink;
    }
    for_scores<N>(c, head.first_row(c), first, j, [&](int r, int n, bool seen, float kept) {
      p(t.y + side * r, t.x + side * n) = seen ? s[r][n] * kept : 0.f;
    });
    __syncthreads();
    add_products<N, Tile>(v, p, out);
  }
  float factor[N];
#pragma unroll
  for (int r = 0; r < N; ++r) {
    const int row = t.y + side * r;
    // A row that sees nothing has the sum 0 and gives zeros; NaN stays.
    factor[r] = total[r] == 0 ? 0.f : 1 / total[r];
    if (t.x != 0 || row >= count) continue;
    const std::int64_t at = head.first_row(c) + first + row;
    c.logsumexp[at] = (c.tops != nullptr ? 0.f : top[r]) + math::log(total[r]);
    if (c.tops != nullptr) c.tops[at] = top[r];
  }
  write<N, Width>(head.rows<float>(c.o), c.o.row, first, count, c.width, out, factor);
}

/// What a row's scores are relative to; any number for one that sees nothing.
__device__ float finite(float x) { return x == lowest<float>() ? 0.f : x; }

/// Calls `store(query, key, weight, slope)` with the weights (as forward used them) and the gradients of the
/// scores, of a tile of queries and keys.
template <int Width, int Tile, class Store>
__device__ void score_gradients(const AttentionGradCall& g, std::int64_t first_row, int first, int j,
                                const float (&bias)[Tile / side][Tile / side], const SharedRows<Width>& q,
                                const SharedRows<Width>& k, const SharedRows<Width>& go,
                                const SharedRows<Width>& v, const Store& store) {
  constexpr int N = Tile / side;
  const AttentionCall& c = g.forward;
  const Thread t;
  float s[N][N], dp[N][N];
  dots(q, k, s);
  dots(go, v, dp);
  float delta[N];
#pragma unroll
  for (int r = 0; r < N; ++r) {
    const int i = first + t.y + side * r;
    const bool sees = i < c.queries && keys_seen(c, i) > 0;
    const std::int64_t row = first_row + i;
    const float shift = sees ? finite(c.logsumexp[row]) : 0.f;
    const float top = sees && c.tops != nullptr ? finite(c.tops[row]) : 0.f;
    delta[r] = sees ? g.delta[row] : 0.f;
#pragma unroll
    for (int n = 0; n < N; ++n) s[r][n] = math::exp(biased(s[r][n] * c.scale, bias[r][n]) - top - shift);
  }
  for_scores<N>(c, first_row, first, j, [&](int r, int n, bool seen, float kept) {
    const float e = s[r][n];
    store(t.y + side * r, t.x + side * n, seen ? e * kept : 0.f,
          seen ? e * (dp[r][n] * kept - delta[r]) : 0.f);
  });
}

template <int Width, int Tile>
__global__ void __launch_bounds__(block, blocks_at_once(Width))
    backward_keys(const AttentionGradCall g, int key_tiles) {
  constexpr int N = Tile / side, size = Tile * SharedRows<Width>::fours;
  extern __shared__ float4 memory[];
  const SharedRows<Width> q{memory}, k{q.at + size}, v{k.at + size}, go{v.at + size};
  const Scores<Tile> p{&go.at[size].x}, ds{p.at + Tile * Scores<Tile>::row};
  const AttentionCall& c = g.forward;
  const HeadIndex shared = HeadIndex::sharing(c, blockIdx.x / key_tiles);
  const int j = static_cast<int>(blockIdx.x % key_tiles) * Tile, count = min(Tile, c.keys - j);
  k.template load<Tile>(shared.shared_rows<const float>(c, c.k), c.k.row, j, count, c.width);
  v.template load<Tile>(shared.shared_rows<const float>(c, c.v), c.v.row, j, count, c.width);
  float gk[N][Width / side] = {}, gv[N][Width / side] = {};
  const int begin = first_query(c, j) / Tile * Tile;
  for (int sharer = 0; sharer < c.group; ++sharer) {
    const HeadIndex head(c, shared.index + sharer);
    const HeadMask mask(c, head);
    for (int first = begin; first < c.queries; first += Tile) {
      const int here = min(Tile, c.queries - first);
      float bias[N][N];
      if (!biases_of(mask, first, j, bias)) continue;
      __syncthreads();
      q.template load<Tile>(head.rows<const float>(c.q), c.q.row, first, here, c.width);
      go.template load<Tile>(head.rows<const float>(g.go), g.go.row, first, here, c.width);
      __syncthreads();
      score_gradients<Width, Tile>(g, head.first_row(c), first, j, bias, q, k, go, v,
                                   [&](int i, int key, float weight, float slope) {
                                     p(key, i) = weight;
                                     ds(key, i) = slope;
                                   });
      __syncthreads();
      add_products<N, Tile>(go, p, gv);
      add_products<N, Tile>(q, ds, gk);
    }
  }
  float one[N], scale[N];
#pragma unroll
  for (int r = 0; r < N; ++r) one[r] = 1, scale[r] = c.scale;
  write<N, Width>(shared.shared_rows<float>(c, g.gk), g.gk.row, j, count, c.width, gk, scale);
  write<N, Width>(shared.shared_rows<float>(c, g.gv), g.gv.row, j, count, c.width, gv, one);
}

template <int Width, int Tile>
__global__ void __launch_bounds__(block, blocks_at_once(Width))
    backward_queries(const AttentionGradCall g, int row_tiles) {
  constexpr int N = Tile / side, size = Tile * SharedRows<Width>::fours;
  extern __shared__ float4 memory[];
  const SharedRows<Width> q{memory}, k{q.at + size}, v{k.at + size}, go{v.at + size};
  const Scores<Tile> ds{&go.at[size].x};
  const AttentionCall& c = g.forward;
  const HeadIndex head(c, blockIdx.x / row_tiles);
  const int first = (row_tiles - 1 - static_cast<int>(blockIdx.x % row_tiles)) * Tile;
  const int count = min(Tile, c.queries - first), end = keys_seen(c, first + count - 1);
  const HeadMask mask(c, head);
  q.template load<Tile>(head.rows<const float>(c.q), c.q.row, first, count, c.width);
  go.template load<Tile>(head.rows<const float>(g.go), g.go.row, first, count, c.width);
  float gq[N][Width / side] = {};
  for (int j = 0; j < end; j += Tile) {
    const int here = min(Tile, c.keys - j);
    float bias[N][N];
    if (!biases_of(mask, first, j, bias)) continue;
    __syncthreads();
    k.template load<Tile>(head.shared_rows<const float>(c, c.k), c.k.row, j, here, c.width);
    v.template load<Tile>(head.shared_rows<const float>(c, c.v), c.v.row, j, here, c.width);
    __syncthreads();
    score_gradients<Width, Tile>(g, head.first_row(c), first, j, bias, q, k, go, v,
                                 [&](int i, int key, float, float slope) { ds(i, key) = slope; });
    __syncthreads();
    add_products<N, Tile>(k, ds, gq);
  }
  float scale[N];
#pragma unroll
  for (int r = 0; r < N; ++r) scale[r] = c.scale;
  write<N, Width>(head.rows<float>(g.gq), g.gq.row, first, count, c.width, gq, scale);
}

/// Calls `f.operator()<Width, Tile>()`: the width rounded up, and the tile that leaves room for it.
template <class F>
void for_form(int width, F&& f) {
  if (width <= 32)
    f.template operator()<32, 64>();
  else if (width <= 64)
    f.template operator()<64, 64>();
  else if (width <= 128)
    f.template operator()<128, 64>();
  else
    f.template operator()<widest_head, 32>();
}

template <int Width, int Tile>
constexpr int memory_of(int rows, int scores) {
  return static_cast<int>(sizeof(float)) * Tile * (rows * Width + scores * Scores<Tile>::row);
}

template <class K>
void allow_memory(K* kernel, int bytes) {
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

}  // namespace

void launch_attention_plain(const AttentionCall& c) {
  for_form(c.width, [&]<int Width, int Tile>() {
    constexpr int bytes = memory_of<Width, Tile>(3, 1);
    const std::int64_t row_tiles = tiles(c.queries, Tile);
    allow_memory(forward<Width, Tile>, bytes);
    forward<Width, Tile>
        <<<grid_of(c.batch * c.heads * row_tiles), block, bytes, c.stream>>>(c, static_cast<int>(row_tiles));
  });
}

void launch_attention_grad_plain(const AttentionGradCall& g) {
  const AttentionCall& c = g.forward;
  for_form(c.width, [&]<int Width, int Tile>() {
    constexpr int bytes = memory_of<Width, Tile>(4, 2), bytes_of_queries = memory_of<Width, Tile>(4, 1);
    static_assert(bytes <= (Width > narrow_head ? gradient_bytes_on_plain_cores : 99 << 10));
    const std::int64_t row_tiles = tiles(c.queries, Tile), key_tiles = tiles(c.keys, Tile);
    allow_memory(backward_keys<Width, Tile>, bytes);
    allow_memory(backward_queries<Width, Tile>, bytes_of_queries);
    if (key_tiles > 0)
      backward_keys<Width, Tile>
          <<<grid_of(c.batch * (c.heads / c.group) * key_tiles), block, bytes, c.stream>>>(
              g, static_cast<int>(key_tiles));
    backward_queries<Width, Tile>
        <<<grid_of(c.batch * c.heads * row_tiles), block, bytes_of_queries, c.stream>>>(
            g, static_cast<int>(row_tiles));
  });
}

}  // namespace sherd::cuda
