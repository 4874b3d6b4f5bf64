#include "runtime/cpu/attention.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <span>

#include "runtime/cpu/rows.h"
#include "runtime/cpu/scratch.h"
#include "runtime/error.h"
#include "runtime/ops.h"
#include "runtime/ops/attention.h"
#include "runtime/parallel.h"
#include "runtime/random.h"
#include "runtime/replay.h"

namespace sherd::cpu {
namespace {

constexpr int L = lanes<float>;
constexpr int R = 8;          // rows of a register tile
constexpr int panel = 2 * L;  // columns of a register tile
constexpr int strip = 2 * R;  // query rows that backward takes at a time
constexpr float lowest = -std::numeric_limits<float>::infinity();

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

/// Hands out parts of one allocation. With null memory it only adds up the size that the allocation needs.
struct Arena {
  float* memory = nullptr;
  std::int64_t used = 0;

  float* take(std::int64_t floats) {
    float* part = memory ? memory + used : nullptr;
    used += round_up(floats, L);
    return part;
  }
};

/// What one (batch, head) pair works on.
struct Head {
  const Attention& a;
  std::int64_t index;  // batch * heads + head
  std::int64_t padded_width = round_up(a.width, L);
  std::int64_t padded_keys = round_up(a.keys, panel);
  std::int64_t score_row = padded_keys + L;  // no power of two: rows would share cache sets

  template <class T>
  T* row(const Heads<T>& x, std::int64_t i) const {
    return x.data + index / a.heads * x.batch + index % a.heads / x.share * x.head + i * x.row;
  }
  bool masked() const { return a.mask.seen != nullptr || a.mask.added != nullptr; }
  /// Where the mask's row of query `i` begins.
  std::int64_t mask_row(std::int64_t i) const {
    return index / a.heads * a.mask.batch + index % a.heads * a.mask.head + i * a.mask.row;
  }
  /// Number of keys that query `i` attends to.
  std::int64_t seen(std::int64_t i) const {
    return a.causal ? std::clamp<std::int64_t>(i + a.keys - a.queries + 1, 0, a.keys) : a.keys;
  }
  std::int64_t panel_floats() const { return padded_keys * padded_width; }
  std::int64_t copy_floats() const { return padded_width == a.width ? 0 : a.keys * padded_width; }
  std::int64_t sum_floats() const { return round_up(a.keys, R) * padded_width; }
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
struct RightRows {
  const float* data;
  std::int64_t row;
};
RightRows plain_rows(const Head& h, const Heads<const float>& x, float* copy) {
  if (h.padded_width == h.a.width) return {h.row(x, 0), x.row};
  copy_rows(h, x, 0, h.a.keys, h.a.keys, 1.f, copy);
  return {copy, h.padded_width};
}

/// Neighbouring keys, of whole panels up to the last key.
struct KeyRun {
  std::int64_t begin = 0, end = 0;

