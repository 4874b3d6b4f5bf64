#include "runtime/ops/topk.h"

#include "runtime/apply.h"
#include "runtime/ops.h"

namespace sherd {
namespace ops {
Specs TopK::infer(SpecSpan in) const {
  check<ShapeError>(in[0].shape.rank() >= 1 && k >= 0 && k <= in[0].shape.back(),
                    "topk: k {} of a last axis in shape {}", k, in[0].shape);
  Spec values = in[0], indices = in[0];
  values.shape[values.shape.rank() - 1] = k;
  indices.shape = values.shape;
  indices.dtype = DType::i64;
  return {values, indices};
}

Tensors TopK::grad(const GradArgs& args) const {
  return {
      apply(Scatter{.columns = args.specs[0].shape.back(), .distinct = true}, args.gy[0], args.outputs[1])};
}

Specs Gather::infer(SpecSpan in) const {
  check<DTypeError>(in[1].dtype == DType::i64, "{}: the index must be integers, got {}", call,
                    name_of(in[1].dtype));
  Shape rest = in[1].shape;
  check<ShapeError>(rest.rank() == in[0].shape.rank() && rest.rank() >= 1, "{}: shapes {} and {}", call,
                    in[0].shape, in[1].shape);
  rest[rest.rank() - 1] = in[0].shape.back();
  check<ShapeError>(rest == in[0].shape, "{}: shapes {} and {} differ before the last axis", call,
                    in[0].shape, in[1].shape);
  return {{in[1].shape, in[0].dtype, in[0].device}};
}

Tensors Gather::grad(const GradArgs& args) const {
  // Positions may repeat, and a sum in 16 bits stops growing.
  const DType dtype = args.specs[0].dtype;
  const Tensor wide = to(args.gy[0], compute_dtype(dtype));
  return {to(apply(Scatter{args.specs[0].shape.back()}, wide, args.inputs[1]), dtype), Tensor{}};
}

Specs Scatter::infer(SpecSpan in) const {
  check<DTypeError>(in[1].dtype == DType::i64, "{}: positions must be i64, got {}", call,
                    name_of(in[1].dtype));
  check<ShapeError>(in[0].shape == in[1].shape && in[0].shape.rank() >= 1,
                    "{}: values of shape {} at positions of shape {}", call, in[0].shape, in[1].shape);
  Spec out = in[0];
  out.shape[out.shape.rank() - 1] = columns;
  return {out};
}

Tensors Scatter::grad(const GradArgs& args) const {
  return {apply(Gather{}, args.gy[0], args.inputs[1]), Tensor{}};
}

}  // namespace ops

namespace {

/// The k largest of each row, largest first; equal values by position.
TopK largest(const Tensor& rows, std::int64_t k) {
  Tensors both = apply_many(ops::TopK{k}, std::span(&rows, 1));
  return {std::move(both[0]), std::move(both[1])};
}

}  // namespace

TopK topk(const Tensor& x, std::int64_t k, std::int64_t axis, Order order) {
  const int at = normalize_axis("topk", axis, x.rank());
  const bool last = at == x.rank() - 1;
  const auto turned = [&](const Tensor& t) { return last ? t : transpose(t, at, -1); };
  if (order == Order::descending || x.rank() == 0) {
    const TopK found = largest(turned(x), k);
    return {turned(found.values), turned(found.indices)};
  }
  const std::int64_t n = x.shape()[at];
  check<ShapeError>(k >= 0 && k <= n, "topk: {} of the {} elements along axis {} of shape {}", k, n, at,
                    x.shape());
  const Picked all = sort(x, axis, order);
  return {narrow(all.values, at, 0, k), narrow(all.indices, at, 0, k)};
}

Tensor gather(const Tensor& x, const Tensor& index) {
  return apply(ops::Gather{}, x, is_integral(index.dtype()) ? to(index, DType::i64) : index);
}

Picked sort(const Tensor& x, std::int64_t axis, Order order) {
  const int at = normalize_axis("sort", axis, x.rank());
  if (x.rank() == 0) return {clone(x), zeros({}, {DType::i64, x.device()})};
  const std::int64_t n = x.shape()[at];
  const bool up = order == Order::ascending, last = at == x.rank() - 1;
  const auto turned = [&](const Tensor& t) { return last ? t : transpose(t, at, -1); };
  // Upwards is the list turned round, both before and after, so that equal values keep their order.
  const Tensor rows = turned(x);
  const TopK found = largest(up ? flip(rows, {-1}) : rows, n);
  if (!up) return {turned(found.values), turned(found.indices)};
  return {turned(flip(found.values, {-1})), turned(sub(n - 1, flip(found.indices, {-1})))};
}

Tensor argsort(const Tensor& x, std::int64_t axis, Order order) { return sort(x, axis, order).indices; }

Tensor one_hot(const Tensor& index, std::int64_t classes) {
  check<DTypeError>(is_integral(index.dtype()), "one_hot: the index must be integers, got {}",
                    name_of(index.dtype()));
  check<ValueError>(classes > 0, "one_hot: {} classes; at least one", classes);
  const Tensor at = unsqueeze(to(index, DType::i64), -1);
  return apply(ops::Scatter{classes, "one_hot", true}, ones_like(at), at);
}

}  // namespace sherd
