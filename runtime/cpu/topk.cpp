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

/// Calls `body(row)` for rows of so many picks each.
template <class F>
void for_each_row(std::int64_t rows, std::int64_t picks, const F& body) {
  const std::int64_t grain = std::clamp<std::int64_t>((1 << 12) / picks, 1, 64);
  parallel_for(rows, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) body(row);
  });
}

void check_positions(std::string_view call, const Tensor& index, std::int64_t columns) {
  const std::int64_t* at = index.data<std::int64_t>();
  std::uint64_t most = 0;  // of which negative ones are; found by vectors, where a check of each is a call
  for (std::int64_t i = 0; i < index.numel(); ++i) most = std::max(most, static_cast<std::uint64_t>(at[i]));
  if (most < static_cast<std::uint64_t>(columns)) return;
  for (std::int64_t i = 0; i < index.numel(); ++i)
    check<ValueError>(at[i] >= 0 && at[i] < columns, "{}: index {} at position {} is outside [0, {})", call,
                      at[i], i, columns);
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
  check_positions("gather", index, columns);
  dispatch(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* from = x.data<T>();
    auto* y = reinterpret_cast<T*>(out[0].raw());
    for_each_row(rows, picks, [&](std::int64_t row) {
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
  check_positions("scatter", index, columns);
  dispatch(values.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = compute_t<T>;
    const T* from = values.data<T>();
    auto* y = reinterpret_cast<T*>(out[0].raw());
    for_each_row(rows, picks, [&](std::int64_t row) {
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
