#include "collectives/combine.h"

#include <algorithm>
#include <cstring>

#include "runtime/combine_rule.h"
#include "runtime/dtype.h"
#include "runtime/parallel.h"

namespace sherd {
namespace {

constexpr std::int64_t block = 1024;          // accumulators stay in the first-level cache
constexpr std::int64_t grain = 32 * block;    // elements a tile
constexpr std::int64_t copy_grain = 1 << 20;  // bytes a tile

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

/// One or two sources take one pass. `out` may be a source: every element is read before it is written.
template <class T, class Rule>
void fold(std::span<const std::byte* const> sources, T* out, std::int64_t from, std::int64_t to, Rule rule) {
  using A = compute_t<T>;
  const auto source = [&](std::size_t r, std::int64_t at) {
    return reinterpret_cast<const T*>(sources[r]) + at;
  };
  const auto end = [rule, ranks = static_cast<int>(sources.size())](A x) {
    return static_cast<T>(rule.last(x, ranks));
  };
  const std::size_t last = sources.size() - 1;
  A acc[block];
  for (std::int64_t at = from; at < to; at += block) {
    const std::int64_t n = std::min(block, to - at);
    const T* x = source(0, at);
    T* y = out + at;
    if (last == 0) {
      each_apart(n, [&](std::int64_t i) { y[i] = end(rule.first(static_cast<A>(x[i]))); });
      continue;
    }
    const T* z = source(last, at);
    if (last == 1) {
      each_apart(n, [&](std::int64_t i) {
        y[i] = end(rule.next(rule.first(static_cast<A>(x[i])), static_cast<A>(z[i])));
      });
      continue;
    }
    for (std::int64_t i = 0; i < n; ++i) acc[i] = rule.first(static_cast<A>(x[i]));
    for (std::size_t r = 1; r < last; ++r) {
      x = source(r, at);
      for (std::int64_t i = 0; i < n; ++i) acc[i] = rule.next(acc[i], static_cast<A>(x[i]));
    }
    each_apart(n, [&](std::int64_t i) { y[i] = end(rule.next(acc[i], static_cast<A>(z[i]))); });
  }
}

}  // namespace

void combine(DType dtype, ReduceOp reduction, std::span<const std::byte* const> sources, std::byte* out,
             std::int64_t count) {
  if (count == 0) return;
  const auto run = [&]<class T, class Rule>(Rule rule) {
    parallel_for(count, grain, [&](std::int64_t from, std::int64_t to) {
      fold<T>(sources, reinterpret_cast<T*>(out), from, to, rule);
    });
  };
  check<InternalError>(with_combine_rule(dtype, reduction, static_cast<int>(sources.size()), run),
                       "combine: {} of {} was let through", to_string(reduction), name_of(dtype));
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
