#include "runtime/cpu/reduce.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <vector>

#include "runtime/cpu/rows.h"
#include "runtime/cpu/scratch.h"
#include "runtime/instances.h"
#include "runtime/ops.h"
#include "runtime/ops/extreme.h"
#include "runtime/ops/prod.h"
#include "runtime/ops/sum.h"
#include "runtime/parallel.h"

namespace sherd::cpu {
namespace {

constexpr std::int64_t piece_width = 1024;  // results that one task makes side by side

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// ---- Sums. The reduced dimension is cut into chunks of a fixed length; every chunk gives a partial result
// of [inner].

/// What elements are compared in, and what they are summed in: sums of integers wrap around.
template <class T>
using compared_t = std::conditional_t<std::is_integral_v<T>, std::int64_t, compute_t<T>>;
template <class T>
using summed_t = std::conditional_t<std::is_integral_v<T>, std::uint64_t, compute_t<T>>;

/// What is summed of an element, or of a vector of them.
struct Itself {
  template <class V>
  V operator()(V x) const {
    return x;
  }
};
struct ItsSquare {
  template <class V>
  V operator()(V x) const {
    return x * x;
  }
};
struct ItsSize {
  template <class V>
  V operator()(V x) const {
    return x < V{} ? -x : x + V{};  // -0 + 0 is +0
  }
};

/// Along contiguous elements.
template <class T, class Of, class C = summed_t<T>>
C sum_row(const T* x, std::int64_t n, Of of) {
  return sum_vectors<C>(n, [&](std::int64_t j, auto count) { return of(take<C>(x + j, count)); });
}

constexpr std::int64_t run = 64;  // rows that are added one after the other; more are a tree over such runs

/// Adds `rows` contiguous rows to `sums`, four at a time.
template <class T, class Of, class C = summed_t<T>>
void add_rows(const T* x, std::int64_t rows, std::int64_t row_stride, std::int64_t columns, C* sums, Of of) {
  if (rows > run) {
    const std::int64_t half = (rows / run + 1) / 2 * run;
    C rest[piece_width];  // so many rows only where they are short (see chunk_of)
    std::fill_n(rest, columns, C(0));
    add_rows(x, half, row_stride, columns, sums, of);
    add_rows(x + half * row_stride, rows - half, row_stride, columns, rest, of);
    for (std::int64_t j = 0; j < columns; ++j) sums[j] += rest[j];
    return;
  }
  std::int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    const T *a = x + r * row_stride, *b = a + row_stride, *c = b + row_stride, *d = c + row_stride;
    for (std::int64_t j = 0; j < columns; ++j)
      sums[j] += (of(C(a[j])) + of(C(b[j]))) + (of(C(c[j])) + of(C(d[j])));
  }
  for (; r < rows; ++r) {
    for (std::int64_t j = 0; j < columns; ++j) sums[j] += of(C(x[r * row_stride + j]));
  }
}

template <class T, class Of, class C = summed_t<T>>
C sum_strided(const T* x, std::int64_t n, std::int64_t stride, Of of) {
  constexpr std::int64_t leaf = 16;
  if (n > leaf) {
    const std::int64_t half = (n / leaf + 1) / 2 * leaf;
    return sum_strided(x, half, stride, of) + sum_strided(x + half * stride, n - half, stride, of);
  }
  C total = 0;
  for (std::int64_t i = 0; i < n; ++i) total += of(C(x[i * stride]));
  return total;
}

/// `n` steps of the reduced dimension from `x`, added to `sums` [inner].
template <class T, class Of, class C = summed_t<T>>
void add_chunk(const Reduction& r, const T* x, std::int64_t n, C* sums, Of of) {
  if (r.inner_stride == 1 && r.inner > 1) return add_rows(x, n, r.reduce_stride, r.inner, sums, of);
  for (std::int64_t j = 0; j < r.inner; ++j, x += r.inner_stride)
    sums[j] += r.reduce_stride == 1 ? sum_row(x, n, of) : sum_strided(x, n, r.reduce_stride, of);
}

/// Steps of the reduced dimension that one task adds up: enough for a thread.
std::int64_t chunk_of(const Reduction& r) {
  return r.inner_stride == 1 && r.inner > 1 ? std::max<std::int64_t>(run, (1 << 16) / r.inner) : 1 << 14;
}

template <class To, class C>
To finished(C total, double divisor) {
  if constexpr (std::is_integral_v<To>) {
    return static_cast<To>(total);
  } else {
    return To(total / static_cast<C>(divisor));
  }
}

/// Calls `body(part, offset into x, offset into the result)` for pieces of [outer, inner] that are each one
/// run of results.
template <class F>
void for_pieces(const Reduction& r, const F& body) {
  const std::int64_t across = ceil_div(r.inner, piece_width);
  const std::int64_t work = r.reduce * std::min(piece_width, r.inner);
  const std::int64_t grain = std::max<std::int64_t>(1, (1 << 15) / std::max<std::int64_t>(work, 1));
  parallel_for(r.outer * across, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      if (across == 1) {
        body(r, t * r.outer_stride, t * r.inner);
        continue;
      }
      const std::int64_t o = t / across, j = t % across * piece_width;
      Reduction part = r;
      part.inner = std::min(piece_width, r.inner - j);
      body(part, o * r.outer_stride + j * r.inner_stride, o * r.inner + j);
    }
  });
}

