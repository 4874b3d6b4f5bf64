// Running sums and products of rows.
#include "runtime/ops/recurrence.h"

#include <algorithm>

#include "runtime/ops.h"
#include "runtime/parallel.h"

namespace sherd::cpu {
namespace {

/// Floats run in f64, so that a long row loses nothing, and each is rounded as if it had been summed in the
/// dtype that the element is computed in.
template <class T>
void rows(const T* b, const T* a, std::int64_t columns, bool reverse, std::int64_t begin, std::int64_t end,
          T* h) {
  using C = compute_t<T>;
  using S = std::conditional_t<std::is_floating_point_v<C>, double, std::uint64_t>;  // integers wrap
  const std::int64_t step = reverse ? -1 : 1;
  for (std::int64_t row = begin; row < end; ++row) {
    std::int64_t at = row * columns + (reverse ? columns - 1 : 0);
    S sum = 0;
    for (std::int64_t i = 0; i < columns; ++i, at += step) {
      const S add = static_cast<S>(static_cast<C>(b[at]));
      if (i == 0)
        sum = add;  // nothing is before it, which an infinite factor would make NaN
      else
        sum = a ? static_cast<S>(static_cast<C>(a[at])) * sum + add : sum + add;
      h[at] = static_cast<T>(static_cast<C>(sum));
    }
  }
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
