// Pooling of images. The adaptive kinds are made of other ops.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "runtime/apply.h"
#include "runtime/elementwise.h"
#include "runtime/given.h"
#include "runtime/ops.h"
#include "runtime/ops/conv2d.h"
#include "runtime/ops/picking.h"
#include "runtime/ops/pool2d.h"

namespace sherd {
namespace {

void check_axis(std::string_view call, const ops::PoolRule::Axis& axis) {
  const auto [kernel, stride, padding, beyond] = axis;
  constexpr std::int64_t most = std::int64_t{1} << 31;  // so that no sum of sizes wraps
  check<ValueError>(kernel > 0 && kernel < most && stride > 0 && padding >= 0 && padding <= kernel / 2,
                    "{}: kernel {} and stride {} must be positive, the kernel below 2^31, and padding {} at "
                    "most half the kernel",
                    call, kernel, stride, padding);
  check<ValueError>(beyond >= 0 && beyond < std::max(kernel, stride),
                    "{}: {} pixels beyond the padding; fewer than a kernel of {} or a stride of {}", call,
                    beyond, kernel, stride);
}

void check_images(std::string_view call, const Spec& x) {
  check<DTypeError>(is_floating(x.dtype), "{}: takes floating dtypes, got {}; cast the input first", call,
                    name_of(x.dtype));
  check<ShapeError>(x.shape.rank() == 4 && x.shape[2] > 0 && x.shape[3] > 0,
                    "{}: input (N, C, H, W) with pixels, got shape {}", call, x.shape);
}

/// The windows' spec: (N, C, down, across).
Spec pooled(std::string_view call, const Spec& x, const ops::PoolRule& rule) {
  const auto& [down, across] = rule;
  check_images(call, x);
  check_axis(call, down), check_axis(call, across);
  const std::int64_t h = x.shape[2] + 2 * down.padding + down.beyond,
                     w = x.shape[3] + 2 * across.padding + across.beyond;
  // In the words of lines, where they stand for images of one row.
  const bool line = call.ends_with("1d");
  check<ShapeError>(!line || w >= across.kernel, "{}: windows of {} do not fit input {} padded by {}", call,
                    across.kernel, Shape{x.shape[0], x.shape[1], x.shape[3]}, across.padding);
  check<ShapeError>(h >= down.kernel && w >= across.kernel,
                    "{}: windows of {} x {} do not fit input {} padded by {} and {}", call, down.kernel,
                    across.kernel, x.shape, down.padding, across.padding);
  const std::int64_t last_down = (h - down.kernel) / down.stride,
                     last_across = (w - across.kernel) / across.stride;
  check<ShapeError>(last_down * down.stride < x.shape[2] + down.padding &&
                        last_across * across.stride < x.shape[3] + across.padding,
                    "{}: of input {} the last window would begin beyond the image", call, x.shape);
  return {{x.shape[0], x.shape[1], last_down + 1, last_across + 1}, x.dtype, x.device};
}

/// How many pixels beyond the padding of `size` the windows of ceil_mode see: one that begins there is none.
std::int64_t beyond(const ops::PoolRule::Axis& axis, std::int64_t size) {
  const auto [kernel, stride, padding, _] = axis;
  const std::int64_t left = size + 2 * padding - kernel;  // behind the first window
  if (left <= -stride) return 0;                          // not even one fits, which is refused
  std::int64_t last = left <= 0 ? 0 : left / stride + (left % stride != 0);
  if (last * stride >= size + padding) --last;
  return std::max<std::int64_t>(last * stride - left, 0);
}

/// The rule for images x.
ops::PoolRule rule_of(std::string_view call, const Tensor& x, PerAxis kernel, const Pool2dOptions& o) {
  const auto axis = [&](std::int64_t kernel, std::int64_t stride, std::int64_t padding) {
    return ops::PoolRule::Axis{kernel, stride == 0 ? kernel : stride, padding};
  };
  ops::PoolRule rule{axis(kernel.down, o.stride.down, o.padding.down),
                     axis(kernel.across, o.stride.across, o.padding.across)};
  check_images(call, x.spec());
  check_axis(call, rule.down), check_axis(call, rule.across);
  if (!o.ceil_mode) return rule;
  rule.down.beyond = beyond(rule.down, x.shape()[2]);
  rule.across.beyond = beyond(rule.across, x.shape()[3]);
  return rule;
}

/// A line of pixels as an image of one row.
Tensor image_of(std::string_view call, const Tensor& x) {
  check<ShapeError>(x.rank() == 3, "{}: input (N, C, L), got shape {}", call, x.shape());
  return unsqueeze(x, 2);
}

/// How many pixels of an axis of `size` each window's mean counts.
std::vector<double> counts_of(const ops::PoolRule::Axis& axis, std::int64_t size, std::int64_t windows,
                              bool include_pad) {
  std::vector<double> counts;
  for (std::int64_t i = 0; i < windows; ++i) {
    const std::int64_t begin = i * axis.stride - axis.padding, end = begin + axis.kernel;
    counts.push_back(static_cast<double>(include_pad
                                             ? std::min(end, size + axis.padding) - begin
                                             : std::min(end, size) - std::max<std::int64_t>(begin, 0)));
  }
  return counts;
}

/// What turns means that divide by the whole kernel into those that divide as `o` says: (down, across).
Tensor corrections(std::string_view call, const Tensor& x, const ops::PoolRule& rule,
                   const AvgPool2dOptions& o) {
  const Shape s = pooled(call, x.spec(), rule).shape;
  const std::vector<double> down = counts_of(rule.down, x.shape()[2], s[2], o.count_include_pad),
                            across = counts_of(rule.across, x.shape()[3], s[3], o.count_include_pad);
  const auto area = static_cast<double>(rule.down.kernel) * static_cast<double>(rule.across.kernel);
  std::vector<double> factors;
  for (const double rows : down)
    for (const double columns : across) factors.push_back(area / (rows * columns));
  return to(to(Tensor::from(factors, {s[2], s[3]}, Device::cpu()), x.dtype()), x.device());
}

Tensor means_of(std::string_view call, const Tensor& x, PerAxis kernel, const AvgPool2dOptions& o) {
  const ops::PoolRule rule = rule_of(call, x, kernel, {o.stride, o.padding, o.ceil_mode});
  check<ValueError>(o.divisor_override != 0, "{}: divisor_override is 0; sums are divided by it", call);
  const bool beyond = rule.down.beyond > 0 || rule.across.beyond > 0;
  const bool padded = rule.down.padding > 0 || rule.across.padding > 0;
  pooled(call, x.spec(), rule);
  if (!o.divisor_override && !beyond && (o.count_include_pad || !padded))
    return apply(ops::AvgPool2d{rule}, x);
  const Tensor wide = detail::to_compute_dtype(x), means = apply(ops::AvgPool2d{rule}, wide);
  if (!o.divisor_override) return to(mul(means, corrections(call, wide, rule, o)), x.dtype());
  const auto area = static_cast<double>(rule.down.kernel) * static_cast<double>(rule.across.kernel);
  return to(mul(means, area / static_cast<double>(*o.divisor_override)), x.dtype());
}

/// The same windows for what convolutions are made of.
ops::ConvRule conv_rule(const ops::PoolRule& rule) {
  return {{rule.down.stride, rule.down.padding}, {rule.across.stride, rule.across.padding}};
}

/// Windows of each channel in the last axis: (N, C, down, across, height * width).
Tensor windows_of_channels(std::string_view call, const Tensor& x, const ops::PoolRule& rule, Number around) {
  const std::int64_t p = rule.down.padding, q = rule.across.padding, height = rule.down.kernel,
                     width = rule.across.kernel;
  const Shape s = pooled(call, x.spec(), rule).shape;
  const Tensor padded =
      pad(x, {q, q + rule.across.beyond, p, p + rule.down.beyond}, Padding::constant, around);
  const Tensor rows =
      ops::windows_of({{rule.down.stride}, {rule.across.stride}}, padded, height, width, s[2], s[3]);
  return permute(reshape(rows, {s[0], s[2], s[3], s[1], height * width}), {0, 3, 1, 2, 4});
}

/// A window of adaptive pooling: floor(i size / n) to ceil((i + 1) size / n).
struct AdaptiveWindow {
  std::int64_t begin, end;
  AdaptiveWindow(std::int64_t i, std::int64_t n, std::int64_t size)
      : begin(i * size / n), end(((i + 1) * size + n - 1) / n) {}
};

/// (n, size): row i is the mean over its window.
Tensor means_of(std::int64_t n, std::int64_t size, const Tensor& like) {
  std::vector<double> weights(static_cast<std::size_t>(n * size), 0.0);
  for (std::int64_t i = 0; i < n; ++i) {
    const AdaptiveWindow s(i, n, size);
    for (std::int64_t j = s.begin; j < s.end; ++j)
      weights[static_cast<std::size_t>(i * size + j)] = 1.0 / static_cast<double>(s.end - s.begin);
  }
  return to(to(Tensor::from(weights, {n, size}, Device::cpu()), like.dtype()), like.device());
}

/// What the adaptive kinds take.
void check_adaptive(std::string_view call, const Tensor& x, std::int64_t down, std::int64_t across) {
  check<DTypeError>(is_floating(x.dtype()), "{}: takes floating dtypes, got {}", call, name_of(x.dtype()));
  check<ShapeError>(x.rank() == 4 && x.shape()[2] > 0 && x.shape()[3] > 0,
                    "{}: input (N, C, H, W) with pixels, got shape {}", call, x.shape());
  constexpr std::int64_t most = 1 << 16;
  check<ValueError>(down > 0 && across > 0 && down <= most && across <= most,
                    "{}: an output of {} x {}; 1 to {} along each axis", call, down, across, most);
}

}  // namespace

namespace ops {

Specs MaxPool2d::infer(SpecSpan in) const {
  const Spec values = pooled(name, in[0], rule);
  return {values, {values.shape, rule.numbers(), values.device}};
}

namespace {

/// The row or column where each window along `axis` of (N, C, down, across) begins, padding counted.
Tensor first_pixels(const PoolRule::Axis& of, std::int64_t windows, int axis, Device device) {
  const Tensor first = sub(mul(arange(0, windows, 1, {DType::i64, device}), of.stride), of.padding);
  return axis == 2 ? unsqueeze(first, 1) : first;
}
/// The places in images of `columns`, counted row by row, of pixels with the given numbers in their windows.
Tensor places_of(const PoolRule& rule, const Tensor& numbers, std::int64_t columns) {
  const Tensor all = to(numbers, DType::i64);
  const Shape& s = numbers.shape();
  const Tensor row = add(floor_divide(all, rule.across.kernel),
                         first_pixels(rule.down, s[2], 2, numbers.device())),
               column = add(remainder(all, rule.across.kernel),
                            first_pixels(rule.across, s[3], 3, numbers.device()));
  return add(mul(row, columns), column);
}

}  // namespace

Tensors MaxPool2d::reference(Inputs in) const {
  const Tensor& x = in[0];
  const Picked best = max(windows_of_channels(name, x, rule, -std::numeric_limits<double>::infinity()), -1);
  // Of a window of -inf the first is no pixel, but the one beside.
  const auto seen = [&](const Tensor& in_window, int axis, const PoolRule::Axis& of) {
    const Tensor first = first_pixels(of, best.values.shape()[axis], axis, x.device());
    return sub(clamp(add(in_window, first), 0, x.shape()[axis] - 1), first);
  };
  const Tensor row = seen(floor_divide(best.indices, rule.across.kernel), 2, rule.down),
               column = seen(remainder(best.indices, rule.across.kernel), 3, rule.across);
  return {best.values, to(add(mul(row, rule.across.kernel), column), rule.numbers())};
}

Tensors MaxPool2d::grad(const GradArgs& args) const {
  const Shape& images = args.specs[0].shape;
  return {apply(MaxPool2dGrad{rule, images[2], images[3]}, args.gy[0], args.outputs[1])};
}

Specs MaxPool2dGrad::infer(SpecSpan in) const {
  const Spec images{{in[0].shape[0], in[0].shape[1], rows, columns}, in[0].dtype, in[0].device};
  check<ShapeError>(
      pooled(name, images, rule).shape == in[0].shape && in[1].shape == in[0].shape,
      "max_pool2d_grad: windows of shape {} and numbers of shape {} are not those of {} x {} pixels",
      in[0].shape, in[1].shape, rows, columns);
  check<DTypeError>(in[1].dtype == rule.numbers(), "max_pool2d_grad: numbers are {} for such windows, got {}",
                    name_of(rule.numbers()), name_of(in[1].dtype));
  return {images};
}

Tensors MaxPool2dGrad::reference(Inputs in) const {
  const Shape& s = in[0].shape();
  const bool overlap = rule.down.stride < rule.down.kernel || rule.across.stride < rule.across.kernel;
  const Shape lines{s[0], s[1], s[2] * s[3]};
  const PutAt sums{{Of::elements, 2, 1, !overlap, name}, Put::add, {s[0], s[1], rows * columns}};
  const Tensor places = places_of(rule, in[1], columns);
  const Tensor gx = apply(sums, Tensor{}, reshape(places, lines), reshape(in[0], lines));
  return {reshape(gx, {s[0], s[1], rows, columns})};
}

Tensors MaxPool2dGrad::grad(const GradArgs& args) const {
  const Shape& s = args.specs[0].shape;
  const Tensor picked = gather(reshape(args.gy[0], {s[0], s[1], rows * columns}),
                               reshape(places_of(rule, args.inputs[1], columns), {s[0], s[1], s[2] * s[3]}));
  return {reshape(picked, s), Tensor{}};
}

Specs AvgPool2d::infer(SpecSpan in) const { return {pooled(name, in[0], rule)}; }

Tensors AvgPool2d::reference(Inputs in) const {
  return {mean(windows_of_channels(name, in[0], rule, 0), {-1})};
}

Tensors AvgPool2d::grad(const GradArgs& args) const {
  const Shape& images = args.specs[0].shape;
  return {apply(AvgPool2dGrad{rule, images[2], images[3]}, args.gy[0])};
}

Specs AvgPool2dGrad::infer(SpecSpan in) const {
  const Spec images{{in[0].shape[0], in[0].shape[1], rows, columns}, in[0].dtype, in[0].device};
  check<ShapeError>(pooled(name, images, rule).shape == in[0].shape,
                    "avg_pool2d_grad: windows of shape {} are not those of {} x {} pixels", in[0].shape, rows,
                    columns);
  return {images};
}

Tensors AvgPool2dGrad::reference(Inputs in) const {
  const Tensor& gy = in[0];
  const Shape& s = gy.shape();
  const std::int64_t height = rule.down.kernel, width = rule.across.kernel, area = height * width;
  const Tensor share = div(to(permute(gy, {0, 2, 3, 1}), compute_dtype(gy.dtype())), area);
  const Tensor windows =
      reshape(expand(unsqueeze(share, -1), {s[0], s[2], s[3], s[1], area}), {s[0], s[2], s[3], s[1] * area});
  const Tensor images = images_of(conv_rule(rule), windows, height, width, rows + rule.down.beyond,
                                  columns + rule.across.beyond);
  return {to(contiguous(narrow(narrow(images, 2, 0, rows), 3, 0, columns)), gy.dtype())};
}

Tensors AvgPool2dGrad::grad(const GradArgs& args) const { return {apply(AvgPool2d{rule}, args.gy[0])}; }

}  // namespace ops

Tensor max_pool2d(const Tensor& x, PerAxis kernel, const Pool2dOptions& options) {
  detail::check_given("max_pool2d", x);
  return apply_many(ops::MaxPool2d{rule_of("max_pool2d", x, kernel, options)}, std::span(&x, 1))[0];
}

Tensor avg_pool2d(const Tensor& x, PerAxis kernel, const AvgPool2dOptions& options) {
  detail::check_given("avg_pool2d", x);
  return means_of("avg_pool2d", x, kernel, options);
}

Tensor max_pool1d(const Tensor& x, std::int64_t kernel, const Pool1dOptions& options) {
  detail::check_given("max_pool1d", x);
  const Tensor image = image_of("max_pool1d", x);
  const ops::PoolRule rule = rule_of("max_pool1d", image, {1, kernel},
                                     {{1, options.stride}, {0, options.padding}, options.ceil_mode});
  pooled("max_pool1d", image.spec(), rule);
  return squeeze(apply_many(ops::MaxPool2d{rule}, std::span(&image, 1))[0], 2);
}

Tensor avg_pool1d(const Tensor& x, std::int64_t kernel, const AvgPool1dOptions& options) {
  detail::check_given("avg_pool1d", x);
  return squeeze(means_of("avg_pool1d", image_of("avg_pool1d", x), {1, kernel},
                          {.stride = {1, options.stride},
                           .padding = {0, options.padding},
                           .ceil_mode = options.ceil_mode,
                           .count_include_pad = options.count_include_pad,
                           .divisor_override = options.divisor_override}),
                 2);
}

Tensor adaptive_avg_pool2d(const Tensor& x, std::int64_t down, std::int64_t across) {
  detail::check_given("adaptive_avg_pool2d", x);
  check_adaptive("adaptive_avg_pool2d", x, down, across);
  const Shape& s = x.shape();
  if (down == 1 && across == 1)
    return reshape(mean(reshape(x, {s[0], s[1], s[2] * s[3]}), {2}), {s[0], s[1], 1, 1});
  if (s[2] % down == 0 && s[3] % across == 0) {  // windows beside one another
    const std::int64_t height = s[2] / down, width = s[3] / across;
    return avg_pool2d(x, {height, width}, {.stride = {height, width}});
  }
  // Rows, then columns, as sums of products in f32 at least; what is not finite spreads over its row and
  // column.
  const Tensor wide = detail::to_compute_dtype(x);
  const Tensor rows = matmul(means_of(down, x.shape()[2], wide), wide);
  return to(matmul(rows, transpose(means_of(across, x.shape()[3], wide), 0, 1)), x.dtype());
}

Tensor adaptive_max_pool2d(const Tensor& x, std::int64_t down, std::int64_t across) {
  detail::check_given("adaptive_max_pool2d", x);
  check_adaptive("adaptive_max_pool2d", x, down, across);
  const std::int64_t h = x.shape()[2], w = x.shape()[3];
  const auto most = [](std::int64_t n, std::int64_t size) {
    std::int64_t longest = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      const AdaptiveWindow s(i, n, size);
      longest = std::max(longest, s.end - s.begin);
    }
    return longest;
  };
  const auto each = static_cast<std::size_t>(most(down, h) * most(across, w));
  // The pixels of each window, filled up with its first one: which of equal ones is first stays.
  std::vector<std::int64_t> pixels;
  pixels.reserve(each * static_cast<std::size_t>(down * across));
  for (std::int64_t i = 0; i < down; ++i)
    for (std::int64_t j = 0; j < across; ++j) {
      const AdaptiveWindow rows(i, down, h), columns(j, across, w);
      const std::size_t begin = pixels.size();
      for (std::int64_t r = rows.begin; r < rows.end; ++r)
        for (std::int64_t c = columns.begin; c < columns.end; ++c) pixels.push_back(r * w + c);
      pixels.resize(begin + each, pixels[begin]);
    }
  const std::int64_t n = x.shape()[0], channels = x.shape()[1];
  const auto count = static_cast<std::int64_t>(pixels.size());
  const Tensor index = to(Tensor::from(pixels, {count}, Device::cpu()), x.device());
  const Tensor windows = index_select(reshape(x, {n, channels, h * w}), -1, index);
  return max(reshape(windows, {n, channels, down, across, static_cast<std::int64_t>(each)}), -1).values;
}

}  // namespace sherd