  /// How many of them come before `n`.
  std::int64_t before(std::int64_t n) const { return std::clamp<std::int64_t>(n - begin, 0, end - begin); }
};
using KeyRuns = std::span<const KeyRun>;

/// The first `count` of the keys at `seen`, a byte each, or at `added`: zeros and -inf beyond.
Lanes<std::uint32_t> mask_at(const std::uint8_t* seen, std::int64_t count) {
  if (count == L) return load_u8(seen);
  std::uint8_t some[L] = {};
  std::memcpy(some, seen, static_cast<std::size_t>(count));
  return load_u8(some);
}
Lanes<float> mask_at(const float* added, std::int64_t count) {
  return Lanes<float>(count == L ? load(added) : first_lanes(load_part(added, count), count, lowest));
}

/// Whether the mask shows query `i` a key of [begin, end).
bool any_seen(const Head& h, std::int64_t i, std::int64_t begin, std::int64_t end) {
  const std::int64_t row = h.mask_row(i) + begin;
  bool found = false;
  for_vectors<float>(end - begin, [&](std::int64_t j, std::int64_t count) {
    if (h.a.mask.seen != nullptr)
      found |= any(mask_at(h.a.mask.seen + row + j, count) != Lanes<std::uint32_t>(0));
    else
      found |= any(mask_at(h.a.mask.added + row + j, count) != Lanes<float>(lowest));
  });
  return found;
}

/// The keys that one of `count` queries from `i` sees; work on others is left out. Written to `space`.
KeyRuns runs_of(const Head& h, std::int64_t i, std::int64_t count, KeyRun* space) {
  const std::int64_t seen = h.seen(i + count - 1);
  if (!h.masked()) {
    space[0] = {0, seen};
    return {space, seen > 0 ? 1u : 0u};
  }
  const std::int64_t rows = h.a.mask.row == 0 ? 1 : count;
  std::size_t n = 0;
  for (std::int64_t begin = 0; begin < seen; begin += panel) {
    const std::int64_t end = std::min(begin + panel, seen);
    bool any = false;
    for (std::int64_t r = 0; r < rows && !any; ++r) any = any_seen(h, i + r, begin, end);
    if (!any) continue;
    if (n > 0 && space[n - 1].end == begin)
      space[n - 1].end = end;
    else
      space[n++] = {begin, end};
  }
  return {space, n};
}

/// Room for the runs of a row of keys, each of which but the last has a panel behind it that is none's.
KeyRun* take_runs(const Head& h, Arena& arena) {
  const std::int64_t most = h.padded_keys / panel / 2 + 1;
  return reinterpret_cast<KeyRun*>(
      arena.take(most * static_cast<std::int64_t>(sizeof(KeyRun) / sizeof(float))));
}

/// Scores of query `i` with `n` keys from `begin` on: -inf where the mask hides one, else with what it adds.
/// The row is writable up to a multiple of L.
void mask_scores(const Head& h, std::int64_t i, std::int64_t begin, std::int64_t n, float* scores) {
  if (!h.masked()) return;
  const std::int64_t row = h.mask_row(i) + begin;
  for_vectors<float>(n, [&](std::int64_t j, std::int64_t count) {
    const Lanes<float> score(load(scores + j)), hidden(lowest);
    if (h.a.mask.seen != nullptr) {
      const auto seen = mask_at(h.a.mask.seen + row + j, count);
      store(scores + j, where(seen != Lanes<std::uint32_t>(0), score, hidden).vector());
    } else {
      const Lanes<float> added = mask_at(h.a.mask.added + row + j, count);
      store(scores + j, where(added == hidden, hidden, score + added).vector());
    }
  });
}

/// Scores of the queries in `query` with the keys of `runs` before `limit`.
void products(const Head& h, KeyRuns runs, std::int64_t limit, const float* query, const float* columns,
              float* scores) {
  for (const KeyRun run : runs)
    tile_row<Store::write>(run.before(limit), h.a.width, query, h.padded_width, 1,
                           columns + run.begin * h.padded_width, panel, panel * h.padded_width,
                           scores + run.begin, h.score_row);
}

/// out = the sum of `rows` times weights over the keys of `runs` before `limit`.
void mix(const Head& h, KeyRuns runs, std::int64_t limit, const float* weights, const RightRows& rows,
         float* out) {
  bool none = true;
  for (const KeyRun run : runs) {
    const std::int64_t n = run.before(limit);
    if (n == 0) continue;
    const auto product = none ? &tile_row<Store::write> : &tile_row<Store::add>;
    product(h.padded_width, n, weights + run.begin, h.score_row, 1, rows.data + run.begin * rows.row,
            rows.row, panel, out, h.padded_width);
    none = false;
  }
  if (none) std::fill_n(out, R * h.padded_width, 0.f);
}

/// Of the first `n` elements; the row is readable up to a multiple of L.
float maximum(const float* x, std::int64_t n) {
  Vec<float> top = splat(lowest);
  for (std::int64_t j = 0; j < n; j += L) {
    const Vec<float> v = first_lanes(load(x + j), n - j, lowest);
    top = v > top ? v : top;
  }
  return largest(top);
}

/// x = e^(x - shift) on [0, n), zeros on [n, end); gives their sum. `end` is a multiple of L.
float exponentials(float* x, std::int64_t n, std::int64_t end, float shift) {
  Vec<float> total{};
  std::int64_t j = 0;
  for (; j < n; j += L) {
    const Lanes<float> e = math::exp(Lanes<float>(load(x + j)) - Lanes<float>(shift));
    const Vec<float> v = first_lanes(e.vector(), n - j, 0.f);
    store(x + j, v);
    total = total + v;
  }
  for (; j < end; j += L) store(x + j, Vec<float>{});
  return sum(total);
}

/// 1 / (1 - p) where the weight (i, j) is kept and 0 where it is dropped, for j in [begin, n); begin is a
/// multiple of 4.
struct Mask {
  std::uint32_t* words;
  float* factors;

