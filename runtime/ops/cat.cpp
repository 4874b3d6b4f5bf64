#include "runtime/ops/cat.h"

#include "runtime/apply.h"
#include "runtime/given.h"
#include "runtime/ops.h"

namespace sherd {
namespace ops {

Specs Cat::infer(SpecSpan in) const {
  Spec out = in[0];
  check<ShapeError>(axis >= 0 && axis < out.shape.rank(), "cat: axis {} of shape {}", axis, out.shape);
  for (std::size_t i = 1; i < in.size(); ++i) {
    check<DTypeError>(in[i].dtype == out.dtype, "cat: inputs are {} and {}; cast one of them",
                      name_of(out.dtype), name_of(in[i].dtype));
    Shape rest = in[i].shape;
    check<ShapeError>(rest.rank() == out.shape.rank(), "cat: inputs of shape {} and {}", in[0].shape,
                      in[i].shape);
    rest[axis] = in[0].shape[axis];
    check<ShapeError>(rest == in[0].shape, "cat: shapes {} and {} differ outside axis {}", in[0].shape,
                      in[i].shape, axis);
    check<ShapeError>(!__builtin_add_overflow(out.shape[axis], in[i].shape[axis], &out.shape[axis]),
                      "cat: the sizes along axis {} add up to more than can be counted", axis);
  }
  return {out};
}

void Cat::run(Inputs in, Outputs out) const {
  Layout piece = out[0].layout();
  for (const Tensor& part : in) {
    piece.shape[axis] = part.shape()[axis];
    if (part.numel() > 0) copy_(alias(out[0], piece), part);
    piece.offset += piece.shape[axis] * piece.strides[axis];
  }
}

Tensors Cat::grad(const GradArgs& args) const {
  Tensors grads(args.specs.size());
  std::int64_t start = 0;
  for (std::size_t i = 0; i < args.specs.size(); ++i) {
    const std::int64_t n = args.specs[i].shape[axis];
    if (args.need(i)) grads[i] = narrow(args.gy[0], axis, start, n);
    start += n;
  }
  return grads;
}

}  // namespace ops

Tensor cat(std::span<const Tensor> parts, std::int64_t axis) {
  check<ValueError>(!parts.empty(), "cat: no tensors to join");
  check<ShapeError>(parts[0].rank() > 0, "cat: 0-d tensors have no axis to join along; use stack");
  return apply_many(ops::Cat{normalize_axis("cat", axis, parts[0].rank())}, parts)[0];
}

Tensor stack(std::span<const Tensor> parts, std::int64_t axis) {
  detail::check_given("stack", parts);
  std::vector<Tensor> grown;
  for (const Tensor& part : parts)
    check<ShapeError>(part.shape() == parts[0].shape(), "stack: shapes {} and {} differ", parts[0].shape(),
                      part.shape());
  for (const Tensor& part : parts) grown.push_back(unsqueeze(part, axis));
  return cat(grown, axis);
}

}  // namespace sherd
