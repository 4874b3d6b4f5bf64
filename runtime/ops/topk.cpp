#include "runtime/ops/topk.h"

#include "runtime/apply.h"
#include "runtime/given.h"
#include "runtime/ops.h"
#include "runtime/ops/picking.h"

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
  const Shape& shape = args.specs[0].shape;
  const PutAt back{{Of::elements, shape.rank() - 1, 1, true, "topk"}, Put::add, shape};
  return {apply(back, Tensor{}, args.outputs[1], args.gy[0])};
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
  detail::check_given("topk", x);
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

Picked sort(const Tensor& x, std::int64_t axis, Order order) {
  detail::check_given("sort", x);
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

Tensor argsort(const Tensor& x, std::int64_t axis, Order order) {
  detail::check_given("argsort", x);
  return sort(x, axis, order).indices;
}

Tensor one_hot(const Tensor& index, std::int64_t classes) {
  detail::check_given("one_hot", index);
  check<DTypeError>(is_integral(index.dtype()), "one_hot: the index must be integers, got {}",
                    name_of(index.dtype()));
  check<ValueError>(classes > 0, "one_hot: {} classes; at least one", classes);
  const Tensor at = unsqueeze(to(index, DType::i64), -1);
  Shape shape = index.shape();
  shape.push_back(classes);
  const ops::PutAt op{{ops::Of::elements, index.rank(), 1, true, "one_hot"}, Put::replace, shape};
  return apply(op, Tensor{}, at, ones_like(at));
}

}  // namespace sherd