/// Many results with a short way each.
template <class T, class To, class Of>
void sum_whole(const Reduction& r, const T* x, double divisor, To* out, Of of) {
  using C = summed_t<T>;
  for_pieces(r, [&](const Reduction& part, std::int64_t from, std::int64_t to) {
    if (part.inner == 1 && part.reduce_stride == 1) {
      out[to] = finished<To>(sum_row(x + from, part.reduce, of), divisor);
      return;
    }
    C sums[piece_width];
    std::fill_n(sums, part.inner, C(0));
    add_chunk(part, x + from, part.reduce, sums, of);
    for (std::int64_t j = 0; j < part.inner; ++j) out[to + j] = finished<To>(sums[j], divisor);
  });
}

/// Few results with a long way each: chunks of the reduced dimension first, then a tree over the chunks.
template <class T, class To, class Of>
void sum_chunks(const Reduction& r, std::int64_t chunk, const T* x, double divisor, To* out, Of of) {
  using C = summed_t<T>;
  const std::int64_t chunks = ceil_div(r.reduce, chunk);
  std::vector<C> partial(static_cast<std::size_t>(r.outer * chunks * r.inner));
  parallel_for(r.outer * chunks, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t o = t / chunks, first = t % chunks * chunk;
      add_chunk(r, x + o * r.outer_stride + first * r.reduce_stride, std::min(chunk, r.reduce - first),
                partial.data() + t * r.inner, of);
    }
  });
  for (std::int64_t o = 0; o < r.outer; ++o) {
    C* total = partial.data() + o * chunks * r.inner;
    add_rows_in_pairs(total, chunks, r.inner);
    for (std::int64_t j = 0; j < r.inner; ++j) out[o * r.inner + j] = finished<To>(total[j], divisor);
  }
}

template <class T, class To, class Of>
void sum_of(const Reduction& r, const T* x, double divisor, To* out, Of of) {
  if (r.outer == 0 || r.inner == 0) return;
  const std::int64_t chunk = chunk_of(r);
  if (r.reduce > chunk) return sum_chunks(r, chunk, x, divisor, out, of);
  sum_whole(r, x, divisor, out, of);
}

// ---- Products.

constexpr std::int64_t product_task = 1 << 14;  // elements that one task multiplies

