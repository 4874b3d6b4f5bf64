#include <algorithm>
#include <limits>

#include "runtime/apply.h"
#include "runtime/elementwise.h"
#include "runtime/given.h"
#include "runtime/ops.h"
#include "runtime/ops/expand.h"
#include "runtime/ops/permute.h"
#include "runtime/ops/slice.h"
#include "runtime/ops/view_as.h"

namespace sherd {
namespace ops {
namespace {

/// Whether two shapes hold as many elements; a product that overflows equals none.
bool same_count(const Shape& a, const Shape& b) {
  std::int64_t n = 1;
  bool counted = true, none = false;
  for (std::int64_t size : a) {
    if (size < 0) return false;
    none = none || size == 0;
    counted = !__builtin_mul_overflow(n, size, &n) && counted;
  }
  return none ? b.numel() == 0 : counted && n == b.numel();
}

}  // namespace

std::optional<Shape> ViewAs::strides_over(const Tensor& x, const Shape& shape) {
  if (x.is_contiguous()) return contiguous_strides(shape);
  // Runs of input axes that step like one axis; every output axis must lie inside one run.
  Shape strides = shape;
  int out = shape.rank() - 1;
  for (int in = x.rank() - 1; in >= 0;) {
    std::int64_t run = x.shape()[in];
    const std::int64_t step = x.strides()[in];
    std::int64_t whole = step * run;
    for (--in; in >= 0 && (x.strides()[in] == whole || x.shape()[in] == 1); --in) {
      run *= x.shape()[in];
      whole = step * run;
    }
    std::int64_t covered = 1;
    while (out >= 0 && (covered < run || shape[out] == 1)) {
      strides[out] = step * covered;
      covered *= shape[out--];
    }
    if (covered != run) return std::nullopt;
  }
  for (; out >= 0; --out) strides[out] = 1;
  return strides;
}

Layout ViewAs::view(const Tensor& x) const {
  check<ShapeError>(same_count(shape, x.shape()), "view: {} elements of shape {} do not fill {}", x.numel(),
                    x.shape(), shape);
  const std::optional<Shape> strides = strides_over(x, shape);
  check<ShapeError>(strides.has_value(),
                    "view: shape {} over strides {} of shape {} needs a copy; use reshape", shape,
                    x.strides(), x.shape());
  return {shape, *strides, x.layout().offset};
}
Tensors ViewAs::grad(const GradArgs& args) const { return {reshape(args.gy[0], args.specs[0].shape)}; }

Layout Permute::view(const Tensor& x) const {
  std::uint32_t seen = 0;
  for (std::int64_t axis : axes) seen |= axis >= 0 && axis < x.rank() ? 1u << axis : 0;
  check<ShapeError>(axes.rank() == x.rank() && seen == (1u << x.rank()) - 1,
                    "permute: axes {} are not those of shape {}, each once", axes, x.shape());
  Layout layout{axes, axes, x.layout().offset};
  for (int i = 0; i < axes.rank(); ++i) {
    layout.shape[i] = x.shape()[static_cast<int>(axes[i])];
    layout.strides[i] = x.strides()[static_cast<int>(axes[i])];
  }
  return layout;
}
Tensors Permute::grad(const GradArgs& args) const {
  Shape inverse = axes;
  for (int i = 0; i < axes.rank(); ++i) inverse[static_cast<int>(axes[i])] = i;
  return {permute(args.gy[0], inverse)};
}

Layout Slice::view(const Tensor& x) const {
  check<ShapeError>(axis >= 0 && axis < x.rank(), "slice: axis {} of shape {}", axis, x.shape());
  const std::int64_t n = x.shape()[axis];
  check<ValueError>(step > 0 && start >= 0 && size >= 0 && start <= n &&
                        (size == 0 || (size - 1) <= (n - 1 - start) / step) && (size == 0 || start < n),
                    "slice: {} elements from {} in steps of {} along axis {} of shape {}", size, start, step,
                    axis, x.shape());
  Layout layout = x.layout();
  layout.offset += size == 0 ? 0 : start * layout.strides[axis];
  if (size > 1) layout.strides[axis] *= step;
  layout.shape[axis] = size;
  return layout;
}
Tensors Slice::grad(const GradArgs& args) const {
  return {apply(Unslice{*this, args.specs[0].shape[axis]}, args.gy[0])};
}

Specs Unslice::infer(SpecSpan in) const {
  Spec spec = in[0];
  check<ShapeError>(
      slice.axis >= 0 && slice.axis < spec.shape.rank() && spec.shape[slice.axis] == slice.size && full >= 0,
      "unslice: shape {} is not a slice of {} elements along axis {}", spec.shape, slice.size, slice.axis);
  spec.shape[slice.axis] = full;
  return {spec};
}
void Unslice::run(Inputs in, Outputs out) const {
  const Tensor whole = alias(out[0], out[0].layout());
  zero_(whole);
  copy_(alias(whole, slice.view(whole)), in[0]);
}
Tensors Unslice::grad(const GradArgs& args) const { return {apply(slice, args.gy[0])}; }

Layout Expand::view(const Tensor& x) const {
  const int extra = shape.rank() - x.rank();
  check<ShapeError>(extra >= 0, "expand: shape {} has fewer dimensions than {}", shape, x.shape());
  Layout layout{shape, shape, x.layout().offset};
  for (int i = 0; i < shape.rank(); ++i) {
    const std::int64_t size = i < extra ? 1 : x.shape()[i - extra];
    layout.shape[i] = shape[i] == -1 && i >= extra ? size : shape[i];
    check<ShapeError>(layout.shape[i] >= 0 && (size == layout.shape[i] || size == 1),
                      "expand: shape {} does not expand to {}", x.shape(), shape);
    layout.strides[i] = i < extra || size == 1 ? 0 : x.strides()[i - extra];
  }
  return layout;
}
Tensors Expand::grad(const GradArgs& args) const { return {detail::sum_to(args.gy[0], args.specs[0].shape)}; }

}  // namespace ops

namespace {

/// Replaces one -1 by what the number of elements leaves.
Shape resolve(std::string_view op, const Tensor& x, Shape shape) {
  std::int64_t known = 1;
  int open = -1;
  for (int i = 0; i < shape.rank(); ++i) {
    if (shape[i] != -1) {
      check<ShapeError>(shape[i] >= 0, "{}: size {} in shape {}", op, shape[i], shape);
      // A product that cannot be counted is no tensor's; a zero elsewhere makes it none.
      if (__builtin_mul_overflow(known, shape[i], &known)) known = std::numeric_limits<std::int64_t>::max();
    } else {
      check<ShapeError>(open < 0, "{}: shape {} has more than one -1", op, shape);
      open = i;
    }
  }
  if (open >= 0) {
    check<ShapeError>(known > 0 && x.numel() % known == 0, "{}: {} elements of shape {} do not fill {}", op,
                      x.numel(), x.shape(), shape);
    shape[open] = x.numel() / known;
  } else {
    check<ShapeError>(known == x.numel(), "{}: {} elements of shape {} do not fill {}", op, x.numel(),
                      x.shape(), shape);
  }
  return shape;
}

}  // namespace

Tensor reshape(const Tensor& x, Shape shape) {
  detail::check_given("reshape", x);
  shape = resolve("reshape", x, std::move(shape));
  if (shape == x.shape()) return x;
  return apply(ops::ViewAs{shape}, ops::ViewAs::strides_over(x, shape) ? x : clone(x));
}

Tensor view(const Tensor& x, Shape shape) {
  detail::check_given("view", x);
  return apply(ops::ViewAs{resolve("view", x, std::move(shape))}, x);
}

Tensor flatten(const Tensor& x, std::int64_t first, std::int64_t last) {
  detail::check_given("flatten", x);
  const int a = normalize_axis("flatten", first, x.rank()), b = normalize_axis("flatten", last, x.rank());
  check<ShapeError>(a <= b, "flatten: axis {} comes after axis {}", first, last);
  Shape shape;
  std::int64_t run = 1;
  for (int i = 0; i < x.rank(); ++i) {
    if (i < a || i > b)
      shape.push_back(x.shape()[i]);
    else if (__builtin_mul_overflow(run, x.shape()[i], &run))
      run = std::numeric_limits<std::int64_t>::max();  // which no tensor has: `reshape` refuses it
    if (i == b) shape.push_back(run);
  }
  return reshape(x, x.rank() == 0 ? Shape{1} : shape);
}

Tensor permute(const Tensor& x, Shape axes) {
  detail::check_given("permute", x);
  check<ShapeError>(axes.rank() == x.rank(), "permute: {} axes for a tensor with {} dimensions", axes.rank(),
                    x.rank());
  Mask seen = 0;
  for (std::int64_t& axis : axes) {
    axis = normalize_axis("permute", axis, x.rank());
    check<ShapeError>(!((seen >> axis) & 1), "permute: axis {} occurs twice", axis);
    seen |= Mask{1} << axis;
  }
  return apply(ops::Permute{axes}, x);
}

Tensor transpose(const Tensor& x, std::int64_t a, std::int64_t b) {
  detail::check_given("transpose", x);
  const int from = normalize_axis("transpose", a, x.rank()), to = normalize_axis("transpose", b, x.rank());
  Shape axes = x.shape();
  for (int i = 0; i < axes.rank(); ++i) axes[i] = i == from ? to : i == to ? from : i;
  return apply(ops::Permute{axes}, x);
}

Tensor squeeze(const Tensor& x, std::int64_t axis) {
  detail::check_given("squeeze", x);
  const int at = normalize_axis("squeeze", axis, x.rank());
  check<ShapeError>(x.rank() > 0 && x.shape()[at] == 1, "squeeze: axis {} of shape {} has not size 1", axis,
                    x.shape());
  Shape shape = x.shape();
  shape.erase(at);
  return apply(ops::ViewAs{shape}, x);
}

Tensor squeeze(const Tensor& x) {
  detail::check_given("squeeze", x);
  Shape shape;
  for (std::int64_t n : x.shape())
    if (n != 1) shape.push_back(n);
  return apply(ops::ViewAs{shape}, x);
}

Tensor unsqueeze(const Tensor& x, std::int64_t axis) {
  detail::check_given("unsqueeze", x);
  Shape shape = x.shape();
  shape.insert(normalize_axis("unsqueeze", axis, x.rank() + 1), 1);
  return apply(ops::ViewAs{shape}, x);
}

Tensor expand(const Tensor& x, Shape shape) {
  detail::check_given("expand", x);
  return x.shape() == shape ? x : apply(ops::Expand{std::move(shape)}, x);
}

Tensor slice(const Tensor& x, std::int64_t axis, std::int64_t start, std::int64_t end, std::int64_t step) {
  detail::check_given("slice", x);
  const int at = normalize_axis("slice", axis, x.rank());
  check<ShapeError>(x.rank() > 0, "slice: a 0-d tensor has no axis");
  check<ValueError>(step > 0, "slice: step {} must be positive", step);
  const std::int64_t n = x.shape()[at];
  const auto clamped = [n](std::int64_t i) { return std::clamp<std::int64_t>(i < 0 ? i + n : i, 0, n); };
  start = clamped(start);
  end = clamped(end);
  return apply(ops::Slice{at, start, step, end > start ? (end - start - 1) / step + 1 : 0}, x);
}

Tensor narrow(const Tensor& x, std::int64_t axis, std::int64_t start, std::int64_t length) {
  detail::check_given("narrow", x);
  const int at = normalize_axis("narrow", axis, x.rank());
  check<ShapeError>(
      x.rank() > 0 && start >= 0 && length >= 0 && start <= x.shape()[at] && length <= x.shape()[at] - start,
      "narrow: {} elements from {} along axis {} of shape {}", length, start, axis, x.shape());
  return apply(ops::Slice{at, start, 1, length}, x);
}

Tensor select(const Tensor& x, std::int64_t axis, std::int64_t index) {
  detail::check_given("select", x);
  const int at = normalize_axis("select", axis, x.rank());
  check<ShapeError>(x.rank() > 0, "select: a tensor of rank 0 has no axis to select from");
  check<ShapeError>(index >= -x.shape()[at] && index < x.shape()[at],
                    "select: index {} is out of range for axis {} of shape {}, from {} to {}", index, axis,
                    x.shape(), -x.shape()[at], x.shape()[at] - 1);
  return squeeze(apply(ops::Slice{at, index < 0 ? index + x.shape()[at] : index, 1, 1}, x), at);
}

std::vector<Tensor> split(const Tensor& x, std::int64_t size, std::int64_t axis) {
  detail::check_given("split", x);
  const int at = normalize_axis("split", axis, x.rank());
  check<ShapeError>(x.rank() > 0, "split: a 0-d tensor has no axis");
  check<ValueError>(size > 0, "split: pieces of size {}", size);
  std::vector<Tensor> pieces;
  const std::int64_t n = x.shape()[at];
  for (std::int64_t start = 0; start < std::max<std::int64_t>(n, 1); start += size)
    pieces.push_back(narrow(x, at, start, std::min(size, n - start)));
  return pieces;
}

}  // namespace sherd