  Mask(const Head& h, Arena& arena)
      : words(reinterpret_cast<std::uint32_t*>(arena.take(h.a.dropout > 0 ? round_up(h.a.keys, 4) : 0))),
        factors(arena.take(h.a.dropout > 0 ? h.a.keys : 0)) {}

  const float* row(const Head& h, std::int64_t i, std::int64_t begin, std::int64_t n) const {
    const Attention& a = h.a;
    const std::uint64_t row = static_cast<std::uint64_t>(h.index * a.queries + i);
    const std::uint64_t counters = static_cast<std::uint64_t>((a.keys + 3) / 4);
    const std::uint64_t skipped = static_cast<std::uint64_t>(begin / 4);
    philox_words({a.random.seed, a.random.offset + row * counters + skipped},
                 std::max<std::int64_t>(n - begin + 3, 0) / 4, words + begin);
    const std::uint32_t threshold = drop_threshold(a.dropout);
    const float factor = a.dropout < 1 ? static_cast<float>(1 / (1 - a.dropout)) : 0.f;
    for (std::int64_t j = begin; j < n; ++j) factors[j] = words[j] < threshold ? 0.f : factor;
    return factors;
  }
};

struct ForwardSpace {
  float *columns, *copy, *query, *out, *scores;
  KeyRun* runs;
  Mask mask;