/// The product of `n` rows of `columns` contiguous elements, by halves: the second half is multiplied into
/// the first one, in `half` of (n + 1) / 2 rows, until one row is left.
template <class T, class C>
void multiply_rows(const T* x, std::int64_t n, std::int64_t stride, std::int64_t columns, C* half) {
  const bool dense = stride == columns;  // then both halves are one row each
  const std::int64_t rows = dense ? 1 : n / 2, width = dense ? n / 2 * columns : columns;
  std::int64_t left = (n + 1) / 2;
  for (std::int64_t i = 0; i < rows; ++i) {
    const T *a = x + i * stride, *b = a + left * stride;
    for (std::int64_t j = 0; j < width; ++j) half[i * width + j] = C(a[j]) * C(b[j]);
  }
  for (std::int64_t j = 0; n % 2 != 0 && j < columns; ++j)
    half[n / 2 * columns + j] = C(x[n / 2 * stride + j]);
  for (; left > 1; left = (left + 1) / 2) {
    const std::int64_t pairs = left / 2 * columns;
    const C* second = half + (left + 1) / 2 * columns;
    for (std::int64_t j = 0; j < pairs; ++j) half[j] *= second[j];
  }
}

/// Along contiguous elements: four chains of vectors, then their lanes by halves.
template <class T, class C>
C multiply_row(const T* x, std::int64_t n) {
  constexpr std::int64_t step = lanes<C>;
  const Vec<C> ones = splat(C(1));
  Vec<C> chain[4] = {ones, ones, ones, ones};
  std::int64_t j = 0;
  for (; j + 4 * step <= n; j += 4 * step) {
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) chain[c] = chain[c] * load_as<C>(x + j + c * step);
  }
  for_vectors<C>(n - j,
                 [&](std::int64_t i, auto count) { chain[0] = chain[0] * take<C>(x + j + i, count, C(1)); });
  C lane[step];
  store(lane, (chain[0] * chain[1]) * (chain[2] * chain[3]));
  for (std::int64_t half = step / 2; half > 0; half /= 2)
    for (std::int64_t l = 0; l < half; ++l) lane[l] *= lane[l + half];
  return lane[0];
}

/// Of contiguous tensors. Integers wrap.
template <class T, class To>
void product(const Reduction& r, const T* x, To* out) {
  using C = std::conditional_t<std::is_integral_v<T>, std::uint64_t, compute_t<T>>;
  const std::int64_t chunk = product_task / std::min(r.inner, piece_width);
  if (r.reduce <= chunk) {
    for_pieces(r, [&](const Reduction& part, std::int64_t from, std::int64_t to) {
      if (part.inner == 1 && part.reduce_stride == 1) {
        out[to] = To(multiply_row<T, C>(x + from, part.reduce));
        return;
      }
      C half[product_task / 2 + piece_width];
      multiply_rows(x + from, part.reduce, part.reduce_stride, part.inner, half);
      for (std::int64_t j = 0; j < part.inner; ++j) out[to + j] = To(half[j]);
    });
    return;
  }
  const std::int64_t chunks = r.reduce / chunk, rest = r.reduce % chunk, rows = chunks + (rest > 0);
  std::vector<C> partial(static_cast<std::size_t>(rows * r.inner));
  for (std::int64_t o = 0; o < r.outer; ++o, x += r.outer_stride, out += r.inner) {
    product(Reduction::contiguous(chunks, chunk, r.inner), x, partial.data());
    if (rest > 0)
      product(Reduction::contiguous(1, rest, r.inner), x + chunks * chunk * r.inner,
              partial.data() + chunks * r.inner);
    product(Reduction::contiguous(1, rows, r.inner), static_cast<const C*>(partial.data()), out);
  }
}

/// Turns `n` elements into the gradients of their product, whose own is `gy`, through the product of their
/// halves. Behind them there is room for twice as many.
template <class C>
void differentiate_product(C* x, std::int64_t n, C gy) {
  if (n == 1) {
    *x = gy;
    return;
  }
  const std::int64_t pairs = n / 2, half = n - pairs;
  C *second = x + half, *product = x + n;
  for (std::int64_t i = 0; i < pairs; ++i) product[i] = x[i] * second[i];
  if (half > pairs) product[pairs] = x[pairs];
  differentiate_product(product, half, gy);
  for (std::int64_t i = 0; i < pairs; ++i) {
    const C a = x[i];
    x[i] = product[i] * second[i];
    second[i] = product[i] * a;
  }
  if (half > pairs) x[pairs] = product[pairs];
}

// ---- Largest and smallest.

template <class T>
constexpr bool is_nan(T x) {
  if constexpr (std::is_floating_point_v<T>) return x != x;
  return false;
}

