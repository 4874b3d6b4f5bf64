#include "runtime/ops/interpolate.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "runtime/apply.h"
#include "runtime/elementwise.h"
#include "runtime/given.h"
#include "runtime/ops.h"

namespace sherd {
namespace ops {
namespace {

/// (to, from): row i has the shares of the pixels that result i is made of. For a product, so not where
/// pixels may be infinite.
Tensor shares_of(const ResampledAxis& axis, TensorOptions options) {
  std::vector<double> shares(static_cast<std::size_t>(axis.to * axis.from), 0);
  const auto fill = [&]<class C>(C step) {
    for (std::int64_t i = 0; i < axis.to; ++i) {
      const PixelPair<C> pair = axis.pair(i, step);
      double* row = shares.data() + i * axis.from;
      row[pair.first] += C(1) - pair.share;
      row[pair.second] += pair.share;
    }
  };
  if (axis.lines && options.dtype == DType::f64)
    fill(axis.step<double>());
  else
    fill(axis.step<float>());
  return to(Tensor::from(shares, {axis.to, axis.from}, options.device), options.dtype);
}

/// These rows of every image, as rows of one table: no axis is moved, and a pixel that is not finite stays
/// one.
Tensor rows_of(const Tensor& x, const std::vector<std::int64_t>& rows) {
  const Shape& s = x.shape();
  const std::int64_t planes = s[0] * s[1];
  const Tensor first = mul(arange(0, planes, 1, {DType::i64, x.device()}), s[2]),
               list = Tensor::from(rows, {static_cast<std::int64_t>(rows.size())}, x.device());
  const Tensor picked = embedding(reshape(x, {planes * s[2], s[3]}), add(unsqueeze(first, 1), list));
  return reshape(picked, {s[0], s[1], static_cast<std::int64_t>(rows.size()), s[3]});
}

template <class C>
Tensor scaled_in(const Tensor& x, const ResampledAxis& axis) {
  std::vector<std::int64_t> first, second;
  std::vector<double> share;
  for (std::int64_t i = 0; i < axis.to; ++i) {
    const PixelPair<C> pair = axis.pair(i, axis.step<C>());
    first.push_back(pair.first);
    second.push_back(pair.second);
    share.push_back(pair.share);
  }
  if (!axis.lines) return rows_of(x, first);
  const Tensor of_second = to(Tensor::from(share, {axis.to, 1}, x.device()), x.dtype());
  return add(mul(rows_of(x, first), sub(1, of_second)), mul(rows_of(x, second), of_second));
}

Tensor scaled(const Tensor& x, const ResampledAxis& axis) {
  if (axis.stays()) return x;
  return axis.lines && x.dtype() == DType::f64 ? scaled_in<double>(x, axis) : scaled_in<float>(x, axis);
}

Spec resized(std::string_view op, Spec x, std::int64_t rows_before, std::int64_t columns_before,
             std::int64_t rows, std::int64_t columns) {
  check<ShapeError>(x.shape.rank() == 4 && x.shape[2] == rows_before && x.shape[3] == columns_before,
                    "{}: takes images of {} x {} pixels, got shape {}", op, rows_before, columns_before,
                    x.shape);
  x.shape[2] = rows, x.shape[3] = columns;
  return x;
}

}  // namespace

Specs Interpolate::infer(SpecSpan in) const {
  return {resized(name, in[0], down.from, across.from, down.to, across.to)};
}

Tensors Interpolate::reference(Inputs in) const {
  const Tensor wide = down.lines ? sherd::detail::to_compute_dtype(in[0]) : in[0];
  const Tensor turned = scaled(transpose(scaled(wide, down), 2, 3), across);
  return {to(contiguous(transpose(turned, 2, 3)), in[0].dtype())};
}

Tensors Interpolate::grad(const GradArgs& args) const {
  return {apply(InterpolateGrad{down, across}, args.gy[0])};
}

Specs InterpolateGrad::infer(SpecSpan in) const {
  return {resized(name, in[0], down.to, across.to, down.from, across.from)};
}

Tensors InterpolateGrad::grad(const GradArgs& args) const {
  return {apply(Interpolate{down, across}, args.gy[0])};
}

Tensors InterpolateGrad::reference(Inputs in) const {
  Tensor g = sherd::detail::to_compute_dtype(in[0]);
  const TensorOptions like{g.dtype(), g.device()};
  if (!down.stays()) g = matmul(transpose(shares_of(down, like), 0, 1), g);
  if (!across.stays()) g = matmul(g, shares_of(across, like));
  return {to(g.is(in[0]) ? clone(g) : g, in[0].dtype())};
}

}  // namespace ops

namespace {

ops::ResampledAxis axis_of(std::int64_t from, std::int64_t size, double scale, const InterpolateOptions& o) {
  constexpr std::int64_t most = 1 << 24;  // as far as f32 counts
  ops::ResampledAxis axis{from, size, 0, o.mode == Interpolation::bilinear, o.align_corners};
  if (size > 0 && size <= most) return axis;
  const double to = std::floor(static_cast<double>(from) * scale);
  check<ValueError>(size == 0 && to >= 1 && to <= static_cast<double>(most),
                    "interpolate: {} pixels to a size of {} or by a scale of {}; results have 1 to {} a side",
                    from, size, scale, most);
  axis.to = static_cast<std::int64_t>(to), axis.scale = scale;
  return axis;
}

}  // namespace

Tensor interpolate(const Tensor& x, const InterpolateOptions& o) {
  detail::check_given("interpolate", x);
  const bool lines = o.mode == Interpolation::bilinear;
  check<ShapeError>(x.rank() == 4 && x.shape()[2] > 0 && x.shape()[3] > 0,
                    "interpolate: input (N, C, H, W) with pixels, got shape {}", x.shape());
  check<DTypeError>(!lines || is_floating(x.dtype()),
                    "interpolate: lines between pixels take floating dtypes, got {}; cast the input first",
                    name_of(x.dtype()));
  check<ValueError>(lines || !o.align_corners, "interpolate: align_corners is of the mode bilinear alone");
  check<ValueError>((o.size == PerAxis(0)) != (o.scale == ScalePerAxis(0)),
                    "interpolate: a size or a scale, one of them; got size {} x {} and scale {} x {}",
                    o.size.down, o.size.across, o.scale.down, o.scale.across);
  const ops::Interpolate op{axis_of(x.shape()[2], o.size.down, o.scale.down, o),
                            axis_of(x.shape()[3], o.size.across, o.scale.across, o)};
  return op.down.stays() && op.across.stays() ? clone(x) : apply(op, x);
}

}  // namespace sherd