  ForwardSpace(const Head& h, Arena& arena)
      : columns(arena.take(h.panel_floats())),
        copy(arena.take(h.copy_floats())),
        query(arena.take(R * h.padded_width)),
        out(arena.take(R * h.padded_width)),
        scores(arena.take(R * h.score_row)),
        runs(take_runs(h, arena)),
        mask(h, arena) {}
};

/// Scores of the rows from `i` with the keys of `runs` become weights; `totals` are the sums to divide by.
void weigh(const Head& h, const ForwardSpace& space, KeyRuns runs, std::int64_t i, std::int64_t count,
           const AttentionRows<float>& rows, float* totals) {
  for (std::int64_t r = 0; r < count; ++r) {
    float* row = space.scores + r * h.score_row;
    const std::int64_t n = h.seen(i + r), at = h.index * h.a.queries + i + r;
    float top = lowest;
    for (const KeyRun run : runs) {
      mask_scores(h, i + r, run.begin, run.before(n), row + run.begin);
      const float most = maximum(row + run.begin, run.before(n));
      top = most > top ? most : top;
    }
    // All scores of a row that sees nothing are -inf, and the difference of two such is NaN.
    if (top == lowest && h.masked() && !any_seen(h, i + r, 0, n)) top = 0;
    totals[r] = 0;
    for (const KeyRun run : runs)
      totals[r] += exponentials(row + run.begin, run.before(n), round_up(run.end, L) - run.begin, top);
    rows.logsumexp[at] = rows.largest ? math::log(totals[r]) : top + math::log(totals[r]);
    if (rows.largest) rows.largest[at] = top;
    if (h.a.dropout == 0 || runs.empty()) continue;
    const float* kept = space.mask.row(h, i + r, runs.front().begin, n);
    for (const KeyRun run : runs)
      for (std::int64_t j = run.begin; j < run.begin + run.before(n); ++j) row[j] *= kept[j];
  }
}

void forward(const Head& h, const ForwardSpace& space, const Heads<float>& o,
             const AttentionRows<float>& rows) {
  const Attention& a = h.a;
  pack_columns(h, a.k, space.columns);
  const RightRows values = plain_rows(h, a.v, space.copy);
  for (std::int64_t i = 0; i < a.queries; i += R) {
    const std::int64_t count = std::min<std::int64_t>(R, a.queries - i);
    const KeyRuns runs = runs_of(h, i, count, space.runs);
    copy_rows(h, a.q, i, count, R, a.scale, space.query);
    products(h, runs, a.keys, space.query, space.columns, space.scores);
    float totals[R];
    weigh(h, space, runs, i, count, rows, totals);
    mix(h, runs, a.keys, space.scores, values, space.out);
    for (std::int64_t r = 0; r < count; ++r) {
      // A row that sees nothing has the sum 0 and gives zeros; NaN stays.
      const float factor = totals[r] == 0 ? 0.f : 1 / totals[r];
      const float* from = space.out + r * h.padded_width;
      float* to = h.row(o, i + r);
      for (std::int64_t d = 0; d < a.width; ++d) to[d] = from[d] * factor;
    }
  }
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

struct BackwardSpace {
  float *key_columns, *value_columns, *copy, *key_sums, *value_sums;
  float *query, *grad, *query_grad;  // of a strip of rows, padded
  float *weights, *scores;           // strip x keys: the weights, then the gradient of the scores
  KeyRun* runs;
  Mask mask;

  BackwardSpace(const Head& h, Arena& arena)
      : key_columns(arena.take(h.panel_floats())),
        value_columns(arena.take(h.panel_floats())),
        copy(arena.take(h.copy_floats())),
        key_sums(arena.take(h.sum_floats())),
        value_sums(arena.take(h.sum_floats())),
        query(arena.take(strip * h.padded_width)),
        grad(arena.take(strip * h.padded_width)),
        query_grad(arena.take(strip * h.padded_width)),
        weights(arena.take(strip * h.score_row)),
        scores(arena.take(strip * h.score_row)),
        runs(take_runs(h, arena)),
        mask(h, arena) {}
};

/// Zeros in the keys of `runs`, up to whole vectors.
void clear(KeyRuns runs, float* row) {
  for (const KeyRun run : runs) std::fill(row + run.begin, row + round_up(run.end, L), 0.f);
}

/// Row `i`: `p` holds scores and becomes weights (as forward used them), `s` holds the gradient of the
/// weights and becomes that of the scores. Both are zero in keys of `runs` that the row does not see.
void score_gradient(const Head& h, const AttentionGradient& g, const Mask& mask, KeyRuns runs, std::int64_t i,
                    float* p, float* s) {
  const std::int64_t n = h.seen(i), at = h.index * h.a.queries + i;
  if (n == 0 || runs.empty() || g.rows.logsumexp[at] == lowest) {
    clear(runs, p);
    clear(runs, s);
    return;
  }
  const float delta = dot(h.row(g.o, i), h.row(g.go, i), h.a.width);
  const float* kept = h.a.dropout > 0 ? mask.row(h, i, runs.front().begin, n) : nullptr;
  for (const KeyRun run : runs) {
    const std::int64_t end = run.begin + run.before(n), rounded = round_up(run.end, L);
    mask_scores(h, i, run.begin, end - run.begin, p + run.begin);
    if (g.rows.largest)
      for (std::int64_t j = run.begin; j < end; ++j) p[j] -= g.rows.largest[at];
    exponentials(p + run.begin, end - run.begin, rounded - run.begin, g.rows.logsumexp[at]);
    if (kept) {
      for (std::int64_t j = run.begin; j < end; ++j) s[j] = p[j] * (s[j] * kept[j] - delta);
      for (std::int64_t j = run.begin; j < end; ++j) p[j] *= kept[j];
    } else {
      for (std::int64_t j = run.begin; j < end; ++j) s[j] = p[j] * (s[j] - delta);
    }
    std::fill(s + end, s + rounded, 0.f);
  }
}

/// Half a strip of rows from `i` on: weights, gradient of the scores, and the gradient of the queries before
/// scaling.
void backward_half(const Head& h, const BackwardSpace& space, const AttentionGradient& g,
                   const RightRows& keys, KeyRuns runs, std::int64_t i, std::int64_t half,
                   std::int64_t count) {
  const std::int64_t rows = std::clamp<std::int64_t>(count - half, 0, R);
  const std::int64_t seen = rows > 0 ? h.seen(i + half + rows - 1) : 0, at = half * h.padded_width;
  float* p = space.weights + half * h.score_row;
  float* s = space.scores + half * h.score_row;
  products(h, runs, seen, space.query + at, space.key_columns, p);
  products(h, runs, seen, space.grad + at, space.value_columns, s);
  for (std::int64_t r = 0; r < R; ++r, p += h.score_row, s += h.score_row) {
    if (r < rows) {
      score_gradient(h, g, space.mask, runs, i + half + r, p, s);
    } else {
      clear(runs, p);
      clear(runs, s);
    }
  }
  mix(h, runs, seen, space.scores + half * h.score_row, keys, space.query_grad + at);
}

void backward(const Head& h, const BackwardSpace& space, const AttentionGradient& g) {
  const Attention& a = h.a;
  pack_columns(h, a.k, space.key_columns);
  pack_columns(h, a.v, space.value_columns);
  const RightRows keys = plain_rows(h, a.k, space.copy);
  std::fill_n(space.key_sums, h.sum_floats(), 0.f);
  std::fill_n(space.value_sums, h.sum_floats(), 0.f);
  for (std::int64_t i = 0; i < a.queries; i += strip) {
    const std::int64_t count = std::min<std::int64_t>(strip, a.queries - i);
    const KeyRuns runs = runs_of(h, i, count, space.runs);
    copy_rows(h, a.q, i, count, strip, a.scale, space.query);
    copy_rows(h, g.go, i, count, strip, 1.f, space.grad);
    for (std::int64_t half = 0; half < strip; half += R)
      backward_half(h, space, g, keys, runs, i, half, count);
    for (std::int64_t r = 0; r < count; ++r) {
      const float* from = space.query_grad + r * h.padded_width;
      float* to = h.row(g.gq, i + r);
      for (std::int64_t d = 0; d < a.width; ++d) to[d] = from[d] * a.scale;
    }
    for (const KeyRun run : runs)
      for (std::int64_t j = run.begin; j < run.end; j += R) {
        tile_row<Store::add>(h.padded_width, strip, space.weights + j, 1, h.score_row, space.grad,
                             h.padded_width, panel, space.value_sums + j * h.padded_width, h.padded_width);
        tile_row<Store::add>(h.padded_width, strip, space.scores + j, 1, h.score_row, space.query,
                             h.padded_width, panel, space.key_sums + j * h.padded_width, h.padded_width);
      }
  }
  write_rows(h, space.key_sums, g.gk);
  write_rows(h, space.value_sums, g.gv);
}

/// Calls `body(head, space)` for every (batch, head) pair; small heads share a tile.
template <class Space, class F>
void for_heads(const Attention& a, const F& body) {
  if (a.batch * a.heads == 0) return;
  Arena counted;
  Space(Head{a, 0}, counted);
  const std::int64_t work = std::max<std::int64_t>(a.queries * a.keys * a.width, 1);
  const std::int64_t grain = std::max<std::int64_t>(1, (1 << 19) / work);
  std::atomic<bool> ok{true};
  parallel_for(a.batch * a.heads, grain, [&](std::int64_t begin, std::int64_t end) {
    const auto memory = scratch<float>(counted.used);
    if (!memory) return ok.store(false, std::memory_order_relaxed);
    Arena arena{memory.get()};
    const Space space(Head{a, begin}, arena);
    for (std::int64_t i = begin; i < end; ++i) body(Head{a, i}, space);
  });
  check<OutOfMemoryError>(ok, "attention: no memory for {} bytes of working space ({} keys of width {})",
                          counted.used * 4, a.keys, a.width);
}

}  // namespace

void attention(const Attention& a, Heads<float> o, AttentionRows<float> rows) {
  for_heads<ForwardSpace>(a, [&](const Head& h, const ForwardSpace& s) { forward(h, s, o, rows); });
}

void attention_backward(const Attention& a, const AttentionGradient& g) {
  for_heads<BackwardSpace>(a, [&](const Head& h, const BackwardSpace& s) { backward(h, s, g); });
}

namespace {

template <class T>
Heads<T> heads_of(const Tensor& t) {
  return {reinterpret_cast<T*>(t.raw()), t.strides()[0], t.strides()[1], t.strides()[2]};
}

/// f32 with a contiguous head width, as the kernel wants it; other floats are computed in f32.
Tensor as_f32(const Tensor& t) {
  const Tensor wide = to(t, DType::f32);
  return wide.strides()[3] == 1 || wide.shape()[3] <= 1 ? wide : clone(wide);
}

/// (B, T, 3, H, D) parts of a packed projection as (B, H, T, D) views.
Tensor part(const Tensor& qkv, std::int64_t heads, int which) {
  const std::int64_t b = qkv.shape()[0], t = qkv.shape()[1], width = qkv.shape()[2] / 3, d = width / heads;
  return alias(qkv, {Shape{b, heads, t, d}, Shape{qkv.strides()[0], d, qkv.strides()[1], 1},
                     qkv.layout().offset + which * width});
}

/// (B, T, H D) as (B, H, T, D).
Tensor split_heads(const Tensor& y, std::int64_t heads) {
  const std::int64_t b = y.shape()[0], t = y.shape()[1], d = y.shape()[2] / heads;
  return alias(y, {Shape{b, heads, t, d}, Shape{y.strides()[0], d, y.strides()[1], 1}, y.layout().offset});
}

/// A mask for scores (B, H, Tq, Tk) with contiguous keys; other axes that it broadcasts along take no memory.
/// Floats are f32.
Tensor mask_rows(const Tensor& mask, const Shape& scores) {
  Shape shape{1, 1, 1, scores[3]};
  for (std::int64_t i = 0; i + 1 < mask.rank(); ++i) shape[4 - mask.rank() + i] = mask.shape()[i];
  Tensor rows = expand(mask.dtype() == DType::boolean ? mask : to(mask, DType::f32), shape);
  if (rows.strides()[3] != 1 && scores[3] > 1) {
    const Tensor dense = empty(shape, {rows.dtype(), Device::cpu()});
    copy_(dense, rows);
    rows = dense;
  }
  return expand(rows, scores);
}

AttentionMask mask_of(const Tensor& rows) {
  AttentionMask mask{.batch = rows.strides()[0], .head = rows.strides()[1], .row = rows.strides()[2]};
  if (rows.dtype() == DType::boolean)
    mask.seen = reinterpret_cast<const std::uint8_t*>(rows.raw());
  else
    mask.added = rows.data<float>();
  return mask;
}

/// Inputs of a call; `mask` may be none.
struct AttentionInputs {
  const Tensor &q, &k, &v;
  const Tensor& mask;
};

/// What they are in f32, which the kernel computes in.
struct WideAttention {
  Tensor q, k, v, mask;
  Attention call;