/// Whether `x` replaces `best`: the first of equals stays, the first NaN stays for good.
template <bool largest, class C>
constexpr bool better(C x, C best) {
  return (largest ? x > best : x < best) || (is_nan(x) && !is_nan(best));
}

template <bool largest, class T>
void extreme_strided(const T* x, std::int64_t n, std::int64_t stride, T* out, std::int64_t* index) {
  using C = compared_t<T>;
  C best = C(x[0]);
  std::int64_t at = 0;
  for (std::int64_t i = 1; i < n; ++i) {
    const C v = C(x[i * stride]);
    if (better<largest>(v, best)) best = v, at = i;
  }
  if (out) *out = x[at * stride];
  if (index) *index = at;
}

/// Lane by lane the larger or smaller one. Once `best` is NaN, nothing but NaN replaces it.
template <bool largest, class C>
Vec<C> better_lanes(Vec<C> v, Vec<C> best) {
  auto replaces = largest ? v > best : v < best;
  if constexpr (std::is_floating_point_v<C>) replaces |= v != v;
  return replaces ? v : best;
}

/// Of each lane and the one `half` further on, in a ring.
template <bool largest, int half, int... lane>
Vec<float> fold_lanes(Vec<float> v, std::integer_sequence<int, lane...>) {
  return better_lanes<largest, float>(__builtin_shufflevector(v, v, ((lane + half) % 16)...), v);
}

/// The extreme of sixteen lanes by halves.
template <bool largest>
float extreme_lane(Vec<float> v) {
  constexpr auto lanes = std::make_integer_sequence<int, 16>();
  v = fold_lanes<largest, 8>(v, lanes);
  v = fold_lanes<largest, 4>(v, lanes);
  v = fold_lanes<largest, 2>(v, lanes);
  return fold_lanes<largest, 1>(v, lanes)[0];
}

/// The larger or smaller one of each lane where neither is NaN.
template <bool largest, class C>
Vec<C> further_lanes(Vec<C> v, Vec<C> best) {
  return (largest ? v > best : v < best) ? v : best;
}

/// `choose(v, best, chain)` over all vectors of a row, as four chains that begin at `first`.
template <class C, class T, class F>
void run_chains(const T* x, std::int64_t n, C first, Vec<C> (&chain)[4], const F& choose) {
  constexpr std::int64_t step = lanes<C>;
  for (Vec<C>& c : chain) c = splat(first);
  std::int64_t j = 0;
  for (; j + 4 * step <= n; j += 4 * step) {
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) chain[c] = choose(load_as<C>(x + j + c * step), chain[c], c);
  }
  for_vectors<C>(n - j, [&](std::int64_t i, auto count) {
    chain[0] = choose(take<C>(x + j + i, count, first), chain[0], 0);
  });
}

/// Extremes as if there were no NaN; false where there may be one, because the elements' sum is.
template <bool largest, class T, class C>
bool run_without_nan(const T* x, std::int64_t n, C first, Vec<C> (&chain)[4]) {
  Vec<C> sums[4] = {};
  run_chains(x, n, first, chain, [&](Vec<C> v, Vec<C> best, int c) {
    sums[c] += v;
    return further_lanes<largest, C>(v, best);
  });
  return !is_nan(sherd::cpu::sum((sums[0] + sums[1]) + (sums[2] + sums[3])));
}

/// The same along contiguous elements: the value by four chains of vectors, then its first place.
template <bool largest, class T>
void extreme_row(const T* x, std::int64_t n, T* out, std::int64_t* index) {
  using C = compared_t<T>;
  const C first = C(x[0]);
  Vec<C> chain[4];
  bool done = false;
  if constexpr (std::is_floating_point_v<C>) done = run_without_nan<largest>(x, n, first, chain);
  if (!done)
    run_chains(x, n, first, chain,
               [](Vec<C> v, Vec<C> best, int) { return better_lanes<largest, C>(v, best); });
  const Vec<C> top = better_lanes<largest, C>(better_lanes<largest, C>(chain[3], chain[2]),
                                              better_lanes<largest, C>(chain[1], chain[0]));
  C best = top[0];
  if constexpr (lanes<C> == 16) {
    best = extreme_lane<largest>(top);
  } else {
    for (int l = 1; l < lanes<C>; ++l) best = better<largest>(top[l], best) ? top[l] : best;
  }
  if (out) *out = T(best);
  const bool zero = std::is_floating_point_v<C> && best == 0;  // whose signs are equal too: the first's
  if (!index && !zero) return;
  std::int64_t at = 0;
  while (!(C(x[at]) == best || (is_nan(best) && is_nan(C(x[at]))))) ++at;
  if (out && zero) *out = x[at];
  if (index) *index = at;
}

