#include "runtime/ops/index.h"

#include <algorithm>

#include "runtime/apply.h"
#include "runtime/elementwise.h"
#include "runtime/ops.h"
#include "runtime/ops/embedding.h"
#include "runtime/ops/slice.h"

namespace sherd {
namespace ops {

Specs WriteBox::infer(SpecSpan in) const {
  const Shape& shape = in[0].shape;
  check<ShapeError>(start.rank() == shape.rank() && step.rank() == shape.rank() && in[1].shape == size,
                    "write_box_: values of shape {} for a box of {} in shape {}", in[1].shape, size, shape);
  check<DTypeError>(in[0].dtype == in[1].dtype, "write_box_: {} values for {}; cast them",
                    name_of(in[1].dtype), name_of(in[0].dtype));
  return {};
}

namespace {

Layout box_of(const WriteBox& op, const Tensor& x) {
  Layout layout = x.layout();
  for (int i = 0; i < layout.shape.rank(); ++i) {
    if (op.size[i] > 0) layout.offset += op.start[i] * layout.strides[i];
    layout.shape[i] = op.size[i];
    layout.strides[i] *= op.step[i];
  }
  return layout;
}

}  // namespace

Tensor WriteBox::box_in(Tensor x) const {
  for (int i = 0; i < size.rank(); ++i)
    if (size[i] != x.shape()[i]) x = apply(Slice{i, start[i], step[i], size[i]}, x);
  return x;
}

void WriteBox::run(Inputs in, Outputs out) const {
  if (in[1].numel() > 0) copy_(alias(out[0], box_of(*this, out[0])), in[1]);
}

Tensors WriteBox::grad(const GradArgs& args) const {
  const Tensor& gy = args.gy[0];
  Tensors grads(2);
  if (args.need(0)) {
    const Tensor zero = expand(Tensor::scalar(0, {gy.dtype(), gy.device()}), size);
    grads[0] = apply(*this, clone(gy), zero);
  }
  if (args.need(1)) grads[1] = box_in(gy);
  return grads;
}

Specs WriteRows::infer(SpecSpan in) const {
  const Spec &x = in[0], &index = in[1], &values = in[2];
  check<DTypeError>(index.dtype == DType::i64, "{}: the index must be integers, got {}", call,
                    name_of(index.dtype));
  check<DTypeError>(x.dtype == values.dtype, "{}: {} values for {}; cast them", call, name_of(values.dtype),
                    name_of(x.dtype));
  Shape expected = index.shape;
  for (int i = 1; i < x.shape.rank(); ++i) expected.push_back(x.shape[i]);
  check<ShapeError>(x.shape.rank() >= 1 && values.shape == expected,
                    "{}: values of shape {} for rows {} of shape {}", call, values.shape, index.shape,
                    x.shape);
  return {};
}

Tensors WriteRows::reference(Inputs in) const {
  // Who writes a row last is found on the host; then every row is picked, from the values or from itself.
  const Tensor &x = in[0], &index = in[1];
  const std::int64_t rows = x.shape()[0];
  if (in[2].numel() == 0) return {x};
  const std::vector<std::int64_t> at = to(index, Device::cpu()).to_vector<std::int64_t>();
  std::vector<std::int64_t> source(static_cast<std::size_t>(rows));
  for (std::int64_t i = 0; i < rows; ++i) source[static_cast<std::size_t>(i)] = i;
  for (std::size_t i = 0; i < at.size(); ++i) {
    check<ValueError>(at[i] >= 0 && at[i] < rows, "{}: index {} at position {} is outside [0, {})", call,
                      at[i], i, rows);
    source[static_cast<std::size_t>(at[i])] = rows + static_cast<std::int64_t>(i);
  }
  Shape list = x.shape();
  list[0] = index.numel();
  const Tensor both[] = {x, reshape(in[2], list)};
  return {embedding(cat(both), to(Tensor::from(source, {rows}, Device::cpu()), x.device()))};
}

Tensors WriteRows::grad(const GradArgs& args) const {
  const Tensor &gy = args.gy[0], &index = args.inputs[1];
  Tensors grads(3);
  if (args.need(0)) {
    const Tensor zero = Tensor::scalar(0, {gy.dtype(), gy.device()});
    grads[0] = apply(*this, clone(gy), index, expand(zero, args.specs[2].shape));
  }
  if (args.need(2)) {
    // Of equal positions the last one's value is there, and it alone has a gradient.
    const TensorOptions counts{DType::i64, gy.device()};
    const Tensor order = reshape(arange(0, index.numel(), 1, counts), index.shape());
    const Tensor last = embedding(apply(WriteRows{}, zeros({gy.shape()[0]}, counts), index, order), index);
    Shape along = index.shape();
    for (int i = 1; i < gy.rank(); ++i) along.push_back(1);
    const Tensor zero = Tensor::scalar(0, {gy.dtype(), gy.device()});
    grads[2] = where(reshape(equal(last, order), along), embedding(gy, index), zero);
  }
  return grads;
}

Specs ElementNumbers::infer(SpecSpan in) const {
  check<ShapeError>(static_cast<std::size_t>(sizes.rank()) == in.size(), "{}: {} positions for {} axes", call,
                    in.size(), sizes.rank());
  for (const Spec& at : in)
    check<ShapeError>(at.shape == in[0].shape && at.dtype == DType::i64,
                      "{}: positions of shape {} in {}, and of shape {}; they are i64 of one shape", call,
                      at.shape, name_of(at.dtype), in[0].shape);
  return {in[0]};
}

Tensors ElementNumbers::reference(Inputs in) const {
  Tensor numbers;
  std::int64_t step = sizes.numel();
  for (int k = 0; k < sizes.rank(); ++k) {
    const Tensor& given = in[static_cast<std::size_t>(k)];
    const std::int64_t size = sizes[k];
    const TensorOptions like{DType::i64, given.device()};
    step /= std::max<std::int64_t>(size, 1);
    // Those outside stay as they are, for the error to name.
    const Tensor behind = logical_and(less(given, 0), greater_equal(given, -size));
    // Looked up, so that each is compared with its own axis.
    const Tensor at =
        apply(Embedding{call}, mul(arange(0, size, 1, like), step), where(behind, add(given, size), given));
    numbers = k == 0 ? at : add(numbers, at);
  }
  return {numbers};
}

Specs FillWhere::infer(SpecSpan in) const {
  const Spec &x = in[0], &mask = in[1], &value = in[2];
  check<DTypeError>(mask.dtype == DType::boolean && value.dtype == x.dtype,
                    "fill_where_: a {} mask and a {} value for {}", name_of(mask.dtype), name_of(value.dtype),
                    name_of(x.dtype));
  check<ShapeError>(broadcast_shapes(name, x.shape, mask.shape) == x.shape && value.shape.rank() == 0,
                    "fill_where_: a mask of shape {} and a value of shape {} for shape {}", mask.shape,
                    value.shape, x.shape);
  return {};
}

Tensors FillWhere::reference(Inputs in) const { return {where(in[1], in[2], in[0])}; }

Tensors FillWhere::grad(const GradArgs& args) const {
  const Tensor &gy = args.gy[0], &mask = args.inputs[1];
  Tensors grads(3);
  if (args.need(0)) grads[0] = where(mask, 0, gy);
  if (args.need(2)) grads[2] = sum(where(mask, gy, 0));
  return grads;
}

}  // namespace ops

}  // namespace sherd
