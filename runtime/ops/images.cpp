#include "runtime/images.h"

#include <algorithm>
#include <utility>

#include "runtime/apply.h"
#include "runtime/elementwise.h"
#include "runtime/given.h"
#include "runtime/ops/slice.h"

namespace sherd {
namespace {

/// The last axes in the order of `last`, which counts from the first of them.
Tensor with_last_axes(const Tensor& x, std::initializer_list<int> last) {
  Shape axes;
  const int before = x.rank() - static_cast<int>(last.size());
  for (int i = 0; i < before; ++i) axes.push_back(i);
  for (const int i : last) axes.push_back(before + i);
  return permute(x, axes);
}

void check_image(std::string_view call, const Tensor& x) {
  check<ShapeError>(x.rank() >= 3, "{}: takes (..., C, H, W), got shape {}", call, x.shape());
}
void check_factor(std::string_view call, std::int64_t factor) {
  constexpr std::int64_t most = 1 << 15;
  check<ValueError>(factor > 0 && factor < most, "{}: factor {} is not from 1 to {}", call, factor, most - 1);
}

/// Sizes of x before its last `count`.
Shape leading(const Tensor& x, int count) {
  Shape shape;
  for (int i = 0; i < x.rank() - count; ++i) shape.push_back(x.shape()[i]);
  return shape;
}
Shape followed(Shape shape, std::initializer_list<std::int64_t> more) {
  for (const std::int64_t size : more) shape.push_back(size);
  return shape;
}

}  // namespace

Tensor pixel_shuffle(const Tensor& x, std::int64_t r) {
  detail::check_given("pixel_shuffle", x);
  check_image("pixel_shuffle", x);
  check_factor("pixel_shuffle", r);
  const std::int64_t c = x.size(-3), h = x.size(-2), w = x.size(-1);
  check<ShapeError>(c % (r * r) == 0, "pixel_shuffle: {} channels of shape {} are no multiple of {} x {}", c,
                    x.shape(), r, r);
  const Tensor apart = reshape(x, followed(leading(x, 3), {c / (r * r), r, r, h, w}));
  return reshape(with_last_axes(apart, {0, 3, 1, 4, 2}),
                 followed(leading(x, 3), {c / (r * r), h * r, w * r}));
}

Tensor pixel_unshuffle(const Tensor& x, std::int64_t r) {
  detail::check_given("pixel_unshuffle", x);
  check_image("pixel_unshuffle", x);
  check_factor("pixel_unshuffle", r);
  const std::int64_t c = x.size(-3), h = x.size(-2), w = x.size(-1);
  check<ShapeError>(h % r == 0 && w % r == 0,
                    "pixel_unshuffle: {} x {} pixels of shape {} are no blocks of {} x {}", h, w, x.shape(),
                    r, r);
  const Tensor apart = reshape(x, followed(leading(x, 3), {c, h / r, r, w / r, r}));
  return reshape(with_last_axes(apart, {0, 2, 4, 1, 3}), followed(leading(x, 3), {c * r * r, h / r, w / r}));
}

// ---- windows ----

namespace {

/// Windows along one axis of `size` pixels.
struct Along {
  std::int64_t size, kernel, stride, padding, dilation, count = 0;