/// Side by side over contiguous columns of one piece.
template <bool largest, class T>
void extreme_columns(const Reduction& r, const T* x, T* out, std::int64_t* index) {
  using C = compared_t<T>;
  C best[piece_width];
  std::int64_t at[piece_width] = {};
  for (std::int64_t j = 0; j < r.inner; ++j) best[j] = C(x[j]);
  for (std::int64_t i = 1; i < r.reduce; ++i) {
    const T* row = x + i * r.reduce_stride;
    for (std::int64_t j = 0; j < r.inner; ++j) {
      const C v = C(row[j]);
      const bool replaces = better<largest>(v, best[j]);
      best[j] = replaces ? v : best[j];
      at[j] = replaces ? i : at[j];
    }
  }
  for (std::int64_t j = 0; out && j < r.inner; ++j) out[j] = T(best[j]);
  for (std::int64_t j = 0; index && j < r.inner; ++j) index[j] = at[j];
}

/// Few results with a long way each: of chunks first, then of these in order.
template <bool largest, class T>
void extreme_chunks(const Reduction& r, std::int64_t chunk, const T* x, T* out, std::int64_t* index) {
  using C = compared_t<T>;
  const std::int64_t chunks = ceil_div(r.reduce, chunk);
  std::vector<std::int64_t> at(static_cast<std::size_t>(chunks));
  const auto best = std::make_unique<T[]>(static_cast<std::size_t>(chunks));
  for (std::int64_t o = 0; o < r.outer; ++o, x += r.outer_stride) {
    parallel_for(chunks, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t c = begin; c < end; ++c)
        extreme_row<largest>(x + c * chunk, std::min(chunk, r.reduce - c * chunk), &best[c],
                             index ? &at[static_cast<std::size_t>(c)] : nullptr);
    });
    std::int64_t top = 0;
    for (std::int64_t c = 1; c < chunks; ++c)
      if (better<largest>(C(best[c]), C(best[top]))) top = c;
    if (out) out[o] = best[top];
    if (index) index[o] = top * chunk + at[static_cast<std::size_t>(top)];
  }
}

template <bool largest, class T>
void extreme(const Reduction& r, const T* x, T* out, std::int64_t* index) {
  constexpr std::int64_t chunk = 1 << 15;
  if (r.inner == 1 && r.reduce_stride == 1 && r.outer < 16 && r.reduce > chunk)
    return extreme_chunks<largest>(r, chunk, x, out, index);
  for_pieces(r, [&](const Reduction& part, std::int64_t from, std::int64_t to) {
    if (part.inner_stride == 1 && part.inner >= 8) {
      return extreme_columns<largest>(part, x + from, out ? out + to : nullptr, index ? index + to : nullptr);
    }
    for (std::int64_t j = 0; j < part.inner; ++j) {
      const T* row = x + from + j * part.inner_stride;
      T* value = out ? out + to + j : nullptr;
      std::int64_t* place = index ? index + to + j : nullptr;
      if (part.reduce_stride == 1) {
        extreme_row<largest>(row, part.reduce, value, place);
      } else {
        extreme_strided<largest>(row, part.reduce, part.reduce_stride, value, place);
      }
    }
  });
}

}  // namespace

template <class T>
void sum(const Reduction& r, const T* x, double divisor, sum_t<T>* out) {
  sum_of(r, x, divisor, out, Itself{});
}

