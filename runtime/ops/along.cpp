#include "runtime/ops/along.h"

#include "runtime/apply.h"
#include "runtime/ops.h"
#include "runtime/ops/copy.h"
#include "runtime/ops/embedding.h"
#include "runtime/ops/index.h"
#include "runtime/ops/topk.h"

namespace sherd {
namespace ops {
namespace {

void check_along(std::string_view call, int axis, const Shape& x, const Spec& index) {
  check<ShapeError>(axis >= 0 && axis < x.rank() && index.shape.rank() == x.rank(),
                    "{}: an index of shape {} for shape {}", call, index.shape, x);
  check<DTypeError>(index.dtype == DType::i64, "{}: positions must be integers, got {}", call,
                    name_of(index.dtype));
  for (int i = 0; i < x.rank(); ++i)
    check<ShapeError>(i == axis || index.shape[i] <= x[i],
                      "{}: axis {} of the index has {} elements, but shape {} has {}", call, i,
                      index.shape[i], x, x[i]);
}

/// The first elements of `x` along the axes of `shape` but `axis`, which goes last.
Tensor lines(Tensor x, int axis, const Shape& shape) {
  for (int i = 0; i < x.rank(); ++i)
    if (i != axis && shape[i] != x.shape()[i]) x = narrow(x, i, 0, shape[i]);
  return transpose(x, axis, -1);
}

/// `part`, which `lines` cut from `x` and whose axes are in place again, with x's other elements around it.
Tensor with_rest(const Tensor& x, const Tensor& part) {
  if (part.shape() == x.shape()) return part;
  WriteBox box;
  for (std::int64_t n : part.shape()) {
    box.start.push_back(0);
    box.step.push_back(1);
    box.size.push_back(n);
  }
  return apply(box, clone(x), part);
}

}  // namespace

Specs GatherAlong::infer(SpecSpan in) const {
  check_along("gather", axis, in[0].shape, in[1]);
  return {{in[1].shape, in[0].dtype, in[0].device}};
}

Tensors GatherAlong::reference(Inputs in) const {
  const Shape& shape = in[1].shape();
  const Tensor y = apply(Gather{}, lines(in[0], axis, shape), transpose(in[1], axis, -1));
  return {contiguous(transpose(y, axis, -1))};
}

Tensors GatherAlong::grad(const GradArgs& args) const {
  const Tensor in[] = {{}, args.inputs[1], args.gy[0]};
  return {apply_many(ScatterAlong{axis, Put::add, args.specs[0].shape}, in)[0], Tensor{}};
}

Specs ScatterAlong::infer(SpecSpan in) const {
  const Spec &index = in[1], &values = in[2];
  check_along(call(), axis, shape, index);
  check<ShapeError>((in[0].is_none() || in[0].shape == shape) && values.shape == index.shape,
                    "{}: values of shape {} for an index of shape {}", call(), values.shape, index.shape);
  check<DTypeError>(in[0].is_none() || in[0].dtype == values.dtype, "{}: {} values for {}; cast them", call(),
                    name_of(values.dtype), name_of(in[0].dtype));
  check<DTypeError>(put == Put::replace || values.dtype != DType::boolean,
                    "scatter_add: takes numbers, got bool; cast them");
  return {{shape, values.dtype, values.device}};
}

Tensors ScatterAlong::reference(Inputs in) const {
  const Tensor &index = in[1], &values = in[2];
  const Tensor at = transpose(index, axis, -1), given = transpose(values, axis, -1);
  const std::int64_t columns = shape[axis], picks = at.shape().back();
  const TensorOptions like{values.dtype(), values.device()}, counts{DType::i64, values.device()};
  if (index.numel() == 0) return {in[0].defined() ? clone(in[0]) : zeros(shape, like)};
  if (!in[0].defined() && put == Put::add) {
    const DType wide = is_floating(like.dtype) ? compute_dtype(like.dtype) : like.dtype;
    const Tensor sums = to(apply(Scatter{columns, call()}, to(given, wide), at), like.dtype);
    return {contiguous(with_rest(zeros(shape, like), transpose(sums, axis, -1)))};
  }
  const Tensor x = in[0].defined() ? in[0] : zeros(shape, like), part = lines(x, axis, index.shape());
  // Every element a row of one table: its line's first place plus the position in the line.
  const std::int64_t count = index.numel() / picks;
  const Tensor column = apply(Embedding{call()}, arange(0, columns, 1, counts), at);
  const Tensor first = mul(reshape(arange(0, count, 1, counts), {count, 1}), columns);
  const Tensor rows = reshape(add(reshape(column, {count, picks}), first), {-1});
  const Tensor table = reshape(part, {-1}), list = reshape(given, {-1});
  Tensor flat;
  if (put == Put::replace) {
    flat = apply(WriteRows{call()}, clone(table), rows, list);
  } else if (is_floating(x.dtype())) {
    const DType wide = compute_dtype(x.dtype());
    const Tensor sums = apply(EmbeddingGrad{table.numel()}, to(list, wide), rows);
    flat = to(add(to(table, wide), sums), x.dtype());
  } else {
    const Tensor sums = apply(Scatter{table.numel()}, unsqueeze(list, 0), unsqueeze(rows, 0));
    flat = add(table, reshape(sums, {-1}));
  }
  return {contiguous(with_rest(x, transpose(reshape(flat, part.shape()), axis, -1)))};
}

Tensors ScatterAlong::grad(const GradArgs& args) const {
  const Tensor &gy = args.gy[0], &index = args.inputs[1];
  const TensorOptions like{gy.dtype(), gy.device()};
  Tensors grads(3);
  if (put == Put::add) {
    if (args.need(0)) grads[0] = gy;
    if (args.need(2)) grads[2] = apply(GatherAlong{axis}, gy, index);
    return grads;
  }
  const Tensor zero = Tensor::scalar(0, like);
  if (args.need(0)) grads[0] = apply(*this, gy, index, expand(zero, index.shape()));
  if (args.need(2)) {
    // Of equal positions the last one's value is there, and it alone has a gradient.
    const TensorOptions counts{DType::i64, gy.device()};
    const Tensor order = reshape(arange(0, index.numel(), 1, counts), index.shape());
    const Tensor in[] = {{}, index, order};
    const Tensor last = apply(GatherAlong{axis}, apply_many(*this, in)[0], index);
    grads[2] = where(equal(last, order), apply(GatherAlong{axis}, gy, index), zero);
  }
  return grads;
}

}  // namespace ops

namespace {

void check_index(std::string_view call, const Tensor& x, const Tensor& index) {
  check<DTypeError>(is_integral(index.dtype()), "{}: positions must be integers, got {}", call,
                    name_of(index.dtype()));
  check<DeviceError>(index.device() == x.device(), "{}: positions on {} for a tensor on {}", call,
                     to_string(index.device()), to_string(x.device()));
}

/// A tensor of one element has one axis here.
Tensor with_axis(const Tensor& x) { return x.rank() == 0 ? reshape(x, {1}) : x; }

Tensor scattered(const Tensor& x, std::int64_t axis, const Tensor& index, const Tensor& values, Put put) {
  ops::ScatterAlong op{0, put, x.shape()};
  const std::string_view call = op.call();
  check<DTypeError>(values.dtype() == x.dtype(), "{}: {} values for {}; cast them", call,
                    name_of(values.dtype()), name_of(x.dtype()));
  check<DeviceError>(values.device() == x.device(), "{}: values on {} for a tensor on {}", call,
                     to_string(values.device()), to_string(x.device()));
  op.axis = normalize_axis(call, axis, x.rank());
  check_index(call, x, index);
  if (x.rank() == 0 || index.rank() == 0)
    return reshape(scattered(with_axis(x), axis, with_axis(index), with_axis(values), put), x.shape());
  Tensor given = values;
  for (int i = 0; i < values.rank() && values.rank() == index.rank(); ++i) {
    check<ShapeError>(index.shape()[i] <= values.shape()[i],
                      "{}: axis {} of the index has {} elements, but the values of shape {} have {}", call, i,
                      index.shape()[i], values.shape(), values.shape()[i]);
    if (index.shape()[i] != given.shape()[i]) given = narrow(given, i, 0, index.shape()[i]);
  }
  return apply(op, x, to(index, DType::i64), given);
}

}  // namespace

Tensor gather(const Tensor& x, std::int64_t axis, const Tensor& index) {
  const int at = normalize_axis("gather", axis, x.rank());
  check_index("gather", x, index);
  if (x.rank() == 0 || index.rank() == 0)
    return reshape(gather(with_axis(x), axis, with_axis(index)), index.shape());
  return apply(ops::GatherAlong{at}, x, to(index, DType::i64));
}
Tensor scatter(const Tensor& x, std::int64_t axis, const Tensor& index, const Tensor& values) {
  return scattered(x, axis, index, values, Put::replace);
}
Tensor scatter(const Tensor& x, std::int64_t axis, const Tensor& index, Number value) {
  return scatter(x, axis, index, expand(Tensor::scalar(value, {x.dtype(), x.device()}), index.shape()));
}
Tensor scatter_add(const Tensor& x, std::int64_t axis, const Tensor& index, const Tensor& values) {
  return scattered(x, axis, index, values, Put::add);
}

}  // namespace sherd
