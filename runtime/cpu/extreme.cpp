// The largest and the smallest, and where they stand.
#include <algorithm>
#include <memory>
#include <vector>

#include "runtime/cpu/reduce.h"
#include "runtime/cpu/rows.h"
#include "runtime/instances.h"
#include "runtime/kernel.h"
#include "runtime/ops/extreme.h"
#include "runtime/ops/topk.h"

namespace sherd::cpu {
namespace {

/// What elements are compared in.
template <class T>
using compared_t = std::conditional_t<std::is_integral_v<T>, std::int64_t, compute_t<T>>;

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
void extreme_columns(const StridedReduction& r, const T* x, T* out, std::int64_t* index) {
  using C = compared_t<T>;
  C best[piece_width];
  std::int64_t at[piece_width] = {};
  for (std::int64_t j = 0; j < r.inner; ++j) best[j] = C(x[j]);
  for (std::int64_t i = 1; i < r.reduce; ++i) {
    const T* row = x + i * r.reduce_stride;
    if (!index) {
      for_vectors<C>(r.inner, [&](std::int64_t j, auto count) {
        put<C>(best + j, better_lanes<largest, C>(take<C>(row + j, count), take<C>(best + j, count)), count);
      });
      continue;
    }
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
void extreme_chunks(const StridedReduction& r, std::int64_t chunk, const T* x, T* out, std::int64_t* index) {
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
void extreme(const StridedReduction& r, const T* x, T* out, std::int64_t* index) {
  constexpr std::int64_t chunk = 1 << 15;
  if (r.inner == 1 && r.reduce_stride == 1 && r.outer < 16 && r.reduce > chunk)
    return extreme_chunks<largest>(r, chunk, x, out, index);
  for_pieces(r, [&](const StridedReduction& part, std::int64_t from, std::int64_t to) {
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
void maximum(const StridedReduction& r, const T* x, T* out, std::int64_t* index) {
  extreme<true>(r, x, out, index);
}
template <class T>
void minimum(const StridedReduction& r, const T* x, T* out, std::int64_t* index) {
  extreme<false>(r, x, out, index);
}

[[gnu::used]] const auto extreme_instances =
    instances_for<any_dtype>([]<class T>() { return std::tuple(&maximum<T>, &minimum<T>); });

namespace {

void extreme_op(const ops::Extreme& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Operand p = operand(in[0], op.axes);
  with_element(in[0].dtype(), [&]<class T>() {
    const auto* x = reinterpret_cast<const T*>(p.x.raw());
    auto* y = reinterpret_cast<T*>(out[0].raw());
    op.largest ? maximum(p.r, x, y, nullptr) : minimum(p.r, x, y, nullptr);
  });
}

void argmax_op(const ops::ArgMax& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Operand p = operand(in[0], in[0].rank() == 0 ? 0 : bit(static_cast<std::size_t>(op.axis)));
  with_element(in[0].dtype(), [&]<class T>() {
    const auto find = op.largest ? &maximum<T> : &minimum<T>;
    find(p.r, reinterpret_cast<const T*>(p.x.raw()), nullptr, reinterpret_cast<std::int64_t*>(out[0].raw()));
  });
}

}  // namespace

void add_extreme() {
  add_kernel<extreme_op>(DeviceType::cpu);
  add_kernel<argmax_op>(DeviceType::cpu);
}

}  // namespace sherd::cpu