template <class T>
void maximum(const Reduction& r, const T* x, T* out, std::int64_t* index) {
  extreme<true>(r, x, out, index);
}
template <class T>
void minimum(const Reduction& r, const T* x, T* out, std::int64_t* index) {
  extreme<false>(r, x, out, index);
}

[[gnu::used]] const auto reduce_instances =
    instances_for<any_dtype>([]<class T>() { return std::tuple(&sum<T>, &maximum<T>, &minimum<T>); });

Operand operand(const Tensor& x, Mask axes) {
  int first = x.rank(), last = -1;
  for (int i = 0; i < x.rank(); ++i)
    if (has(axes, static_cast<std::size_t>(i))) {
      first = std::min(first, i);
      last = i;
    }
  bool block = true;
  for (int i = first; i <= last; ++i) block = block && has(axes, static_cast<std::size_t>(i));
  if (!block || !x.is_contiguous()) {
    if (block) return operand(clone(x), axes);
    Shape order;
    for (int pass = 0; pass < 2; ++pass)
      for (int i = 0; i < x.rank(); ++i)
        if (has(axes, static_cast<std::size_t>(i)) == (pass == 1)) order.push_back(i);
    const Tensor moved = clone(permute(x, order));
    Mask tail = 0;
    for (int i = 0; i < x.rank(); ++i)
      if (has(axes, static_cast<std::size_t>(order[i]))) tail |= bit(static_cast<std::size_t>(i));
    return operand(moved, tail);
  }
  std::int64_t outer = 1, reduce = 1, inner = 1;
  for (int i = 0; i < x.rank(); ++i) (i < first ? outer : i > last ? inner : reduce) *= x.shape()[i];
  return {x, Reduction::contiguous(outer, reduce, inner)};
}

namespace {

void sum_op(const ops::Sum& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Operand p = operand(in[0], op.axes);
  dispatch(in[0].dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const double divisor = op.mean ? static_cast<double>(p.r.reduce) : 1.0;
    if (op.mean && p.r.reduce == 0) {  // the mean of nothing
      fill_(alias(out[0], out[0].layout()), std::numeric_limits<double>::quiet_NaN());
    } else {
      sum(p.r, reinterpret_cast<const T*>(p.x.raw()), divisor, reinterpret_cast<sum_t<T>*>(out[0].raw()));
    }
  });
}

/// The sums in `y` of squares that were too large or too small for f32, again in f64.
template <class T>
void sum_again(const Reduction& r, const T* x, const float* sums, double* y) {
  parallel_for(r.outer * r.inner, std::max<std::int64_t>(1, (1 << 14) / r.reduce), [&](auto begin, auto end) {
    for (std::int64_t i = begin; i < end; ++i) {
      if (sums[i] > 0x1p-100f && sums[i] < std::numeric_limits<float>::infinity()) continue;
      const T* from = x + i / r.inner * r.outer_stride + i % r.inner * r.inner_stride;
      double sum = 0;
      for (std::int64_t k = 0; k < r.reduce; ++k) {
        const double value = static_cast<compute_t<T>>(from[k * r.reduce_stride]);
        sum += value * value;
      }
      y[i] = sum;
    }
  });
}

void power_sum_op(const ops::PowerSum& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Operand p = operand(in[0], op.axes);
  auto* y = reinterpret_cast<double*>(out[0].raw());
  dispatch_floating(op.name, in[0].dtype(), [&]<class T>(TypeTag<T>) {
    const T* x = p.x.data<T>();
    const auto sum = [&](auto* to) {
      op.power == 1 ? sum_of(p.r, x, 1, to, ItsSize{}) : sum_of(p.r, x, 1, to, ItsSquare{});
    };
    if constexpr (std::is_same_v<T, double>) {
      sum(y);
    } else {
      const Tensor narrow = empty(out[0].shape(), {DType::f32, Device::cpu()});
      auto* sums = reinterpret_cast<float*>(narrow.raw());
      sum(sums);
      std::copy_n(sums, narrow.numel(), y);
      if (op.power == 2 && p.r.reduce > 0) sum_again(p.r, x, sums, y);
    }
  });
}

