// Running sums and products of rows.
#include "runtime/ops/recurrence.h"

#include <algorithm>

#include "runtime/ops.h"
#include "runtime/parallel.h"

namespace sherd::cpu {
namespace {

constexpr std::int64_t rows_at_once =
    4;  // rows that run at once, since a step of one waits for the step before it

/// Of `count` rows, one behind another. Floats run in f64, so that a long row loses nothing, and each is
/// rounded as if it had been summed in the dtype that the element is computed in.
template <std::int64_t count, class T>
void recur(const T* b, const T* a, std::int64_t columns, bool reverse, T* h) {
  using C = compute_t<T>;
  using S = std::conditional_t<std::is_floating_point_v<C>, double, std::uint64_t>;  // integers wrap
  const std::int64_t step = reverse ? -1 : 1, first = reverse ? columns - 1 : 0;
  S sums[count] = {};
  const auto walk = [&](std::int64_t from, std::int64_t steps, const auto& next) {
    for (std::int64_t i = 0, at = from; i < steps; ++i, at += step)
#pragma GCC unroll 4
      for (std::int64_t r = 0; r < count; ++r) {
        const std::int64_t place = at + r * columns;
        sums[r] = next(sums[r], place);
        h[place] = static_cast<T>(static_cast<C>(sums[r]));
      }
  };
  const auto read = [](const T* x, std::int64_t place) { return static_cast<S>(static_cast<C>(x[place])); };
  // Nothing is before the first, which an infinite factor would make NaN.
  walk(first, 1, [&](S, std::int64_t place) { return read(b, place); });
  if (a)
    walk(first + step, columns - 1,
         [&](S sum, std::int64_t place) { return read(a, place) * sum + read(b, place); });
  else
    walk(first + step, columns - 1, [&](S sum, std::int64_t place) { return sum + read(b, place); });
}

template <class T>
void rows(const T* b, const T* a, std::int64_t columns, bool reverse, std::int64_t begin, std::int64_t end,
          T* h) {
  const auto from = [&]<std::int64_t count>() {
    for (; begin + count <= end; begin += count) {
      const std::int64_t at = begin * columns;
      recur<count>(b + at, a ? a + at : nullptr, columns, reverse, h + at);
    }
  };
  from.template operator()<rows_at_once>();
  from.template operator()<1>();
}

void recurrence(const ops::Recurrence& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const std::int64_t columns = out[0].shape().back(), count = out[0].numel() / columns;
  with_element<number_dtypes>(out[0].dtype(), [&]<class T>() {
    const auto *b = reinterpret_cast<const T*>(in[0].raw()),
               *a = reinterpret_cast<const T*>(raw_or_null(in[1]));
    auto* h = reinterpret_cast<T*>(out[0].raw());
    const std::int64_t grain = std::max<std::int64_t>(1, (1 << 14) / columns);
    parallel_for(count, grain, [&](std::int64_t begin, std::int64_t end) {
      rows(b, a, columns, op.reverse, begin, end, h);
    });
  });
}

}  // namespace

void add_recurrence() { add_kernel<recurrence>(DeviceType::cpu); }

}  // namespace sherd::cpu
