// The largest elements of rows, and picking elements by their positions.
#include "runtime/ops/topk.h"

#include <algorithm>
#include <vector>

#include "runtime/cpu/element_bits.h"
#include "runtime/cpu/positions.h"
#include "runtime/cpu/row_order.h"
#include "runtime/ops.h"
#include "runtime/parallel.h"

namespace sherd::cpu {
namespace {

/// Calls `body(row)` for rows of so many picks each.
template <class F>
void for_each_row(std::int64_t rows, std::int64_t picks, const F& body) {
  const std::int64_t grain = std::clamp<std::int64_t>((1 << 12) / picks, 1, 64);
  parallel_for(rows, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) body(row);
  });
}

template <class Word, class T>
void topk_of_rows(const T* x, std::int64_t rows, std::int64_t columns, std::int64_t k, T* values,
                  std::int64_t* indices) {
  parallel_for(rows, std::max<std::int64_t>(1, (1 << 12) / columns),
               [&](std::int64_t begin, std::int64_t end) {
                 RowOrder<T, Word> order;
                 for (std::int64_t row = begin; row < end; ++row) {
                   const T* at = x + row * columns;
                   order.find(at, columns, k);
                   for (std::int64_t j = 0; j < k; ++j) {
                     indices[row * k + j] = order[static_cast<std::size_t>(j)];
                     values[row * k + j] = at[indices[row * k + j]];
                   }
                 }
               });
}

void topk(const ops::TopK& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Tensor& x = in[0];
  const std::int64_t columns = x.shape().back(), rows = x.numel() / columns;
  with_element(x.dtype(), [&]<class T>() {
    auto* values = reinterpret_cast<T*>(out[0].raw());
    auto* indices = reinterpret_cast<std::int64_t*>(out[1].raw());
    if (sizeof(T) <= 4 && columns <= UINT32_MAX)
      topk_of_rows<std::uint64_t>(x.data<T>(), rows, columns, op.k, values, indices);
    else
      topk_of_rows<row_order::Wide>(x.data<T>(), rows, columns, op.k, values, indices);
  });
}

void gather(const ops::Gather& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Tensor &x = in[0], &index = in[1];
  const std::int64_t columns = x.shape().back(), picks = index.shape().back(), rows = index.numel() / picks;
  const std::int64_t* at = index.data<std::int64_t>();
  check_positions(op.call, at, index.numel(), columns);
  with_bits(x.dtype(), [&]<class T>(T) {
    const T* from = reinterpret_cast<const T*>(x.raw());
    auto* y = reinterpret_cast<T*>(out[0].raw());
    if (rows == 1)
      return parallel_for(picks, 1 << 14, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t j = begin; j < end; ++j) y[j] = from[at[j]];
      });
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
  check_positions(op.call, at, index.numel(), columns);
  with_element(values.dtype(), [&]<class T>() {
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
