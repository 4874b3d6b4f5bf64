#include "collectives/combine.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "runtime/dtype.h"
#include "runtime/parallel.h"

namespace sherd {
namespace {

constexpr std::int64_t block = 1024;          // accumulators stay in the first-level cache
constexpr std::int64_t grain = 32 * block;    // elements a tile
constexpr std::int64_t copy_grain = 1 << 20;  // bytes a tile

/// Integers add as unsigned numbers do: they wrap.
template <class A>
A add(A a, A b) {
  if constexpr (std::is_integral_v<A>) {
    using U = std::make_unsigned_t<A>;
    return static_cast<A>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
  } else {
    return a + b;
  }
}

template <class A>
A larger(A a, A b) {
  if constexpr (std::is_floating_point_v<A>) return (a > b || a != a) ? a : b;
  return a > b ? a : b;
}

/// A loop whose elements do not depend on each other, though what it writes may be what it reads.
template <class F>
[[gnu::always_inline]] inline void each_apart(std::int64_t n, const F& f) {
#if defined(__clang__)
#pragma clang loop vectorize(assume_safety)
#else
#pragma GCC ivdep
#endif
  for (std::int64_t i = 0; i < n; ++i) f(i);
}

/// `begin(x)` is the first rank's term, `next(acc, x)` adds another's, `end(acc)` finishes. One or two
/// sources take one pass. `out` may be a source: every element is read before it is written.
template <class T, class Begin, class Next, class End>
void fold(std::span<const std::byte* const> sources, T* out, std::int64_t from, std::int64_t to, Begin begin,
          Next next, End end) {
  using A = compute_t<T>;
  const auto source = [&](std::size_t r, std::int64_t at) {
    return reinterpret_cast<const T*>(sources[r]) + at;
  };
  const std::size_t last = sources.size() - 1;
  A acc[block];
  for (std::int64_t at = from; at < to; at += block) {
    const std::int64_t n = std::min(block, to - at);
    const T* x = source(0, at);
    T* y = out + at;
    if (last == 0) {
      each_apart(n, [&](std::int64_t i) { y[i] = static_cast<T>(end(begin(static_cast<A>(x[i])))); });
      continue;
    }
    const T* z = source(last, at);
    if (last == 1) {
      each_apart(n, [&](std::int64_t i) {
        y[i] = static_cast<T>(end(next(begin(static_cast<A>(x[i])), static_cast<A>(z[i]))));
      });
      continue;
    }
    for (std::int64_t i = 0; i < n; ++i) acc[i] = begin(static_cast<A>(x[i]));
    for (std::size_t r = 1; r < last; ++r) {
      x = source(r, at);
      for (std::int64_t i = 0; i < n; ++i) acc[i] = next(acc[i], static_cast<A>(x[i]));
    }
    each_apart(n, [&](std::int64_t i) { y[i] = static_cast<T>(end(next(acc[i], static_cast<A>(z[i])))); });
  }
}

template <class T>
void combine_typed(ReduceOp reduction, std::span<const std::byte* const> sources, T* out,
                   std::int64_t count) {
  using A = compute_t<T>;
  const auto same = [](A x) { return x; };
  const auto plus = [](A a, A x) { return add(a, x); };
  const auto run = [&](auto begin, auto next, auto end) {
    parallel_for(count, grain, [&](std::int64_t from, std::int64_t to) {
      fold<T>(sources, out, from, to, begin, next, end);
    });
  };
  switch (reduction.kind) {
    case ReduceOp::Kind::sum:
      return run(same, plus, same);
    case ReduceOp::Kind::max:
      return run(same, [](A a, A x) { return larger(a, x); }, same);
    case ReduceOp::Kind::average:
      if constexpr (std::is_floating_point_v<A>) {
        const A ranks = static_cast<A>(sources.size());
        return run(same, plus, [ranks](A a) { return a / ranks; });
      }
      break;
    case ReduceOp::Kind::prescaled_sum:
      if constexpr (std::is_floating_point_v<A>) {
        const A scale = static_cast<A>(reduction.scale);
        return run([scale](A x) { return x * scale; }, [scale](A a, A x) { return a + x * scale; }, same);
      }
      break;
  }
  fail<InternalError>("combine: {} of integers was let through", to_string(reduction));
}

}  // namespace

void combine(DType dtype, ReduceOp reduction, std::span<const std::byte* const> sources, std::byte* out,
             std::int64_t count) {
  if (count == 0) return;
  with_element(dtype, [&]<class T>() {
    if constexpr (std::is_same_v<T, bool>)
      fail<InternalError>("combine: bool was let through");
    else
      combine_typed<T>(reduction, sources, reinterpret_cast<T*>(out), count);
  });
}

void copy_bytes(std::byte* to, const std::byte* from, std::int64_t bytes) {
  if (to == from || bytes == 0) return;
  if (intra_op_threads() == 1) {  // in one piece, so that memcpy may bypass the caches
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
    return;
  }
  parallel_for(bytes, copy_grain, [&](std::int64_t begin, std::int64_t end) {
    std::memcpy(to + begin, from + begin, static_cast<std::size_t>(end - begin));
  });
}

}  // namespace sherd