  Along(std::string_view call, std::int64_t size, std::int64_t kernel, std::int64_t stride,
        std::int64_t padding, std::int64_t dilation)
      : size(size), kernel(kernel), stride(stride), padding(padding), dilation(dilation) {
    constexpr std::int64_t most = std::int64_t{1} << 31;  // so that no product of two wraps
    for (const std::int64_t number : {size, kernel, stride, padding, dilation})
      check<ValueError>(number < most, "{}: {} is not below 2^31", call, number);
    check<ValueError>(kernel > 0 && stride > 0 && padding >= 0 && dilation > 0,
                      "{}: kernel {}, stride {} and dilation {} are at least 1, and padding {} at least 0",
                      call, kernel, stride, dilation, padding);
    const std::int64_t room = size + 2 * padding - (dilation * (kernel - 1) + 1);
    check<ShapeError>(size > 0 && room >= 0,
                      "{}: a window of {} pixels, {} apart, does not fit {} pixels padded by {}", call,
                      kernel, dilation, size, padding);
    count = room / stride + 1;
  }
};

struct Windows {
  Along down, across;
  Windows(std::string_view call, PerAxis size, PerAxis kernel, const WindowOptions& o)
      : down(call, size.down, kernel.down, o.stride.down, o.padding.down, o.dilation.down),
        across(call, size.across, kernel.across, o.stride.across, o.padding.across, o.dilation.across) {}
  std::int64_t count() const { return down.count * across.count; }
  std::int64_t pixels() const { return down.kernel * across.kernel; }
};

/// The pixels that are the i-th of their windows along the axis `axis` of a padded image.
Tensor taps(const Tensor& padded, int axis, const Along& a, std::int64_t i) {
  return apply(ops::Slice{axis, i * a.dilation, a.stride, a.count}, padded);
}
/// The way back.
Tensor untap(const Tensor& y, int axis, const Along& a, std::int64_t i) {
  return apply(ops::Unslice{{axis, i * a.dilation, a.stride, a.count}, a.size + 2 * a.padding}, y);
}

}  // namespace

Tensor unfold(const Tensor& x, PerAxis kernel, const WindowOptions& options) {
  detail::check_given("unfold", x);
  check<ShapeError>(x.rank() == 3 || x.rank() == 4, "unfold: takes (N, C, H, W) or (C, H, W), got shape {}",
                    x.shape());
  if (x.rank() == 3) return squeeze(unfold(unsqueeze(x, 0), kernel, options), 0);
  const Windows windows("unfold", {x.size(2), x.size(3)}, kernel, options);
  const std::int64_t n = x.size(0), c = x.size(1);
  const Shape out = {n, c * windows.pixels(), windows.count()};
  const std::int64_t p = options.padding.down, q = options.padding.across;
  const Tensor padded = p > 0 || q > 0 ? pad(x, {q, q, p, p}) : x;
  std::vector<Tensor> all;  // (N, C, down, across) each
  for (std::int64_t i = 0; i < kernel.down; ++i)
    for (std::int64_t j = 0; j < kernel.across; ++j)
      all.push_back(taps(taps(padded, 2, windows.down, i), 3, windows.across, j));
  return reshape(stack(all, 2), out);
}

Tensor fold(const Tensor& x, PerAxis size, PerAxis kernel, const WindowOptions& options) {
  detail::check_given("fold", x);
  check<ShapeError>(x.rank() == 2 || x.rank() == 3,
                    "fold: takes (N, C kh kw, L) or (C kh kw, L), got shape {}", x.shape());
  if (x.rank() == 2) return squeeze(fold(unsqueeze(x, 0), size, kernel, options), 0);
  const Windows windows("fold", size, kernel, options);
  check<ShapeError>(x.size(1) % windows.pixels() == 0 && x.size(2) == windows.count(),
                    "fold: shape {} is not (N, C {}, {}), a column for each window of {} x {} pixels",
                    x.shape(), windows.pixels(), windows.count(), kernel.down, kernel.across);
  const std::int64_t n = x.size(0), c = x.size(1) / windows.pixels();
  const std::int64_t down = windows.down.count, across = windows.across.count;
  const auto sum_of = [&](const Tensor& wide) {
    const Tensor apart = reshape(wide, {n, c, windows.pixels(), down, across});
    Tensor total;
    for (std::int64_t i = 0; i < kernel.down; ++i)
      for (std::int64_t j = 0; j < kernel.across; ++j) {
        const Tensor one = select(apart, 2, i * kernel.across + j);
        const Tensor placed = untap(untap(one, 3, windows.across, j), 2, windows.down, i);
        total = total.defined() ? add(total, placed) : placed;
      }
    return narrow(narrow(total, 2, options.padding.down, size.down), 3, options.padding.across, size.across);
  };
  return contiguous(to(sum_of(detail::to_compute_dtype(x)), x.dtype()));
}

// ---- places ----

namespace {

void check_places(std::string_view call, const Tensor& x, bool fits, std::string_view wanted) {
  check<ShapeError>(fits, "{}: takes {}, got shape {}", call, wanted, x.shape());
  check<DTypeError>(is_floating(x.dtype()), "{}: takes floating dtypes, got {}; cast the input first", call,
                    name_of(x.dtype()));
}

/// -1 to 1 across `count` pixels.
Tensor steps(std::int64_t count, GridCorners corners, const TensorOptions& options) {
  if (corners == GridCorners::centres)
    return count > 1 ? linspace(-1, 1, count, options) : zeros({count}, options);
  const double half = 1 - 1 / static_cast<double>(std::max<std::int64_t>(count, 1));
  return linspace(-half, half, count, options);
}

/// Coordinates of -1 to 1 as pixels of an axis that has `size`.
Tensor in_pixels(const Tensor& x, std::int64_t size, GridCorners corners) {
  const auto n = static_cast<double>(size);
  if (corners == GridCorners::centres) return mul(add(x, 1), (n - 1) / 2);
  return div(sub(mul(add(x, 1), n), 1), 2);
}

/// Mirrored at the centres, or the edges, of the outermost pixels, as often as it takes.
Tensor mirrored(const Tensor& x, std::int64_t size, GridCorners corners) {
  const double low = corners == GridCorners::centres ? 0 : -0.5;
  const double span = static_cast<double>(size) - (corners == GridCorners::centres ? 1 : 0);
  if (span <= 0) return mul(x, 0);
  const Tensor away = abs(sub(x, low));
  const Tensor turns = floor(div(away, span).detach());
  const Tensor rest = sub(away, mul(turns, span));
  const Tensor is_odd = not_equal(remainder(turns, 2), 0);
  return add(where(is_odd, sub(span, rest), rest), low);
}

Tensor inside(const Tensor& x, std::int64_t size, const GridSampleOptions& o) {
  if (o.outside == GridPadding::zeros) return x;
  const Tensor turned = o.outside == GridPadding::reflection ? mirrored(x, size, o.corners) : x;
  const Tensor placed = clamp(turned, 0, static_cast<double>(size - 1));
  return where(isnan(placed), 0.0, placed);  // as in PyTorch
}

/// The pixels of all images as rows of their channels, and behind them one of zeros for what is outside.
struct Pixels {
  Tensor rows;      ///< (N H W + 1, C)
  Tensor of_image;  ///< (N, 1): where an image begins
  std::int64_t height, width;

