#include "runtime/cpu/attention.h"

#include <algorithm>
#include <atomic>
#include <limits>

#include "runtime/cpu/scratch.h"
#include "runtime/cpu/simd.h"
#include "runtime/error.h"
#include "runtime/parallel.h"
#include "runtime/random.h"

namespace sherd::cpu {
namespace {

constexpr int L = lanes<float>;
constexpr int R = 8;          // rows of a register tile
constexpr int panel = 2 * L;  // columns of a register tile
constexpr int strip = 2 * R;  // query rows that backward takes at a time

constexpr std::int64_t round_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

enum class Store { write, add };

/// C[R x Vecs*L] = or += sum over p of a(r, p) * b[p], with a(r, p) = a[r * row_a + p * step_a].
template <int Vecs, Store store_kind>
void tile(std::int64_t k, const float* a, std::int64_t row_a, std::int64_t step_a, const float* b,
          std::int64_t ldb, float* c, std::int64_t ldc) {
  Vec<float> acc[R][Vecs] = {};
  for (std::int64_t p = 0; p < k; ++p) {
    Vec<float> x[Vecs];
#pragma GCC unroll 8
    for (int v = 0; v < Vecs; ++v) x[v] = load(b + p * ldb + v * L);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec<float> y = splat(a[r * row_a + p * step_a]);
#pragma GCC unroll 8
      for (int v = 0; v < Vecs; ++v) acc[r][v] = fma(y, x[v], acc[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < Vecs; ++v) {
      float* at = c + r * ldc + v * L;
      store(at, store_kind == Store::add ? load(at) + acc[r][v] : acc[r][v]);
    }
  }
}

/// One row of tiles: `columns` (rounded up to L) of C; B in panels when `panel_step` is set, else plain rows.
template <Store store_kind>
void tile_row(std::int64_t columns, std::int64_t k, const float* a, std::int64_t row_a, std::int64_t step_a,
              const float* b, std::int64_t ldb, std::int64_t panel_step, float* c, std::int64_t ldc) {
  for (std::int64_t j = 0; j < columns; j += panel) {
    if (columns - j > L) {
      tile<2, store_kind>(k, a, row_a, step_a, b, ldb, c + j, ldc);
    } else {
      tile<1, store_kind>(k, a, row_a, step_a, b, ldb, c + j, ldc);
    }
    b += panel_step;
  }
}

/// What one (batch, head) pair works on.
struct Head {
  const Attention& a;
  std::int64_t index;  // batch * heads + head
  std::int64_t padded_width = round_up(a.width, L);
  std::int64_t padded_keys = round_up(a.keys, panel);
  std::int64_t score_row = padded_keys + L;  // off the powers of two, where rows would share cache sets

  template <class T>
  T* row(const Heads<T>& x, std::int64_t i) const {
    return x.data + index / a.heads * x.batch + index % a.heads * x.head + i * x.row;
  }
  /// Keys that query `i` sees.
  std::int64_t seen(std::int64_t i) const {
    return a.causal ? std::clamp<std::int64_t>(i + a.keys - a.queries + 1, 0, a.keys) : a.keys;
  }
  std::int64_t panel_floats() const { return padded_keys * padded_width; }
};

/// `count` rows from `first`, times `factor`, zeros in the padding of width and of `rows`.
void copy_rows(const Head& h, const Heads<const float>& x, std::int64_t first, std::int64_t count,
               std::int64_t rows, float factor, float* out) {
  for (std::int64_t r = 0; r < rows; ++r, out += h.padded_width) {
    if (r >= count) {
      std::fill_n(out, h.padded_width, 0.f);
      continue;
    }
    const float* from = h.row(x, first + r);
    for (std::int64_t d = 0; d < h.a.width; ++d) out[d] = from[d] * factor;
    for (std::int64_t d = h.a.width; d < h.padded_width; ++d) out[d] = 0;
  }
}

/// Key rows as columns: panels of `panel` keys, each padded_width x panel.
void pack_columns(const Head& h, const Heads<const float>& x, float* out) {
  for (std::int64_t j = 0; j < h.padded_keys; j += L) {
    float* at = out + j / panel * panel * h.padded_width + j % panel;
    for (std::int64_t d = 0; d < h.padded_width; d += L) {
      const std::int64_t count = std::min<std::int64_t>(L, h.a.width - d);
      Vec<float> rows[L];
      for (int l = 0; l < L; ++l) {
        rows[l] = j + l >= h.a.keys ? Vec<float>{}
                  : count == L      ? load(h.row(x, j + l) + d)
                                    : load_part(h.row(x, j + l) + d, count);
      }
      transpose(rows);
      for (int l = 0; l < L; ++l) store(at + (d + l) * panel, rows[l]);
    }
  }
}

/// Rows for the right side of a product: where they are when the width fills whole vectors, else padded
/// copies.
struct Rows {
  const float* data;
  std::int64_t row;
};
Rows plain_rows(const Head& h, const Heads<const float>& x, float* copy) {
  if (h.padded_width == h.a.width) return {h.row(x, 0), x.row};
  copy_rows(h, x, 0, h.a.keys, h.a.keys, 1.f, copy);
  return {copy, h.padded_width};
}

float maximum(const float* x, std::int64_t n) {
  Vec<float> top = splat(-std::numeric_limits<float>::infinity());
  std::int64_t j = 0;
  for (; j + L <= n; j += L) {
    const Vec<float> v = load(x + j);
    top = v > top ? v : top;
  }
  float best = -std::numeric_limits<float>::infinity();
  for (int l = 0; l < L; ++l) best = top[l] > best ? top[l] : best;
  for (; j < n; ++j) best = x[j] > best ? x[j] : best;
  return best;
}

/// x = e^(x - shift) on [0, n), zeros on [n, end).
void exponentials(float* x, std::int64_t n, std::int64_t end, float shift) {
  for (std::int64_t j = 0; j < n; ++j) x[j] = math::exp(x[j] - shift);
  std::fill(x + n, x + end, 0.f);
}

/// Of a row that is zero up to a multiple of L.
float row_sum(const float* x, std::int64_t end) {
  Vec<float> total{};
  for (std::int64_t j = 0; j < end; j += L) total = total + load(x + j);
  return sum(total);
}

/// 1 / (1 - p) where the weight (i, j) is kept and 0 where it is dropped, for j in [0, n).
class Mask {
 public:
  explicit Mask(const Head& h)
      : h_(h),
        threshold_(drop_threshold(h.a.dropout)),
        factors_(scratch<float>(h.score_row)),
        words_(scratch<std::uint32_t>(round_up(h.a.keys, 4))),
        scale_(h.a.dropout < 1 ? float(1 / (1 - h.a.dropout)) : 0.f) {}
  bool ok() const { return factors_ && words_; }

  const float* row(std::int64_t i, std::int64_t n) {
    const std::uint64_t row = static_cast<std::uint64_t>(h_.index * h_.a.queries + i);
    const std::uint64_t counters = static_cast<std::uint64_t>((h_.a.keys + 3) / 4);
    philox_words({h_.a.random.seed, h_.a.random.offset + row * counters}, (n + 3) / 4, words_.get());
    const std::uint32_t* words = words_.get();
    float* factors = factors_.get();
    for (std::int64_t j = 0; j < n; ++j) factors[j] = words[j] < threshold_ ? 0.f : scale_;
    return factors;
  }

 private:
  const Head& h_;
  std::uint32_t threshold_;
  Scratch<float> factors_;
  Scratch<std::uint32_t> words_;
  float scale_;
};

bool forward(const Head& h, const Heads<float>& o, float* logsumexp) {
  const Attention& a = h.a;
  const auto columns = scratch<float>(h.panel_floats()), copy = scratch<float>(a.keys * h.padded_width);
  const auto query = scratch<float>(R * h.padded_width), out = scratch<float>(R * h.padded_width);
  const auto scores = scratch<float>(R * h.score_row);
  Mask mask(h);
  if (!columns || !copy || !query || !out || !scores || !mask.ok()) return false;
  pack_columns(h, a.k, columns.get());
  const Rows values = plain_rows(h, a.v, copy.get());
  for (std::int64_t i = 0; i < a.queries; i += R) {
    const std::int64_t count = std::min<std::int64_t>(R, a.queries - i), seen = h.seen(i + count - 1);
    const std::int64_t end = round_up(seen, L);
    copy_rows(h, a.q, i, count, R, a.scale, query.get());
    tile_row<Store::write>(seen, a.width, query.get(), h.padded_width, 1, columns.get(), panel,
                           panel * h.padded_width, scores.get(), h.score_row);
    float totals[R];
    for (std::int64_t r = 0; r < count; ++r) {
      float* row = scores.get() + r * h.score_row;
      const std::int64_t n = h.seen(i + r);
      const float top = maximum(row, n);
      exponentials(row, n, end, top);
      totals[r] = row_sum(row, end);
      if (logsumexp) logsumexp[h.index * a.queries + i + r] = top + math::log(totals[r]);
      if (a.dropout == 0) continue;
      const float* kept = mask.row(i + r, n);
      for (std::int64_t j = 0; j < n; ++j) row[j] *= kept[j];
    }
    tile_row<Store::write>(h.padded_width, seen, scores.get(), h.score_row, 1, values.data, values.row, panel,
                           out.get(), h.padded_width);
    for (std::int64_t r = 0; r < count; ++r) {
      const float factor = totals[r] > 0 ? 1 / totals[r] : totals[r] == 0 ? 0.f : totals[r];
      const float* from = out.get() + r * h.padded_width;
      float* to = h.row(o, i + r);
      for (std::int64_t d = 0; d < a.width; ++d) to[d] = from[d] * factor;
    }
  }
  return true;
}

float dot(const float* x, const float* y, std::int64_t n) {
  Vec<float> total{};
  std::int64_t d = 0;
  for (; d + L <= n; d += L) total = fma(load(x + d), load(y + d), total);
  if (d < n) total = fma(load_part(x + d, n - d), load_part(y + d, n - d), total);
  return sum(total);
}

/// Gradients of keys or values gather in padded rows; this writes them out.
void write_rows(const Head& h, const float* from, const Heads<float>& to) {
  for (std::int64_t j = 0; j < h.a.keys; ++j) std::copy_n(from + j * h.padded_width, h.a.width, h.row(to, j));
}

bool backward(const Head& h, const AttentionGradient& g) {
  const Attention& a = h.a;
  const std::int64_t rows_floats = round_up(a.keys, R) * h.padded_width,
                     strip_floats = strip * h.padded_width;
  const auto key_columns = scratch<float>(h.panel_floats()), value_columns = scratch<float>(h.panel_floats());
  const auto copy = scratch<float>(a.keys * h.padded_width);
  const auto key_sums = scratch<float>(rows_floats), value_sums = scratch<float>(rows_floats);
  const auto query = scratch<float>(strip_floats), grad = scratch<float>(strip_floats);
  const auto query_grad = scratch<float>(strip_floats);
  const auto weights = scratch<float>(strip * h.score_row), scores = scratch<float>(strip * h.score_row);
  Mask mask(h);
  if (!key_columns || !value_columns || !copy || !key_sums || !value_sums || !query || !grad || !query_grad ||
      !weights || !scores || !mask.ok()) {
    return false;
  }
  pack_columns(h, a.k, key_columns.get());
  pack_columns(h, a.v, value_columns.get());
  const Rows keys = plain_rows(h, a.k, copy.get());
  std::fill_n(key_sums.get(), rows_floats, 0.f);
  std::fill_n(value_sums.get(), rows_floats, 0.f);
  for (std::int64_t i = 0; i < a.queries; i += strip) {
    const std::int64_t count = std::min<std::int64_t>(strip, a.queries - i), all_seen = h.seen(i + count - 1);
    const std::int64_t end = round_up(all_seen, L);
    copy_rows(h, a.q, i, count, strip, a.scale, query.get());
    copy_rows(h, g.go, i, count, strip, 1.f, grad.get());
    for (std::int64_t half = 0; half < strip; half += R) {
      const std::int64_t seen = half < count ? h.seen(std::min(i + half + R, i + count) - 1) : 0;
      float* p = weights.get() + half * h.score_row;
      float* s = scores.get() + half * h.score_row;
      tile_row<Store::write>(seen, a.width, query.get() + half * h.padded_width, h.padded_width, 1,
                             key_columns.get(), panel, panel * h.padded_width, p, h.score_row);
      tile_row<Store::write>(seen, a.width, grad.get() + half * h.padded_width, h.padded_width, 1,
                             value_columns.get(), panel, panel * h.padded_width, s, h.score_row);
      for (std::int64_t r = 0; r < R; ++r, p += h.score_row, s += h.score_row) {
        const std::int64_t row = i + half + r, n = half + r < count ? h.seen(row) : 0;
        if (n > 0) {
          const float delta = dot(h.row(g.o, row), h.row(g.go, row), a.width);
          exponentials(p, n, end, g.logsumexp[h.index * a.queries + row]);
          if (a.dropout > 0) {
            const float* kept = mask.row(row, n);
            for (std::int64_t j = 0; j < n; ++j) s[j] = p[j] * (s[j] * kept[j] - delta);
            for (std::int64_t j = 0; j < n; ++j) p[j] *= kept[j];
          } else {
            for (std::int64_t j = 0; j < n; ++j) s[j] = p[j] * (s[j] - delta);
          }
        } else {
          std::fill_n(p, end, 0.f);
        }
        std::fill(s + n, s + end, 0.f);
      }
      tile_row<Store::write>(h.padded_width, seen, scores.get() + half * h.score_row, h.score_row, 1,
                             keys.data, keys.row, panel, query_grad.get() + half * h.padded_width,
                             h.padded_width);
    }
    for (std::int64_t r = 0; r < count; ++r) {
      const float* from = query_grad.get() + r * h.padded_width;
      float* to = h.row(g.gq, i + r);
      for (std::int64_t d = 0; d < a.width; ++d) to[d] = from[d] * a.scale;
    }
    for (std::int64_t j = 0; j < all_seen; j += R) {
      tile_row<Store::add>(h.padded_width, strip, weights.get() + j, 1, h.score_row, grad.get(),
                           h.padded_width, panel, value_sums.get() + j * h.padded_width, h.padded_width);
      tile_row<Store::add>(h.padded_width, strip, scores.get() + j, 1, h.score_row, query.get(),
                           h.padded_width, panel, key_sums.get() + j * h.padded_width, h.padded_width);
    }
  }
  write_rows(h, key_sums.get(), g.gk);
  write_rows(h, value_sums.get(), g.gv);
  return true;
}

/// Calls `body` for every (batch, head) pair; heads too small to be worth a thread share one.
template <class F>
void for_heads(const Attention& a, const F& body) {
  const std::int64_t work = std::max<std::int64_t>(a.queries * a.keys * a.width, 1);
  std::atomic<bool> ok{true};
  parallel_for(a.batch * a.heads, std::max<std::int64_t>(1, (1 << 16) / work),
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t i = begin; i < end; ++i) {
                   if (!body(Head{a, i})) ok.store(false, std::memory_order_relaxed);
                 }
               });
  check<OutOfMemoryError>(ok, "attention: no memory for the working space of {} keys of width {}", a.keys,
                          a.width);
}

}  // namespace

void attention(const Attention& a, Heads<float> o, float* logsumexp) {
  for_heads(a, [&](const Head& h) { return forward(h, o, logsumexp); });
}

void attention_backward(const Attention& a, const AttentionGradient& g) {
  for_heads(a, [&](const Head& h) { return backward(h, g); });
}

}  // namespace sherd::cpu
