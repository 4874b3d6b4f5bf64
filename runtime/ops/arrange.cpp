// Elements in another order, number or place: functions made of other ops.
#include <algorithm>

#include "runtime/apply.h"
#include "runtime/given.h"
#include "runtime/ops.h"
#include "runtime/ops/cat.h"
#include "runtime/ops/diagonal.h"
#include "runtime/ops/flip.h"
#include "runtime/ops/slice.h"
#include "runtime/ops/triangle.h"

namespace sherd {
namespace {

/// `y`, or a copy where it shows the memory of `x`.
Tensor of_its_own(const Tensor& y, const Tensor& x) {
  return y.storage().id() == x.storage().id() ? clone(y) : y;
}

}  // namespace
namespace {

TensorOptions positions_on(const Tensor& x) { return {DType::i64, x.device()}; }

}  // namespace

std::vector<Tensor> chunk(const Tensor& x, std::int64_t count, std::int64_t axis) {
  detail::check_given("chunk", x);
  check<ValueError>(count > 0, "chunk: {} pieces", count);
  check<ShapeError>(x.rank() > 0, "chunk: a 0-d tensor has no axis");
  const std::int64_t n = x.shape()[normalize_axis("chunk", axis, x.rank())];
  return split(x, std::max<std::int64_t>(1, n / count + (n % count != 0)), axis);
}

std::vector<Tensor> unbind(const Tensor& x, std::int64_t axis) {
  detail::check_given("unbind", x);
  const int at = normalize_axis("unbind", axis, x.rank());
  check<ShapeError>(x.rank() > 0, "unbind: a 0-d tensor has no axis");
  std::vector<Tensor> parts;
  for (std::int64_t i = 0; i < x.shape()[at]; ++i) parts.push_back(select(x, at, i));
  return parts;
}

Tensor repeat(const Tensor& x, Shape counts) {
  detail::check_given("repeat", x);
  const int extra = counts.rank() - x.rank();
  check<ShapeError>(extra >= 0, "repeat: {} counts for shape {}; one for each axis at least", counts.rank(),
                    x.shape());
  Tensor y = x;
  for (int i = 0; i < extra; ++i) y = unsqueeze(y, 0);
  // All of it before the first copy is made.
  bool fits = true;
  std::int64_t bytes = size_of(x.dtype());
  for (int i = 0; i < counts.rank(); ++i) {
    check<ValueError>(counts[i] >= 0, "repeat: count {} along axis {}", counts[i], i);
    std::int64_t size = 0;
    fits = fits && !__builtin_mul_overflow(y.shape()[i], counts[i], &size) &&
           !__builtin_mul_overflow(bytes, std::max<std::int64_t>(size, 1), &bytes);
  }
  check<ShapeError>(fits, "repeat: {} times shape {} has more elements than can be counted", counts,
                    x.shape());
  for (int i = 0; i < counts.rank(); ++i) {
    if (counts[i] == 1) continue;
    // The axis as one of its copies more, which becomes one with it.
    Shape grown = y.shape(), joined = y.shape();
    joined[i] *= counts[i];
    grown.insert(i, counts[i]);
    y = reshape(expand(unsqueeze(y, i), grown), joined);
  }
  return of_its_own(y, x);
}

Tensors ops::Flip::reference(Inputs in) const {
  Tensor y = in[0];
  for (int i = 0; i < y.rank(); ++i)
    if (has(axes, static_cast<std::size_t>(i)))
      y = index_select(y, i, arange(y.shape()[i] - 1, -1, -1, positions_on(y)));
  return {y.is(in[0]) ? clone(y) : y};
}

Tensors ops::Flip::grad(const GradArgs& args) const { return {apply(*this, args.gy[0])}; }

Tensor flip(const Tensor& x, Shape axes) {
  detail::check_given("flip", x);
  Mask turned = 0;
  for (std::int64_t axis : axes)  // twice the same is as before
    turned ^= bit(static_cast<std::size_t>(normalize_axis("flip", axis, x.rank())));
  return apply(ops::Flip{x.rank() == 0 ? 0 : turned}, x);
}

Tensor roll(const Tensor& x, std::int64_t shift, std::int64_t axis) {
  detail::check_given("roll", x);
  const int at = normalize_axis("roll", axis, x.rank());
  if (x.numel() == 0 || x.rank() == 0) return clone(x);
  const std::int64_t n = x.shape()[at];
  return apply(ops::Roll{at, (shift % n + n) % n}, x);
}

Tensors ops::Roll::reference(Inputs in) const {
  const std::int64_t n = in[0].shape()[axis];
  return {cat({narrow(in[0], axis, n - by, by), narrow(in[0], axis, 0, n - by)}, axis)};
}

Tensors ops::Roll::grad(const GradArgs& args) const {
  const Tensor& gy = args.gy[0];
  return {apply(Roll{axis, by == 0 ? 0 : gy.shape()[axis] - by}, gy)};
}

namespace {

/// What `padding` puts before (`Side::before`) or after axis `axis` of x: `count` elements.
enum class Side : std::uint8_t { before, after };
Tensor margin(const Tensor& x, int axis, std::int64_t count, Side side, Padding padding, Number value) {
  const std::int64_t n = x.shape()[axis];
  Shape shape = x.shape();
  shape[axis] = count;
  const bool before = side == Side::before;
  switch (padding) {
    case Padding::constant:
      return full(shape, value, {x.dtype(), x.device()});
    case Padding::replicate:
      return expand(narrow(x, axis, before ? 0 : n - 1, 1), shape);
    case Padding::circular:
      return narrow(x, axis, before ? n - count : 0, count);
    case Padding::reflect:
      return flip(narrow(x, axis, before ? 1 : n - 1 - count, count), {axis});
  }
  fail<InternalError>("pad: padding {}", static_cast<int>(padding));
}

Tensor pad_axis(const Tensor& x, int axis, std::int64_t before, std::int64_t after, Padding padding,
                Number value) {
  const std::int64_t n = x.shape()[axis],
                     kept = n + std::min<std::int64_t>(before, 0) + std::min<std::int64_t>(after, 0);
  check<ShapeError>(kept >= 0, "pad: {} and {} take more than axis {} of shape {} has", before, after, axis,
                    x.shape());
  if (padding != Padding::constant) {
    const std::int64_t most = padding == Padding::reflect    ? n - 1
                              : padding == Padding::circular ? n
                                                             : INT64_MAX;
    check<ShapeError>(n > 0 && before <= most && after <= most,
                      "pad: {} before and {} after axis {} of shape {}; this padding has {} at most", before,
                      after, axis, x.shape(), n > 0 ? most : 0);
  }
  Tensors parts;
  if (before > 0) parts.push_back(margin(x, axis, before, Side::before, padding, value));
  parts.push_back(narrow(x, axis, std::max<std::int64_t>(-before, 0), kept));
  if (after > 0) parts.push_back(margin(x, axis, after, Side::after, padding, value));
  return parts.size() == 1 ? parts[0] : cat(Inputs(parts.begin(), parts.size()), axis);
}

}  // namespace

Tensor pad(const Tensor& x, Shape counts, Padding padding, Number value) {
  detail::check_given("pad", x);
  check<ShapeError>(counts.rank() % 2 == 0 && counts.rank() / 2 <= x.rank(),
                    "pad: {} counts for shape {}; two for each padded axis, the last axis first",
                    counts.rank(), x.shape());
  Tensor y = x;
  for (int i = 0; i < counts.rank() / 2; ++i) {
    const std::int64_t before = counts[2 * i], after = counts[2 * i + 1];
    constexpr std::int64_t limit = std::int64_t{1} << 40;  // so that sums of sizes can be counted
    check<ShapeError>(before > -limit && before < limit && after > -limit && after < limit,
                      "pad: {} and {} elements around axis {}", before, after, x.rank() - 1 - i);
    if (before != 0 || after != 0) y = pad_axis(y, x.rank() - 1 - i, before, after, padding, value);
  }
  return of_its_own(y, x);
}

// ---- matrices

Tensor outer(const Tensor& a, const Tensor& b) {
  detail::check_given("outer", a, b);
  check<ShapeError>(a.rank() == 1 && b.rank() == 1, "outer: takes 1-D tensors, got shapes {} and {}",
                    a.shape(), b.shape());
  return mul(unsqueeze(a, 1), b);
}

namespace {

Tensor triangle(std::string_view call, const Tensor& x, std::int64_t offset, bool lower) {
  check<ShapeError>(x.rank() >= 2, "{}: takes matrices, got shape {}", call, x.shape());
  const std::int64_t rows = x.shape()[x.rank() - 2], columns = x.shape().back();
  // Beyond these nothing changes.
  return apply(ops::Triangle{std::clamp(offset, -rows - 1, columns + 1), lower}, x);
}

/// Where the diagonal of an n by m matrix begins, row by row, and how long it is.
std::pair<std::int64_t, std::int64_t> diagonal_of(std::int64_t n, std::int64_t m, std::int64_t offset) {
  if (n == 0 || m == 0 || offset <= -n || offset >= m) return {0, 0};
  return offset >= 0 ? std::pair(offset, std::min(n, m - offset))
                     : std::pair(-offset * m, std::min(n + offset, m));
}

}  // namespace

Specs ops::Triangle::infer(SpecSpan in) const {
  check<ShapeError>(in[0].shape.rank() >= 2, "triangle: takes matrices, got shape {}", in[0].shape);
  return {in[0]};
}

Tensors ops::Triangle::reference(Inputs in) const {
  const Tensor& x = in[0];
  const std::int64_t rows = x.shape()[x.rank() - 2], columns = x.shape().back();
  const Tensor limit = add(reshape(arange(0, rows, 1, positions_on(x)), {rows, 1}), offset);
  const Tensor column = arange(0, columns, 1, positions_on(x));
  return {where(lower ? less_equal(column, limit) : greater_equal(column, limit), x, 0)};
}

Tensors ops::Triangle::grad(const GradArgs& args) const { return {apply(*this, args.gy[0])}; }

Tensor tril(const Tensor& x, std::int64_t offset) {
  detail::check_given("tril", x);
  return triangle("tril", x, offset, true);
}
Tensor triu(const Tensor& x, std::int64_t offset) {
  detail::check_given("triu", x);
  return triangle("triu", x, offset, false);
}

namespace {

/// All axes but `a` and `b`, then these.
Shape with_last(int rank, int a, int b) {
  Shape order;
  for (int i = 0; i < rank; ++i)
    if (i != a && i != b) order.push_back(i);
  order.push_back(a);
  order.push_back(b);
  return order;
}

}  // namespace

Layout ops::Diagonal::view(const Tensor& x) const {
  const auto is_axis = [&](int i) { return i >= 0 && i < x.rank(); };
  check<ShapeError>(is_axis(a) && is_axis(b) && a != b, "diagonal: axes {} and {} of shape {}", a, b,
                    x.shape());
  const Shape order = with_last(x.rank(), a, b);
  const std::int64_t m = x.shape()[b], length = diagonal_of(x.shape()[a], m, offset).second;
  Layout layout{{}, {}, x.layout().offset};
  for (int i = 0; i + 2 < order.rank(); ++i) {
    layout.shape.push_back(x.shape()[static_cast<int>(order[i])]);
    layout.strides.push_back(x.strides()[static_cast<int>(order[i])]);
  }
  layout.shape.push_back(length);
  layout.strides.push_back(length > 1 ? x.strides()[a] + x.strides()[b] : 1);
  if (length > 0) layout.offset += offset >= 0 ? offset * x.strides()[b] : -offset * x.strides()[a];
  return layout;
}

Tensors ops::Diagonal::grad(const GradArgs& args) const {
  const Shape &shape = args.specs[0].shape, order = with_last(shape.rank(), a, b);
  const std::int64_t n = shape[a], m = shape[b];
  const auto [start, length] = diagonal_of(n, m, offset);
  Shape rows, back = order;
  for (int i = 0; i < order.rank(); ++i) {
    rows.push_back(shape[static_cast<int>(order[i])]);
    back[static_cast<int>(order[i])] = i;
  }
  const Tensor flat = apply(Unslice{{rows.rank() - 2, start, m + 1, length}, n * m}, args.gy[0]);
  return {permute(reshape(flat, rows), back)};
}

Tensor diagonal(const Tensor& x, std::int64_t offset, std::int64_t a, std::int64_t b) {
  detail::check_given("diagonal", x);
  return apply(
      ops::Diagonal{normalize_axis("diagonal", a, x.rank()), normalize_axis("diagonal", b, x.rank()), offset},
      x);
}

Tensor diag(const Tensor& x, std::int64_t offset) {
  detail::check_given("diag", x);
  if (x.rank() == 2) return clone(diagonal(x, offset));
  check<ShapeError>(x.rank() == 1, "diag: takes a vector or a matrix, got shape {}", x.shape());
  constexpr std::int64_t limit = std::int64_t{1} << 30;
  check<ShapeError>(offset > -limit && offset < limit && x.numel() < limit,
                    "diag: a diagonal of {} at offset {} is of no matrix that can be held", x.numel(),
                    offset);
  const std::int64_t n = x.numel() + std::abs(offset);
  const auto [start, length] = diagonal_of(n, n, offset);
  return reshape(apply(ops::Unslice{{0, start, n + 1, length}, n * n}, x), {n, n});
}

}  // namespace sherd
