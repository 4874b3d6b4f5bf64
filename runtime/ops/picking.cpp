#include "runtime/ops/picking.h"

#include <array>

#include "runtime/apply.h"
#include "runtime/given.h"
#include "runtime/ops.h"

namespace sherd {
namespace ops {
namespace {

Tensor put_into(const PutAt& op, const Tensor& base, const Tensor& index, const Tensor& values) {
  return apply(op, base, index, values);
}

}  // namespace

Shape Picking::picked(const Shape& shape, const Spec& index) const {
  check<DTypeError>(index.dtype == DType::i64, "{}: the index must be integers, got {}", call,
                    name_of(index.dtype));
  if (of == Of::slices) {
    check<ShapeError>(axis >= 0 && axes >= 1 && axis + axes <= shape.rank(),
                      "{}: the table must have rows, got shape {}", call, shape);
    Shape all;
    for (int i = 0; i < axis; ++i) all.push_back(shape[i]);
    for (const std::int64_t n : index.shape) all.push_back(n);
    for (int i = axis + axes; i < shape.rank(); ++i) all.push_back(shape[i]);
    return all;
  }
  check<ShapeError>(axis >= 0 && axis < shape.rank() && index.shape.rank() == shape.rank(),
                    "{}: an index of shape {} for shape {}", call, index.shape, shape);
  for (int i = 0; i < shape.rank(); ++i)
    check<ShapeError>(i == axis || index.shape[i] <= shape[i],
                      "{}: axis {} of the index has {} elements, but shape {} has {}", call, i,
                      index.shape[i], shape, shape[i]);
  return index.shape;
}

SliceSizes::SliceSizes(const Shape& shape, int axis, int axes) {
  for (int i = 0; i < shape.rank(); ++i) (i < axis ? outer : i < axis + axes ? columns : inner) *= shape[i];
}

bool is_one(const Tensor& values) {
  bool one = true;
  for (int i = 0; i < values.rank(); ++i) one = one && (values.shape()[i] == 1 || values.strides()[i] == 0);
  return one;
}

Specs Take::infer(SpecSpan in) const { return {{picked(in[0].shape, in[1]), in[0].dtype, in[0].device}}; }

Tensors Take::grad(const GradArgs& args) const {
  const PutAt back{*this, last ? Put::replace : Put::add, args.specs[0].shape, true};
  return {put_into(back, {}, args.inputs[1], args.gy[0]), Tensor{}};
}

Tensor Take::last_in_ops(Inputs in) const {
  const Tensor &x = in[0], &index = in[1];
  const Take every{static_cast<const Picking&>(*this)};
  const Tensor taken = apply(every, x, index), zero = Tensor::scalar(0, {x.dtype(), x.device()});
  const TensorOptions counts{DType::i64, x.device()};
  const Tensor order = reshape(arange(0, index.numel(), 1, counts), index.shape());
  if (of == Of::elements) {
    const Tensor found = put_into({*this, Put::replace, x.shape(), true}, {}, index, order);
    return where(equal(apply(every, found, index), order), taken, zero);
  }
  const PutAt list{{.call = call}, Put::replace, {SliceSizes(x.shape(), axis, axes).columns}, true};
  const Tensor found = apply(Take{list}, put_into(list, {}, index, order), index);
  Shape along = index.shape();
  for (int i = axis + axes; i < x.rank(); ++i) along.push_back(1);
  return where(reshape(equal(found, order), along), taken, zero);
}

Specs PutAt::infer(SpecSpan in) const {
  const Spec &base = in[0], &index = in[1], &values = in[2];
  check<ShapeError>((base.is_none() || base.shape == shape) && values.shape == picked(shape, index),
                    "{}: values of shape {} for an index of shape {} into shape {}", call, values.shape,
                    index.shape, shape);
  check<DTypeError>(base.is_none() || base.dtype == values.dtype, "{}: {} values for {}; cast them", call,
                    name_of(values.dtype), name_of(base.dtype));
  check<DTypeError>(put == Put::replace || values.dtype != DType::boolean,
                    "{}: takes numbers, got bool; cast them", call);
  return {{shape, values.dtype, values.device}};
}

namespace {

/// Zeros where something was put.
Tensor below_gradient(const PutAtGrad& of, const Tensor& gy, const Tensor& index) {
  const Tensor zero = Tensor::scalar(0, {gy.dtype(), gy.device()});
  return put_into({of, Put::replace, gy.shape()}, gy, index,
                  expand(zero, of.picked(gy.shape(), index.spec())));
}
/// Of equal positions the last one's value is there, and it alone has a gradient.
Tensor values_gradient(const PutAtGrad& of, const Tensor& gy, const Tensor& index) {
  return apply(Take{of, !of.distinct}, gy, index);
}

}  // namespace

Tensors PutAt::grad(const GradArgs& args) const {
  const Tensor &gy = args.gy[0], &index = args.inputs[1];
  Tensors grads(3);
  if (put == Put::add) {
    if (args.need(0)) grads[0] = gy;
    if (args.need(2)) grads[2] = apply(Take{*this}, gy, index);
    return grads;
  }
  const PutAtGrad both{*this};
  if (args.need(0) && args.need(2) && !args.create_graph &&
      kernel_row<PutAtGrad>().on(gy.device().type) != nullptr) {
    const Tensors found = apply_many(both, std::array{gy, index});
    return {found[0], {}, found[1]};
  }
  if (args.need(0)) grads[0] = below_gradient(both, gy, index);
  if (args.need(2)) grads[2] = values_gradient(both, gy, index);
  return grads;
}

Specs PutAtGrad::infer(SpecSpan in) const {
  return {in[0], {picked(in[0].shape, in[1]), in[0].dtype, in[0].device}};
}

Tensors PutAtGrad::reference(Inputs in) const {
  return {below_gradient(*this, in[0], in[1]), values_gradient(*this, in[0], in[1])};
}

Specs PutAtInPlace::infer(SpecSpan in) const {
  PutAt::infer(in);
  return {};
}

Tensors PutAtInPlace::reference(Inputs in) const { return {put_into(*this, in[0], in[1], in[2])}; }

}  // namespace ops

namespace {

void check_index(std::string_view call, const Tensor& x, const Tensor& index) {
  check<DTypeError>(is_integral(index.dtype()), "{}: positions must be integers, got {}", call,
                    name_of(index.dtype()));
  check<DeviceError>(index.device() == x.device(), "{}: positions on {} for a tensor on {}", call,
                     to_string(index.device()), to_string(x.device()));
}

/// Integers of any size as positions; the op refuses what is none.
Tensor as_positions(const Tensor& index) {
  return is_integral(index.dtype()) ? to(index, DType::i64) : index;
}

Tensor picked_along(const Tensor& x, int axis, const Tensor& index) {
  return apply(ops::Take{{.of = ops::Of::elements, .axis = axis, .call = "gather"}}, x, as_positions(index));
}

/// A tensor of one element has one axis here.
Tensor with_axis(const Tensor& x) { return x.rank() == 0 ? reshape(x, {1}) : x; }

Tensor scattered(std::string_view call, const Tensor& x, std::int64_t axis, const Tensor& index,
                 const Tensor& values, Put put) {
  check<DTypeError>(values.dtype() == x.dtype(), "{}: {} values for {}; cast them", call,
                    name_of(values.dtype()), name_of(x.dtype()));
  check<DeviceError>(values.device() == x.device(), "{}: values on {} for a tensor on {}", call,
                     to_string(values.device()), to_string(x.device()));
  const int at = normalize_axis(call, axis, x.rank());
  check_index(call, x, index);
  if (x.rank() == 0 || index.rank() == 0)
    return reshape(scattered(call, with_axis(x), axis, with_axis(index), with_axis(values), put), x.shape());
  Tensor given = values;
  for (int i = 0; i < values.rank() && values.rank() == index.rank(); ++i) {
    check<ShapeError>(index.shape()[i] <= values.shape()[i],
                      "{}: axis {} of the index has {} elements, but the values of shape {} have {}", call, i,
                      index.shape()[i], values.shape(), values.shape()[i]);
    if (index.shape()[i] != given.shape()[i]) given = narrow(given, i, 0, index.shape()[i]);
  }
  const ops::PutAt op{{ops::Of::elements, at, 1, false, call}, put, x.shape()};
  return apply(op, x, to(index, DType::i64), given);
}

}  // namespace

Tensor embedding(const Tensor& table, const Tensor& index) {
  detail::check_given("embedding", table, index);
  return apply(ops::Take{{.call = "embedding"}}, table, as_positions(index));
}

Tensor index_select(const Tensor& x, std::int64_t axis, const Tensor& index) {
  detail::check_given("index_select", x, index);
  check<ShapeError>(index.rank() == 1, "index_select: the index must be 1-D, got shape {}", index.shape());
  const int at = normalize_axis("index_select", axis, x.rank());
  return apply(ops::Take{{.axis = at, .call = "index_select"}}, x, as_positions(index));
}

Tensor gather(const Tensor& x, const Tensor& index) {
  detail::check_given("gather", x, index);
  const int rank = x.rank();
  check<ShapeError>(rank >= 1 && index.rank() == rank, "gather: shapes {} and {}", x.shape(), index.shape());
  for (int i = 0; i + 1 < rank; ++i)
    check<ShapeError>(index.shape()[i] == x.shape()[i],
                      "gather: shapes {} and {} differ before the last axis", x.shape(), index.shape());
  return picked_along(x, rank - 1, index);
}

Tensor gather(const Tensor& x, std::int64_t axis, const Tensor& index) {
  detail::check_given("gather", x, index);
  const int at = normalize_axis("gather", axis, x.rank());
  check_index("gather", x, index);
  if (x.rank() == 0 || index.rank() == 0)
    return reshape(gather(with_axis(x), axis, with_axis(index)), index.shape());
  return picked_along(x, at, index);
}

Tensor scatter(const Tensor& x, std::int64_t axis, const Tensor& index, const Tensor& values) {
  detail::check_given("scatter", x, index, values);
  return scattered("scatter", x, axis, index, values, Put::replace);
}
Tensor scatter(const Tensor& x, std::int64_t axis, const Tensor& index, Number value) {
  detail::check_given("scatter", x, index);
  return scatter(x, axis, index, expand(Tensor::scalar(value, {x.dtype(), x.device()}), index.shape()));
}
Tensor scatter_add(const Tensor& x, std::int64_t axis, const Tensor& index, const Tensor& values) {
  detail::check_given("scatter_add", x, index, values);
  return scattered("scatter_add", x, axis, index, values, Put::add);
}

}  // namespace sherd
