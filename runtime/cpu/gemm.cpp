#include "runtime/cpu/gemm.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>

#include "runtime/cpu/gemm_tile.h"
#include "runtime/cpu/scratch.h"
#include "runtime/cpu/simd.h"
#include "runtime/dtype.h"
#include "runtime/error.h"
#include "runtime/held_signals.h"
#include "runtime/instances.h"
#include "runtime/parallel.h"

namespace sherd::cpu {
namespace {

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

template <class T>
bool library_tile(const Gemm<T>& g) noexcept {
  if constexpr (has_onednn && !std::is_same_v<T, double>)
    return gemm_tile_onednn(g);
  else
    return gemm_tile_eigen(g);
}

// ---- Small products: no packing, no library. Every element of C is one chain or one fixed tree over k.

/// Rows of B are contiguous: `Rows` rows of `width` columns (more than Vecs - 1 vectors) stay in registers
/// while k runs.
template <int Rows, int Vecs, class T>
void small_block(const Gemm<T>& g, std::int64_t i, std::int64_t j, std::int64_t width) {
  constexpr int L = lanes<T>;
  const std::int64_t row_a = g.transpose_a ? 1 : g.lda, step_a = g.transpose_a ? g.lda : 1;
  const std::int64_t last = width - (Vecs - 1) * L;
  const T *a = g.a + i * row_a, *b = g.b + j;
  Vec<T> acc[Rows][Vecs] = {};
  for (std::int64_t p = 0; p < g.k; ++p, a += step_a, b += g.ldb) {
    Vec<T> x[Vecs];
#pragma GCC unroll 4
    for (int v = 0; v < Vecs - 1; ++v) x[v] = load(b + v * L);
    x[Vecs - 1] = load_part(b + (Vecs - 1) * L, last);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < Vecs; ++v) acc[r][v] = fma(splat(a[r * row_a]), x[v], acc[r][v]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
    T* c = g.c + (i + r) * g.ldc + j;
#pragma GCC unroll 4
    for (int v = 0; v < Vecs; ++v, c += L) {
      const std::int64_t count = v < Vecs - 1 ? L : last;
      store_part(c, g.accumulate ? load_part(c, count) + acc[r][v] : acc[r][v], count);
    }
  }
}

template <int Vecs, class T>
void small_columns(const Gemm<T>& g, std::int64_t j, std::int64_t width) {
  std::int64_t i = 0;
  for (; i + 4 <= g.m; i += 4) small_block<4, Vecs>(g, i, j, width);
  for (; i + 2 <= g.m; i += 2) small_block<2, Vecs>(g, i, j, width);
  for (; i < g.m; ++i) small_block<1, Vecs>(g, i, j, width);
}

template <class T>
void small_plain_b(const Gemm<T>& g) {
  constexpr std::int64_t L = lanes<T>;
  for (std::int64_t j = 0; j < g.n; j += 4 * L) {
    const std::int64_t width = std::min(4 * L, g.n - j);
    if (width > 3 * L) {
      small_columns<4>(g, j, width);
    } else if (width > 2 * L) {
      small_columns<3>(g, j, width);
    } else if (width > L) {
      small_columns<2>(g, j, width);
    } else {
      small_columns<1>(g, j, width);
    }
  }
}

/// Rows of A and of B are contiguous along k: dot products, four columns at a time.
template <int Columns, class T>
void small_dots(const Gemm<T>& g, std::int64_t i, std::int64_t j) {
  constexpr int L = lanes<T>;
  const T* a = g.a + i * g.lda;
  const T* b = g.b + j * g.ldb;
  Vec<T> acc[Columns] = {};
  std::int64_t p = 0;
  for (; p + L <= g.k; p += L) {
    const Vec<T> x = load(a + p);
    for (int q = 0; q < Columns; ++q) acc[q] = fma(x, load(b + q * g.ldb + p), acc[q]);
  }
  if (p < g.k) {
    const Vec<T> x = load_part(a + p, g.k - p);
    for (int q = 0; q < Columns; ++q) acc[q] = fma(x, load_part(b + q * g.ldb + p, g.k - p), acc[q]);
  }
  T* c = g.c + i * g.ldc + j;
  for (int q = 0; q < Columns; ++q) c[q] = g.accumulate ? c[q] + sum(acc[q]) : sum(acc[q]);
}

/// B (n x k) as columns (k x n).
void transpose_b(const Gemm<float>& g, std::int64_t begin, std::int64_t end, float* out) {
  constexpr std::int64_t L = lanes<float>;
  for (std::int64_t j = begin; j < end; j += L) {
    const std::int64_t rows = std::min(L, end - j);
    for (std::int64_t p = 0; p < g.k; p += L) {
      const std::int64_t columns = std::min(L, g.k - p);
      Vec<float> block[L] = {};
      for (std::int64_t r = 0; r < rows; ++r) block[r] = load_part(g.b + (j + r) * g.ldb + p, columns);
      transpose(block);
      for (std::int64_t c = 0; c < columns; ++c) store_part(out + (p + c) * g.n + j, block[c], rows);
    }
  }
}

template <class T>
void small_transposed_b(const Gemm<T>& g) {
  if constexpr (std::is_same_v<T, float>) {
    constexpr std::int64_t room = 64 * 64;
    if (g.m >= 8 && g.n * g.k <= room) {
      float columns[room];
      transpose_b(g, 0, g.n, columns);
      Gemm<float> plain = g;
      plain.b = columns, plain.ldb = g.n;
      return small_plain_b(plain);
    }
  }
  for (std::int64_t i = 0; i < g.m; ++i) {
    std::int64_t j = 0;
    for (; j + 4 <= g.n; j += 4) small_dots<4>(g, i, j);
    for (; j < g.n; ++j) small_dots<1>(g, i, j);
  }
}

/// Whether the packing of a library would cost more than the product.
template <class T>
bool is_small(const Gemm<T>& g) {
  if (g.transpose_a && g.transpose_b) return false;
  const std::int64_t work = g.m * g.n * g.k;
  return work <= 64 * 64 * 64 || (g.m <= 2 && g.transpose_b);
}

// ---- Tiles.

struct Tiling {
  std::int64_t rows, columns;
  bool small;                 // of the whole product, so that all its tiles are computed alike
  std::int64_t matrices = 1;  // of the batch, in one tile
};

/// Matrices of bf16 that go to the library together, because a call costs as much as a small product.
template <std::same_as<BFloat16> T>
std::int64_t together(const Gemm<T>& g) {
  constexpr std::int64_t enough = 1 << 21, wanted = 4;  // tiles, for as many threads
  if (g.stride_a <= 0 || g.stride_b <= 0) return 1;
  return std::clamp<std::int64_t>(enough / std::max<std::int64_t>(g.m * g.n * g.k, 1), 1,
                                  ceil_div(g.batch, wanted));
}

/// Depends on the shape alone. An even number of equal row tiles where it can be had, because cores come in
/// pairs.
template <class T>
Tiling tiling_of(const Gemm<T>& g) {
  if constexpr (std::is_same_v<T, BFloat16>)
    if (const std::int64_t matrices = together(g); matrices > 1) return {g.m, g.n, false, matrices};
  if (is_small(g)) {
    const std::int64_t columns = (1 << 18) / std::max<std::int64_t>(g.m * g.k, 1);
    return {g.m, std::max<std::int64_t>(64, columns / 64 * 64), true};
  }
  if (g.m < 64) return {g.m, 128, false};
  const std::int64_t wanted = g.m >= 2048 ? 256 : g.m >= 768 ? 128 : 64;
  const std::int64_t tiles = ceil_div(ceil_div(g.m, wanted), 2) * 2;
  return {ceil_div(ceil_div(g.m, tiles), 16) * 16, g.n, false};
}

template <class T>
Gemm<T> tile_of(const Gemm<T>& g, Tiling tiling, std::int64_t index) {
  const std::int64_t across = ceil_div(g.n, tiling.columns), down = ceil_div(g.m, tiling.rows);
  const std::int64_t j = index % across * tiling.columns, i = index / across % down * tiling.rows;
  const std::int64_t batch = index / (across * down) * tiling.matrices;
  Gemm<T> t = g;
  t.m = std::min(tiling.rows, g.m - i);
  t.n = std::min(tiling.columns, g.n - j);
  t.batch = std::min(tiling.matrices, g.batch - batch);
  t.a += batch * g.stride_a + (g.transpose_a ? i : i * g.lda);
  t.b += batch * g.stride_b + (g.transpose_b ? j * g.ldb : j);
  t.c += batch * g.stride_c + i * g.ldc + j;
  if (t.bias) t.bias += j;
  return t;
}

template <class T>
void add_bias(const Gemm<T>& g) {
  for (std::int64_t i = 0; i < g.m; ++i) {
    T* c = g.c + i * g.ldc;
    for (std::int64_t j = 0; j < g.n; ++j) c[j] += g.bias[j];
  }
}

template <class T>
bool run_tile(const Gemm<T>& g, bool small) noexcept
  requires std::is_same_v<T, compute_t<T>>
{
  bool ok = true;
  if (g.k == 0) {
    for (std::int64_t i = 0; i < g.m && !g.accumulate; ++i) std::fill_n(g.c + i * g.ldc, g.n, T(0));
  } else if (!small) {
    ok = library_tile(g);
  } else if (g.transpose_b) {
    small_transposed_b(g);
  } else {
    small_plain_b(g);
  }
  if (g.bias) add_bias(g);
  return ok;
}

/// The library alone multiplies bf16, and adds the bias before it rounds.
template <std::same_as<BFloat16> T>
bool run_tile(const Gemm<T>& g, bool) noexcept {
  return library_tile(g);
}

/// Whether one transposition of B pays for itself: libraries are slower on rows along k, and pack B for every
/// tile.
template <class T>
bool worth_transposing(const Gemm<T>& g, const Tiling& tiling) {
  const bool one_b = g.batch == 1 || g.stride_b == 0;
  return g.transpose_b && !tiling.small && one_b && g.m * g.batch >= 64 && g.k > 0;
}

template <class T>
void run_tiles(Gemm<T> g) {
  if (g.m == 0 || g.n == 0 || g.batch == 0) return;
  const Tiling tiling = tiling_of(g);
  Scratch<float> columns;
  if constexpr (std::is_same_v<T, float>) {
    if (worth_transposing(g, tiling)) {
      columns = scratch<float>(g.k * g.n);
      check<OutOfMemoryError>(columns != nullptr, "gemm: no memory for {} bytes of working space",
                              g.k * g.n * 4);
      const std::int64_t grain = std::max<std::int64_t>(1, (1 << 15) / g.k / lanes<float>) * lanes<float>;
      parallel_for(g.n, grain,
                   [&](std::int64_t begin, std::int64_t end) { transpose_b(g, begin, end, columns.get()); });
      g.b = columns.get(), g.ldb = g.n, g.transpose_b = false;
    }
  }
  const std::int64_t tiles =
      ceil_div(g.m, tiling.rows) * ceil_div(g.n, tiling.columns) * ceil_div(g.batch, tiling.matrices);
  // Tiny products of a batch share a tile of work, or starting threads would cost more than they do.
  const std::int64_t work =
      std::min(tiling.rows, g.m) * std::min(tiling.columns, g.n) * g.k * tiling.matrices;
  const std::int64_t grain = std::max<std::int64_t>(1, (1 << 17) / std::max<std::int64_t>(work, 1));
  std::atomic<bool> ok{true};
  std::optional<detail::SignalsHeld> held;  // by the caller's thread: its helpers always do
  if constexpr (has_onednn && std::is_same_v<T, float>)
    if (!tiling.small && onednn_leaves_stack()) held.emplace();
  parallel_for(tiles, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      if (!run_tile(tile_of(g, tiling, t), tiling.small)) ok.store(false, std::memory_order_relaxed);
    }
  });
  check<InternalError>(ok,
                       "gemm: the matrix library failed on {}x{} times {}x{}, most likely for lack of memory",
                       g.m, g.k, g.k, g.n);
}