  WideAttention(const ops::AttentionRule& rule, const AttentionInputs& in)
      : q(as_f32(in.q)), k(as_f32(in.k)), v(as_f32(in.v)) {
    const Shape scores{q.shape()[0], q.shape()[1], q.shape()[2], k.shape()[2]};
    call.batch = scores[0];
    call.heads = scores[1];
    call.queries = scores[2];
    call.keys = scores[3];
    call.width = q.shape()[3];
    call.scale = static_cast<float>(rule.scale);
    call.causal = rule.causal;
    call.dropout = rule.dropout;
    call.random = key_to_draw(rule.key);
    call.q = heads_of<const float>(q);
    call.k = heads_of<const float>(k);
    call.v = heads_of<const float>(v);
    call.k.share = call.v.share = call.heads / std::max<std::int64_t>(k.shape()[1], 1);
    if (!in.mask.defined()) return;
    mask = mask_rows(in.mask, scores);
    call.mask = mask_of(mask);
  }
};

/// Of the tensor that a forward wrote, whose second half is there with a mask that is added.
template <class T>
AttentionRows<T> rows_of(const Tensor& rows, const Tensor& mask) {
  T* first = reinterpret_cast<T*>(rows.raw());
  const bool adds = mask.defined() && mask.dtype() != DType::boolean;
  return {first, adds ? first + rows.numel() / 2 : nullptr};
}

void forward(const ops::AttentionRule& rule, const AttentionInputs& in, const Tensor& o, const Tensor& rows) {
  if (o.numel() == 0) return;
  const WideAttention wide(rule, in);
  const Tensor of = o.dtype() == DType::f32 ? o : empty(o.shape(), {DType::f32, Device::cpu()});
  attention(wide.call, heads_of<float>(of), rows_of<float>(rows, in.mask));
  if (!of.is(o)) copy_(o, of);
}

/// Where the kernel writes a gradient for `heads` heads: in its place, or in f32 beside it.
Tensor gradient_target(const Tensor& g, std::int64_t heads) {
  if (g.dtype() == DType::f32 && g.shape()[1] == heads) return g;
  const Shape& s = g.shape();
  return empty({s[0], heads, s[2], s[3]}, {DType::f32, Device::cpu()});
}

/// Takes over what the kernel wrote, summed over heads that share one.
void take_gradient(const Tensor& g, const Tensor& written) {
  if (written.is(g)) return;
  const Shape& s = g.shape();
  const std::int64_t heads = written.shape()[1];
  copy_(g, heads == s[1] ? written : sum(reshape(written, {s[0], s[1], heads / s[1], s[2], s[3]}), {2}));
}

/// What a backward reads beside the inputs, and the gradients that it writes.
struct WantedGradients {
  const Tensor &go, &o, &rows;
  const Tensor &gq, &gk, &gv;
};

void backward(const ops::AttentionRule& rule, const AttentionInputs& in, const WantedGradients& w) {
  const WideAttention wide(rule, in);
  const Tensor of = as_f32(w.o), gof = as_f32(w.go);
  const std::int64_t heads = in.q.shape()[1];
  const Tensor gq = gradient_target(w.gq, heads), gk = gradient_target(w.gk, heads),
               gv = gradient_target(w.gv, heads);
  attention_backward(wide.call, {heads_of<const float>(of), heads_of<const float>(gof),
                                 rows_of<const float>(w.rows, in.mask), heads_of<float>(gq),
                                 heads_of<float>(gk), heads_of<float>(gv)});
  take_gradient(w.gq, gq);
  take_gradient(w.gk, gk);
  take_gradient(w.gv, gv);
}

void attention_op(const ops::Attention& op, Inputs in, Outputs out) {
  // The kernel computes in f32.
  if (in[0].dtype() == DType::f64)
    sherd::detail::adopt_reference(op.name, op.reference(in), out);
  else
    forward(op.rule, {in[0], in[1], in[2], {}}, out[0], out[1]);
}

void attention_grad_op(const ops::AttentionGrad& op, Inputs in, Outputs out) {
  if (in[1].dtype() == DType::f64) return sherd::detail::adopt_reference(op.name, op.reference(in), out);
  backward(op.rule, {in[1], in[2], in[3], {}}, {in[0], in[4], in[5], out[0], out[1], out[2]});
}

void masked_attention_op(const ops::MaskedAttention& op, Inputs in, Outputs out) {
  if (in[0].dtype() == DType::f64) return sherd::detail::adopt_reference(op.name, op.reference(in), out);
  forward(op.rule, {in[0], in[1], in[2], in[3]}, out[0], out[1]);
}

void masked_attention_grad_op(const ops::MaskedAttentionGrad& op, Inputs in, Outputs out) {
  if (in[1].dtype() == DType::f64) return sherd::detail::adopt_reference(op.name, op.reference(in), out);
  backward(op.rule, {in[1], in[2], in[3], in[4]}, {in[0], in[5], in[6], out[0], out[1], out[2]});
}

void self_attention_op(const ops::SelfAttention& op, Inputs in, Outputs out) {
  if (in[0].dtype() == DType::f64) return sherd::detail::adopt_reference(op.name, op.reference(in), out);
  const Tensor& qkv = in[0];
  forward(op.rule, {part(qkv, op.heads, 0), part(qkv, op.heads, 1), part(qkv, op.heads, 2), {}},
          split_heads(out[0], op.heads), out[1]);
}

void self_attention_grad_op(const ops::SelfAttentionGrad& op, Inputs in, Outputs out) {
  if (in[1].dtype() == DType::f64) return sherd::detail::adopt_reference(op.name, op.reference(in), out);
  if (out[0].numel() == 0) return;
  const Tensor &go = in[0], &qkv = in[1];
  backward(op.rule, {part(qkv, op.heads, 0), part(qkv, op.heads, 1), part(qkv, op.heads, 2), {}},
           {split_heads(go, op.heads), split_heads(in[2], op.heads), in[3], part(out[0], op.heads, 0),
            part(out[0], op.heads, 1), part(out[0], op.heads, 2)});
}

}  // namespace

void add_attention() {
  add_kernel<attention_op>(DeviceType::cpu);
  add_kernel<attention_grad_op>(DeviceType::cpu);
  add_kernel<masked_attention_op>(DeviceType::cpu);
  add_kernel<masked_attention_grad_op>(DeviceType::cpu);
  add_kernel<self_attention_op>(DeviceType::cpu);
  add_kernel<self_attention_grad_op>(DeviceType::cpu);
}

}  // namespace sherd::cpu
