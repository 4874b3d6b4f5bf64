#include "runtime/ops/topk.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "runtime/apply.h"
#include "runtime/ops.h"
#include "runtime/parallel.h"

namespace sherd {
namespace ops {
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

}  // namespace

Specs TopK::infer(SpecSpan in) const {
  check<ShapeError>(in[0].shape.rank() >= 1 && k >= 0 && k <= in[0].shape.back(),
                    "topk: k {} of a last axis in shape {}", k, in[0].shape);
  Spec values = in[0], indices = in[0];
  values.shape[values.shape.rank() - 1] = k;
  indices.shape = values.shape;
  indices.dtype = DType::i64;
  return {values, indices};
}

void TopK::run(Cpu, Inputs in, Outputs out) const {
  if (out[0].numel() == 0) return;
  const Tensor x = contiguous(in[0]);
  const std::int64_t columns = x.shape().back(), rows = x.numel() / columns;
  dispatch(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* from = x.data<T>();
    auto* values = reinterpret_cast<T*>(out[0].raw());
    auto* indices = reinterpret_cast<std::int64_t*>(out[1].raw());
    std::vector<std::int64_t> order(static_cast<std::size_t>(columns));
    for (std::int64_t row = 0; row < rows; ++row) {
      const T* at = from + row * columns;
      std::iota(order.begin(), order.end(), std::int64_t{0});
      std::partial_sort(order.begin(), order.begin() + k, order.end(),
                        [at](std::int64_t a, std::int64_t b) { return before(at, a, b); });
      for (std::int64_t j = 0; j < k; ++j) {
        indices[row * k + j] = order[static_cast<std::size_t>(j)];
        values[row * k + j] = at[order[static_cast<std::size_t>(j)]];
      }
    }
  });
}

Tensors TopK::grad(const GradArgs& args) const {
  return {apply(Scatter{args.specs[0].shape.back()}, args.gy[0], args.outputs[1])};
}

Specs Gather::infer(SpecSpan in) const {
  check<DTypeError>(in[1].dtype == DType::i64, "gather: the index must be i64, got {}", name_of(in[1].dtype));
  Shape rest = in[1].shape;
  check<ShapeError>(rest.rank() == in[0].shape.rank() && rest.rank() >= 1, "gather: shapes {} and {}",
                    in[0].shape, in[1].shape);
  rest[rest.rank() - 1] = in[0].shape.back();
  check<ShapeError>(rest == in[0].shape, "gather: shapes {} and {} differ before the last axis", in[0].shape,
                    in[1].shape);
  return {{in[1].shape, in[0].dtype, in[0].device}};
}

void Gather::run(Cpu, Inputs in, Outputs out) const {
  if (out[0].numel() == 0) return;
  const Tensor x = contiguous(in[0]), index = contiguous(in[1]);
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

Tensors Gather::grad(const GradArgs& args) const {
  return {apply(Scatter{args.specs[0].shape.back()}, args.gy[0], args.inputs[1]), Tensor{}};
}

Specs Scatter::infer(SpecSpan in) const {
  check<ShapeError>(in[0].shape == in[1].shape, "scatter: values of shape {} at positions of shape {}",
                    in[0].shape, in[1].shape);
  Spec out = in[0];
  out.shape[out.shape.rank() - 1] = columns;
  return {out};
}

void Scatter::run(Cpu, Inputs in, Outputs out) const {
  zero_(alias(out[0], out[0].layout()));
  if (in[0].numel() == 0) return;
  const Tensor values = contiguous(in[0]), index = contiguous(in[1]);
  const std::int64_t picks = index.shape().back(), rows = index.numel() / picks;
  const std::int64_t* at = index.data<std::int64_t>();
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

Tensors Scatter::grad(const GradArgs& args) const {
  return {apply(Gather{}, args.gy[0], args.inputs[1]), Tensor{}};
}

}  // namespace ops

TopK topk(const Tensor& x, std::int64_t k) {
  Tensors both = apply_many(ops::TopK{k}, std::span(&x, 1));
  return {std::move(both[0]), std::move(both[1])};
}

Tensor gather(const Tensor& x, const Tensor& index) { return apply(ops::Gather{}, x, index); }

}  // namespace sherd