// ---- Halves: through float, but for bf16 where library and processor multiply it as it is.

/// Elements that a matrix and its batch span, from the first to one past the last.
std::int64_t extent(std::int64_t rows, std::int64_t columns, std::int64_t ld) {
  return rows == 0 || columns == 0 ? 0 : (rows - 1) * ld + columns;
}

template <class To, class From>
std::unique_ptr<To[]> converted(const From* from, std::int64_t count) {
  auto to = std::make_unique_for_overwrite<To[]>(static_cast<std::size_t>(count));
  parallel_for(count, 1 << 16, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) to[i] = To(from[i]);
  });
  return to;
}

template <class T>
void gemm_through_float(const Gemm<T>& g) {
  const std::int64_t last = g.batch - 1;
  const auto rows = [](bool transposed, std::int64_t r, std::int64_t c, std::int64_t ld) {
    return transposed ? extent(c, r, ld) : extent(r, c, ld);
  };
  const auto a = converted<float>(g.a, last * g.stride_a + rows(g.transpose_a, g.m, g.k, g.lda));
  const auto b = converted<float>(g.b, last * g.stride_b + rows(g.transpose_b, g.k, g.n, g.ldb));
  const auto bias = g.bias ? converted<float>(g.bias, g.n) : nullptr;
  const auto c = std::make_unique_for_overwrite<float[]>(static_cast<std::size_t>(g.batch * g.m * g.n));
  run_tiles(Gemm<float>{.m = g.m,
                        .n = g.n,
                        .k = g.k,
                        .a = a.get(),
                        .lda = g.lda,
                        .transpose_a = g.transpose_a,
                        .b = b.get(),
                        .ldb = g.ldb,
                        .transpose_b = g.transpose_b,
                        .c = c.get(),
                        .ldc = g.n,
                        .accumulate = false,
                        .bias = bias.get(),
                        .batch = g.batch,
                        .stride_a = g.stride_a,
                        .stride_b = g.stride_b,
                        .stride_c = g.m * g.n});
  parallel_for(g.batch * g.m, 64, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      T* out = g.c + r / g.m * g.stride_c + r % g.m * g.ldc;
      const float* row = c.get() + r * g.n;
      for (std::int64_t j = 0; j < g.n; ++j) out[j] = T(g.accumulate ? float(out[j]) + row[j] : row[j]);
    }
  });
}

}  // namespace

template <class T>
void gemm(const Gemm<T>& g) {
  if constexpr (std::is_same_v<T, compute_t<T>>) return run_tiles(g);
  if (g.m == 0 || g.n == 0 || g.batch == 0) return;
  if constexpr (has_onednn && std::is_same_v<T, BFloat16>) {
    if (g.m * g.n * g.k >= onednn_work_bf16 && onednn_multiplies_bf16(g.k)) return run_tiles(g);
  }
  if constexpr (!std::is_same_v<T, compute_t<T>>) gemm_through_float(g);
}

[[gnu::used]] const auto gemm_instances =
    instances_for<floating_dtypes>([]<class T>() { return std::tuple(&gemm<T>); });

}  // namespace sherd::cpu
