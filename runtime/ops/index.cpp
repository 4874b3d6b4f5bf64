#include "runtime/ops/index.h"

#include <algorithm>

#include "runtime/apply.h"
#include "runtime/elementwise.h"
#include "runtime/ops.h"
#include "runtime/ops/picking.h"
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
    const Tensor at = apply(Take{{.call = call}}, mul(arange(0, size, 1, like), step),
                            where(behind, add(given, size), given));
    numbers = k == 0 ? at : add(numbers, at);
  }
  return {numbers};
}

Specs FillWhere::infer(SpecSpan in) const {
  const Spec &x = in[0], &mask = in[1], &value = in[2];
  check<DTypeError>(mask.dtype == DType::boolean && value.dtype == x.dtype,
                    "masked_fill_: a {} mask and a {} value for {}", name_of(mask.dtype),
                    name_of(value.dtype), name_of(x.dtype));
  check<ShapeError>(broadcast_shapes(name, x.shape, mask.shape) == x.shape && value.shape.rank() == 0,
                    "masked_fill_: a mask of shape {} and a value of shape {} for shape {}", mask.shape,
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