void prod_op(const ops::Prod& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Operand p = operand(in[0], op.axes);
  if (p.r.reduce == 0) {  // the product of nothing
    fill_(alias(out[0], out[0].layout()), 1);
    return;
  }
  dispatch(in[0].dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    product(p.r, reinterpret_cast<const T*>(p.x.raw()), reinterpret_cast<sum_t<T>*>(out[0].raw()));
  });
}

/// The gradients of the product of `n` elements, whose own is `gy`.
template <class T, class C>
void differentiate_row(const T* x, std::int64_t n, C gy, T* gx) {
  const Scratch<C> held = scratch<C>(3 * n);
  check<OutOfMemoryError>(held != nullptr, "prod: no memory for the gradients of {} elements", n);
  for (std::int64_t i = 0; i < n; ++i) held[i] = C(x[i]);
  differentiate_product(held.get(), n, gy);
  for (std::int64_t i = 0; i < n; ++i) gx[i] = T(held[i]);
}

/// Of a long row through the products of its chunks.
template <class T, class C>
void differentiate_long_row(const T* x, std::int64_t n, C gy, T* gx) {
  const std::int64_t chunks = ceil_div(n, product_task);
  std::vector<C> products(static_cast<std::size_t>(chunks)), slopes(products);
  const auto for_chunks = [&](const auto& body) {
    parallel_for(n, product_task, [&](std::int64_t begin, std::int64_t end) {
      body(begin, end - begin, static_cast<std::size_t>(begin / product_task));
    });
  };
  for_chunks([&](std::int64_t begin, std::int64_t count, std::size_t chunk) {
    products[chunk] = multiply_row<T, C>(x + begin, count);
  });
  differentiate_row(products.data(), chunks, gy, slopes.data());
  for_chunks([&](std::int64_t begin, std::int64_t count, std::size_t chunk) {
    differentiate_row(x + begin, count, slopes[chunk], gx + begin);
  });
}

void prod_grad_op(const ops::ProdGrad& op, Inputs in, Outputs out) {
  const Tensor& x = in[1];
  if (x.numel() == 0) return;
  const std::int64_t n = x.shape()[1], grain = std::max<std::int64_t>(1, product_task / n);
  dispatch_floating(op.name, x.dtype(), [&]<class T>(TypeTag<T>) {
    using C = compute_t<T>;
    const T *gy = in[0].data<T>(), *from = x.data<T>();
    T* gx = reinterpret_cast<T*>(out[0].raw());
    if (n > product_task) {
      for (std::int64_t r = 0; r < x.shape()[0]; ++r)
        differentiate_long_row(from + r * n, n, C(gy[r]), gx + r * n);
      return;
    }
    parallel_for(x.shape()[0], grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t r = begin; r < end; ++r) differentiate_row(from + r * n, n, C(gy[r]), gx + r * n);
    });
  });
}

void extreme_op(const ops::Extreme& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Operand p = operand(in[0], op.axes);
  dispatch(in[0].dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto* x = reinterpret_cast<const T*>(p.x.raw());
    auto* y = reinterpret_cast<T*>(out[0].raw());
    op.largest ? maximum(p.r, x, y, nullptr) : minimum(p.r, x, y, nullptr);
  });
}

void argmax_op(const ops::ArgMax& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Operand p = operand(in[0], in[0].rank() == 0 ? 0 : bit(static_cast<std::size_t>(op.axis)));
  dispatch(in[0].dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto find = op.largest ? &maximum<T> : &minimum<T>;
    find(p.r, reinterpret_cast<const T*>(p.x.raw()), nullptr, reinterpret_cast<std::int64_t*>(out[0].raw()));
  });
}

}  // namespace

void add_reduce() {
  add_kernel<sum_op>(DeviceType::cpu);
  add_kernel<power_sum_op>(DeviceType::cpu);
  add_kernel<prod_op>(DeviceType::cpu);
  add_kernel<prod_grad_op>(DeviceType::cpu);
  add_kernel<extreme_op>(DeviceType::cpu);
  add_kernel<argmax_op>(DeviceType::cpu);
}

}  // namespace sherd::cpu
