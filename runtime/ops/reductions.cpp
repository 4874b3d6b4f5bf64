#include <limits>

#include "runtime/apply.h"
#include "runtime/cpu/reduce.h"
#include "runtime/ops.h"
#include "runtime/ops/extreme.h"
#include "runtime/ops/sum.h"

namespace sherd {
namespace {

Shape reduced_shape(const Shape& shape, Mask axes, bool keep) {
  Shape out;
  for (int i = 0; i < shape.rank(); ++i) {
    if (!has(axes, static_cast<std::size_t>(i)))
      out.push_back(shape[i]);
    else if (keep)
      out.push_back(1);
  }
  return out;
}

/// The input as (outer, reduce, inner): the reduced axes side by side, memory steps known.
struct Plan {
  Tensor x;
  cpu::Reduction r;
};

Plan plan(const Tensor& x, Mask axes) {
  int first = x.rank(), last = -1;
  for (int i = 0; i < x.rank(); ++i)
    if (has(axes, static_cast<std::size_t>(i))) {
      first = std::min(first, i);
      last = i;
    }
  bool block = true;
  for (int i = first; i <= last; ++i) block = block && has(axes, static_cast<std::size_t>(i));
  if (!block || !x.is_contiguous()) {
    if (block) return plan(clone(x), axes);
    Shape order;
    for (int pass = 0; pass < 2; ++pass)
      for (int i = 0; i < x.rank(); ++i)
        if (has(axes, static_cast<std::size_t>(i)) == (pass == 1)) order.push_back(i);
    const Tensor moved = clone(permute(x, order));
    Mask tail = 0;
    for (int i = 0; i < x.rank(); ++i)
      if (has(axes, static_cast<std::size_t>(order[i]))) tail |= bit(static_cast<std::size_t>(i));
    return plan(moved, tail);
  }
  std::int64_t outer = 1, reduce = 1, inner = 1;
  for (int i = 0; i < x.rank(); ++i) (i < first ? outer : i > last ? inner : reduce) *= x.shape()[i];
  return {x, cpu::Reduction::contiguous(outer, reduce, inner)};
}

/// Axes as bits; none means all.
Mask axes_of(std::string_view op, const Tensor& x, const Shape& axes) {
  Mask mask = 0;
  for (std::int64_t axis : axes) mask |= bit(static_cast<std::size_t>(normalize_axis(op, axis, x.rank())));
  if (axes.empty())
    for (int i = 0; i < x.rank(); ++i) mask |= bit(static_cast<std::size_t>(i));
  return mask;
}

/// `y` (reduced over axes) as it broadcasts against the input.
Tensor with_kept_axes(const Tensor& y, const Shape& input, Mask axes) {
  return reshape(y, reduced_shape(input, axes, true));
}

}  // namespace

namespace ops {

Specs Sum::infer(SpecSpan in) const {
  check<DTypeError>(!mean || is_floating(in[0].dtype),
                    "mean: takes floating dtypes, got {}; cast the input first", name_of(in[0].dtype));
  return {{reduced_shape(in[0].shape, axes, keep), is_floating(in[0].dtype) ? in[0].dtype : DType::i64,
           in[0].device}};
}

void Sum::run(Cpu, Inputs in, Outputs out) const {
  if (out[0].numel() == 0) return;
  const Plan p = plan(in[0], axes);
  dispatch(in[0].dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const double factor = mean ? 1.0 / static_cast<double>(p.r.reduce) : 1.0;
    if (mean && p.r.reduce == 0) {  // the mean of nothing
      fill_(alias(out[0], out[0].layout()), std::numeric_limits<double>::quiet_NaN());
    } else {
      cpu::sum(p.r, reinterpret_cast<const T*>(p.x.raw()), factor,
               reinterpret_cast<cpu::sum_t<T>*>(out[0].raw()));
    }
  });
}

Tensors Sum::grad(const GradArgs& args) const {
  const Shape& shape = args.specs[0].shape;
  Tensor gy = args.gy[0];
  if (mean) gy = mul(gy, static_cast<double>(gy.numel()) / static_cast<double>(shape.numel()));
  return {expand(with_kept_axes(gy, shape, axes), shape)};
}

Specs Extreme::infer(SpecSpan in) const {
  for (int i = 0; i < in[0].shape.rank(); ++i)
    check<ShapeError>(!has(axes, static_cast<std::size_t>(i)) || in[0].shape[i] > 0,
                      "{}: axis {} of shape {} is empty and has no largest value", largest ? "amax" : "amin",
                      i, in[0].shape);
  return {{reduced_shape(in[0].shape, axes, keep), in[0].dtype, in[0].device}};
}

void Extreme::run(Cpu, Inputs in, Outputs out) const {
  if (out[0].numel() == 0) return;
  const Plan p = plan(in[0], axes);
  dispatch(in[0].dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto* x = reinterpret_cast<const T*>(p.x.raw());
    auto* y = reinterpret_cast<T*>(out[0].raw());
    largest ? cpu::maximum(p.r, x, y, nullptr) : cpu::minimum(p.r, x, y, nullptr);
  });
}

Tensors Extreme::grad(const GradArgs& args) const {
  const Tensor& x = args.inputs[0];
  const Tensor winners = to(equal(x, with_kept_axes(args.outputs[0], x.shape(), axes)), x.dtype());
  Shape list;
  for (int i = 0; i < x.rank(); ++i)
    if (has(axes, static_cast<std::size_t>(i))) list.push_back(i);
  const Tensor share = x.rank() == 0 ? winners : div(winners, sum(winners, list, Keep::dims));
  return {mul(share, with_kept_axes(args.gy[0], x.shape(), axes))};
}

Specs ArgMax::infer(SpecSpan in) const {
  check<ShapeError>(in[0].shape.rank() == 0 || in[0].shape[axis] > 0, "argmax: axis {} of shape {} is empty",
                    axis, in[0].shape);
  return {{reduced_shape(in[0].shape, bit(static_cast<std::size_t>(axis)), keep), DType::i64, in[0].device}};
}

void ArgMax::run(Cpu, Inputs in, Outputs out) const {
  if (out[0].numel() == 0) return;
  const Plan p = plan(in[0], in[0].rank() == 0 ? 0 : bit(static_cast<std::size_t>(axis)));
  dispatch(in[0].dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    cpu::maximum<T>(p.r, reinterpret_cast<const T*>(p.x.raw()), nullptr,
                    reinterpret_cast<std::int64_t*>(out[0].raw()));
  });
}

}  // namespace ops

Tensor sum(const Tensor& x, Shape axes, Keep keep) {
  return apply(ops::Sum{axes_of("sum", x, axes), keep == Keep::dims, false}, x);
}
Tensor mean(const Tensor& x, Shape axes, Keep keep) {
  return apply(ops::Sum{axes_of("mean", x, axes), keep == Keep::dims, true}, x);
}
Tensor amax(const Tensor& x, Shape axes, Keep keep) {
  return apply(ops::Extreme{axes_of("amax", x, axes), keep == Keep::dims, true}, x);
}
Tensor amin(const Tensor& x, Shape axes, Keep keep) {
  return apply(ops::Extreme{axes_of("amin", x, axes), keep == Keep::dims, false}, x);
}
Tensor argmax(const Tensor& x, std::int64_t axis, Keep keep) {
  return apply(ops::ArgMax{normalize_axis("argmax", axis, x.rank()), keep == Keep::dims}, x);
}

}  // namespace sherd
