// Scaling of images, made of other ops: rows, and columns as the rows of the images turned.
#include <algorithm>
#include <cmath>
#include <vector>

#include "runtime/elementwise.h"
#include "runtime/ops.h"

namespace sherd {
namespace {

/// Pixels along one axis before and after, and by what scale where that is what was given.
struct Axis {
  std::int64_t from, to;
  double scale;

  /// How far apart results are, in pixels before: in T, since rounding decides which pixel is nearest.
  template <class T>
  T step() const {
    return scale > 0 ? T(1 / scale) : T(from) / T(to);
  }
};

/// As PyTorch has it, in f32 for every dtype, and halves whatever the scale is.
std::vector<std::int64_t> nearest_of(const Axis& axis) {
  std::vector<std::int64_t> pixels;
  const auto step = axis.to == 2 * axis.from ? 0.5F : axis.step<float>();
  for (std::int64_t i = 0; i < axis.to; ++i)
    pixels.push_back(
        std::min(static_cast<std::int64_t>(std::floor(static_cast<float>(i) * step)), axis.from - 1));
  return pixels;
}

/// The pixels between which each result lies, and the share of the second.
struct Places {
  std::vector<std::int64_t> first, second;
  std::vector<double> share;
};

template <class T>
Places places_of(const Axis& axis, bool align_corners) {
  Places places;
  const T last = T(axis.from - 1);
  const T step = !align_corners ? axis.step<T>() : axis.to > 1 ? last / T(axis.to - 1) : T(0);
  for (std::int64_t i = 0; i < axis.to; ++i) {
    const T at = std::clamp(align_corners ? step * T(i) : step * (T(i) + T(0.5)) - T(0.5), T(0), last);
    const auto first = static_cast<std::int64_t>(at);
    places.first.push_back(first);
    places.second.push_back(std::min(first + 1, axis.from - 1));
    places.share.push_back(at - T(first));
  }
  return places;
}

Tensor on_device_of(const Tensor& x, const auto& values) {
  return to(Tensor::from(values, {static_cast<std::int64_t>(values.size())}, Device::cpu()), x.device());
}

/// These rows of every image, as rows of one table: no axis is moved, and a pixel that is not finite stays
/// one.
Tensor rows_of(const Tensor& x, const std::vector<std::int64_t>& rows) {
  const Shape& s = x.shape();
  const std::int64_t planes = s[0] * s[1];
  const Tensor first = mul(arange(0, planes, 1, {DType::i64, x.device()}), s[2]);
  const Tensor picked =
      embedding(reshape(x, {planes * s[2], s[3]}), add(unsqueeze(first, 1), on_device_of(x, rows)));
  return reshape(picked, {s[0], s[1], static_cast<std::int64_t>(rows.size()), s[3]});
}

Tensor rows_between(const Tensor& x, const Axis& axis, bool align_corners) {
  const Places p = x.dtype() == DType::f64 ? places_of<double>(axis, align_corners)
                                           : places_of<float>(axis, align_corners);
  const Tensor share = unsqueeze(to(on_device_of(x, p.share), x.dtype()), 1);
  return add(mul(rows_of(x, p.first), sub(1, share)), mul(rows_of(x, p.second), share));
}

Tensor scaled(const Tensor& x, const Axis& axis, const InterpolateOptions& o) {
  if (axis.from == axis.to) return x;
  return o.mode == Interpolation::nearest ? rows_of(x, nearest_of(axis))
                                          : rows_between(x, axis, o.align_corners);
}

Axis axis_of(std::int64_t from, std::int64_t size, double scale) {
  constexpr std::int64_t most = 1 << 24;  // as far as f32 counts; the places are listed on the host
  if (size > 0 && size <= most) return {from, size, 0};
  const double to = std::floor(static_cast<double>(from) * scale);
  check<ValueError>(size == 0 && to >= 1 && to <= static_cast<double>(most),
                    "interpolate: {} pixels to a size of {} or by a scale of {}; results have 1 to {} a side",
                    from, size, scale, most);
  return {from, static_cast<std::int64_t>(to), scale};
}

}  // namespace

Tensor interpolate(const Tensor& x, const InterpolateOptions& o) {
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
  const Axis down = axis_of(x.shape()[2], o.size.down, o.scale.down),
             across = axis_of(x.shape()[3], o.size.across, o.scale.across);
  if (down.from == down.to && across.from == across.to) return clone(x);
  const Tensor wide = lines ? detail::to_compute_dtype(x) : x;
  const Tensor turned = scaled(transpose(scaled(wide, down, o), 2, 3), across, o);
  return to(contiguous(transpose(turned, 2, 3)), x.dtype());
}

}  // namespace sherd
