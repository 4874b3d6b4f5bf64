// The largest elements of rows, and picking elements by their positions.
#include "runtime/ops/topk.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "runtime/ops.h"
#include "runtime/parallel.h"

namespace sherd::cpu {
namespace {

/// a before b: larger first, NaN largest, then by position.
template <class T>
bool before(const T* row, std::int64_t a, std::int64_t b) {
  const auto x = static_cast<compute_t<T>>(row[a]), y = static_cast<compute_t<T>>(row[b]);
  const bool nan_x = x != x, nan_y = y != y;
  if (nan_x || nan_y) return nan_x != nan_y ? nan_x : a < b;
  return x != y ? x > y : a < b;
}

/// Calls `body(row, begin of the row in x, begin of the row in y)`.
template <class F>
void for_each_row(std::int64_t rows, const F& body) {
  parallel_for(rows, 64, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) body(row);
  });
}

void topk(const ops::TopK& op, Inputs in, Outputs out) {
  const std::int64_t k = op.k;
  if (out[0].numel() == 0) return;
  const Tensor& x = in[0];
  const std::int64_t columns = x.shape().back(), rows = x.numel() / columns;
  dispatch(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* from = x.data<T>();
    auto* values = reinterpret_cast<T*>(out[0].raw());
    auto* indices = reinterpret_cast<std::int64_t*>(out[1].raw());
    parallel_for(rows, std::max<std::int64_t>(1, (1 << 12) / columns),
                 [&](std::int64_t begin, std::int64_t end) {
                   std::vector<std::int64_t> order(static_cast<std::size_t>(columns));
                   for (std::int64_t row = begin; row < end; ++row) {
                     const T* at = from + row * columns;
                     const auto less = [at](std::int64_t a, std::int64_t b) { return before(at, a, b); };
                     std::iota(order.begin(), order.end(), std::int64_t{0});
                     if (k > columns / 8)  // a heap of most elements costs more than an order of all
                       std::sort(order.begin(), order.end(), less);
                     else
                       std::partial_sort(order.begin(), order.begin() + k, order.end(), less);
                     for (std::int64_t j = 0; j < k; ++j) {
                       indices[row * k + j] = order[static_cast<std::size_t>(j)];
                       values[row * k + j] = at[order[static_cast<std::size_t>(j)]];
                     }
                   }
                 });
  });
}

void gather(const ops::Gather&, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Tensor &x = in[0], &index = in[1];
  const std::int64_t columns = x.shape().back(), picks = index.shape().back(), rows = index.numel() / picks;
  const std::int64_t* at = index.data<std::int64_t>();
  for (std::int64_t i = 0; i < index.numel(); ++i)
    check<ValueError>(at[i] >= 0 && at[i] < columns, "gather: index {} at position {} is outside [0, {})",
                      at[i], i, columns);
  dispatch(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* from = x.data<T>();
    auto* y = reinterpret_cast<T*>(out[0].raw());
    for_each_row(rows, [&](std::int64_t row) {
      for (std::int64_t j = 0; j < picks; ++j) y[row * picks + j] = from[row * columns + at[row * picks + j]];
    });
  });
}

void scatter(const ops::Scatter& op, Inputs in, Outputs out) {
  const std::int64_t columns = op.columns;
  zero_(alias(out[0], out[0].layout()));
  if (in[0].numel() == 0) return;
  const Tensor &values = in[0], &index = in[1];
  const std::int64_t picks = index.shape().back(), rows = index.numel() / picks;
  const std::int64_t* at = index.data<std::int64_t>();
  for (std::int64_t i = 0; i < index.numel(); ++i)
    check<ValueError>(at[i] >= 0 && at[i] < columns, "scatter: index {} at position {} is outside [0, {})",
                      at[i], i, columns);
  dispatch(values.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = compute_t<T>;
    const T* from = values.data<T>();
    auto* y = reinterpret_cast<T*>(out[0].raw());
    for_each_row(rows, [&](std::int64_t row) {
      for (std::int64_t j = 0; j < picks; ++j) {
        T& place = y[row * columns + at[row * picks + j]];
        place = static_cast<T>(static_cast<C>(static_cast<C>(place) + static_cast<C>(from[row * picks + j])));
      }
    });
  });
}

}  // namespace

void add_topk() {
  add_kernel<topk>(DeviceType::cpu);
  add_kernel<gather>(DeviceType::cpu);
  add_kernel<scatter>(DeviceType::cpu);
}

}  // namespace sherd::cpu