  explicit Pixels(const Tensor& x) : height(x.size(2)), width(x.size(3)) {
    const std::int64_t n = x.size(0), c = x.size(1), each = height * width;
    rows = cat({reshape(permute(x, {0, 2, 3, 1}), {n * each, c}), zeros({1, c}, {x.dtype(), x.device()})});
    of_image = reshape(mul(arange(0, n, 1, {DType::i64, x.device()}), each), {n, 1});
  }
  /// One a place: `row` and `column` (N, places) are whole numbers, or none; (N, places, C).
  Tensor at(const Tensor& row, const Tensor& column) const {
    const auto is_in = [](const Tensor& place, std::int64_t size) {
      return logical_and(greater_equal(place, 0), less(place, static_cast<double>(size)));
    };
    const Tensor is_there = logical_and(is_in(row, height), is_in(column, width));
    const auto whole = [&](const Tensor& place) { return to(where(is_there, place, 0.0), DType::i64); };
    const Tensor pixel = add(add(mul(whole(row), width), whole(column)), of_image);
    const Tensor index = where(is_there, pixel, rows.size(0) - 1);
    return reshape(index_select(rows, 0, reshape(index, {index.numel()})),
                   {index.size(0), index.size(1), rows.size(1)});
  }
};

Tensor sampled(const Tensor& x, const Tensor& grid, const GridSampleOptions& o) {
  const std::int64_t n = x.size(0), down = grid.size(1), across = grid.size(2);
  const Pixels pixels(x);
  const Tensor flat = reshape(grid, {n, down * across, 2});
  const Tensor column = inside(in_pixels(select(flat, 2, 0), pixels.width, o.corners), pixels.width, o),
               row = inside(in_pixels(select(flat, 2, 1), pixels.height, o.corners), pixels.height, o);
  const auto as_images = [&](const Tensor& y) {
    return contiguous(permute(reshape(y, {n, down, across, x.size(1)}), {0, 3, 1, 2}));
  };
  if (o.mode == Interpolation::nearest)
    return as_images(pixels.at(round(row).detach(), round(column).detach()));
  const Tensor top = floor(row.detach()), left = floor(column.detach());
  const Tensor lower = unsqueeze(sub(row, top), 2), right = unsqueeze(sub(column, left), 2);  // shares
  const Tensor upper = sub(1, lower), before = sub(1, right);
  const auto corner = [&](int i, int j) {
    return mul(pixels.at(add(top, i), add(left, j)), mul(i == 0 ? upper : lower, j == 0 ? before : right));
  };
  return as_images(add(add(corner(0, 0), corner(0, 1)), add(corner(1, 0), corner(1, 1))));
}

}  // namespace

Tensor affine_grid(const Tensor& theta, PerAxis size, GridCorners corners) {
  detail::check_given("affine_grid", theta);
  check_places("affine_grid", theta, theta.rank() == 3 && theta.size(1) == 2 && theta.size(2) == 3,
               "(N, 2, 3)");
  check<ValueError>(size.down >= 0 && size.across >= 0, "affine_grid: {} x {} pixels", size.down,
                    size.across);
  const Tensor wide = detail::to_compute_dtype(theta);
  const TensorOptions options{wide.dtype(), wide.device()};
  const Shape all = {size.down, size.across};
  const auto grid = meshgrid({steps(size.down, corners, options), steps(size.across, corners, options)});
  const Tensor base = reshape(stack({grid[1], grid[0], ones(all, options)}, 2), {size.down * size.across, 3});
  const Tensor places = matmul(base, transpose(wide, 1, 2));
  return to(reshape(places, {theta.size(0), size.down, size.across, 2}), theta.dtype());
}

Tensor grid_sample(const Tensor& x, const Tensor& grid, const GridSampleOptions& options) {
  detail::check_given("grid_sample", x, grid);
  check_places("grid_sample", x, x.rank() == 4 && x.size(2) > 0 && x.size(3) > 0, "images (N, C, H, W)");
  check_places("grid_sample", grid, grid.rank() == 4 && grid.size(3) == 2 && grid.size(0) == x.size(0),
               "places (N, h, w, 2) of as many images");
  check<DTypeError>(x.dtype() == grid.dtype(), "grid_sample: images have dtype {} and places {}; cast one",
                    name_of(x.dtype()), name_of(grid.dtype()));
  return detail::in_compute_dtype(Tensors{x, grid},
                                  [&](Inputs in) { return sampled(in[0], in[1], options); });
}

std::vector<Tensor> meshgrid(std::span<const Tensor> along, MeshIndexing order) {
  detail::check_given("meshgrid", along);
  check<ValueError>(!along.empty(), "meshgrid: no tensors; give one for each axis");
  const auto axis_of = [&](std::size_t i) {
    const bool swapped = order == MeshIndexing::xy && i < 2 && along.size() > 1;
    return static_cast<int>(swapped ? 1 - i : i);
  };
  const Shape ones_of_all(std::vector<std::int64_t>(along.size(), 1));
  Shape all = ones_of_all;
  for (std::size_t i = 0; i < along.size(); ++i) {
    check<ShapeError>(along[i].rank() <= 1, "meshgrid: takes 0-d and 1-D tensors, got shape {}",
                      along[i].shape());
    all[axis_of(i)] = along[i].numel();
  }
  std::vector<Tensor> lines;
  for (std::size_t i = 0; i < along.size(); ++i) {
    Shape line = ones_of_all;
    line[axis_of(i)] = along[i].numel();
    lines.push_back(expand(reshape(along[i], line), all));
  }
  return lines;
}

Tensor instance_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  detail::check_given("instance_norm", x);
  check<ShapeError>(x.rank() >= 2, "instance_norm: takes (N, C, ...), got shape {}", x.shape());
  const std::int64_t c = x.size(1);
  std::int64_t pixels = 1;
  for (int i = 2; i < x.rank(); ++i) pixels *= x.shape()[i];
  check<ShapeError>(
      pixels != 1, "instance_norm: one element a channel in shape {}; its deviation is of no use", x.shape());
  check<ShapeError>(c > 0, "instance_norm: no channels in shape {}", x.shape());
  check<DTypeError>(is_floating(x.dtype()), "instance_norm: takes floating dtypes, got {}",
                    name_of(x.dtype()));
  for (const Tensor* t : {&weight, &bias})
    check<ShapeError>(!t->defined() || t->shape() == Shape{c},
                      "instance_norm: weight or bias of shape {} for {} channels",
                      t->defined() ? t->shape() : Shape(), c);
  return group_norm(x, c, weight, bias, eps);
}

}  // namespace sherd
