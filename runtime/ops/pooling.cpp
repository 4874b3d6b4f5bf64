// Pooling of images. The adaptive kinds are made of other ops.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "runtime/apply.h"
#include "runtime/ops.h"
#include "runtime/ops/patches.h"
#include "runtime/ops/pool2d.h"
#include "runtime/ops/topk.h"

namespace sherd {
namespace {

ops::PatchRule rule_of(std::int64_t kernel, PoolOptions o) {
  return {kernel, kernel, o.stride == 0 ? kernel : o.stride, o.padding};
}

/// The windows' spec: (N, C, down, across).
Spec pooled(std::string_view call, const Spec& x, const ops::PatchRule& rule) {
  check<DTypeError>(is_floating(x.dtype), "{}: takes floating dtypes, got {}; cast the input first", call,
                    name_of(x.dtype));
  check<ShapeError>(x.shape.rank() == 4, "{}: input (N, C, H, W), got shape {}", call, x.shape);
  const auto [height, width, stride, padding] = rule;
  const std::int64_t kernel = std::min(height, width);
  check<ValueError>(kernel > 0 && stride > 0 && padding >= 0 && padding <= kernel / 2,
                    "{}: kernel {} and stride {} must be positive, and padding {} at most half the kernel",
                    call, kernel, stride, padding);
  const std::int64_t h = x.shape[2] + 2 * padding, w = x.shape[3] + 2 * padding;
  check<ShapeError>(h >= height && w >= width, "{}: windows of {} x {} do not fit input {} padded by {}",
                    call, height, width, x.shape, padding);
  return {{x.shape[0], x.shape[1], (h - height) / stride + 1, (w - width) / stride + 1}, x.dtype, x.device};
}

/// Windows of each channel in the last axis: (N, C, down, across, height * width).
Tensor windows_of(const Tensor& x, const ops::PatchRule& rule, Number around) {
  const auto [height, width, stride, p] = rule;
  const Tensor padded = p > 0 ? pad(x, {p, p, p, p}, Padding::constant, around) : x;
  const Tensor rows = apply(ops::Patches{{height, width, stride, 0}}, padded);
  const Shape& s = rows.shape();
  return permute(reshape(rows, {s[0], s[1], s[2], x.shape()[1], height * width}), {0, 3, 1, 2, 4});
}

/// A window of adaptive pooling: floor(i size / n) to ceil((i + 1) size / n).
struct Span {
  std::int64_t begin, end;
  Span(std::int64_t i, std::int64_t n, std::int64_t size)
      : begin(i * size / n), end(((i + 1) * size + n - 1) / n) {}
};

/// (n, size): row i is the mean over its window.
Tensor means_of(std::int64_t n, std::int64_t size, const Tensor& like) {
  std::vector<double> weights(static_cast<std::size_t>(n * size), 0.0);
  for (std::int64_t i = 0; i < n; ++i) {
    const Span s(i, n, size);
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
  return {values, {values.shape, DType::i64, values.device}};
}

Tensors MaxPool2d::reference(Inputs in) const {
  const Tensor& x = in[0];
  const Picked best = max(windows_of(x, rule, -std::numeric_limits<double>::infinity()), -1);
  // Where the window begins and where in it; of a window of -inf the first is no pixel, but the one beside.
  const TensorOptions like{DType::i64, x.device()};
  const auto place = [&](const Tensor& in_window, int axis, std::int64_t size) {
    const Tensor first = sub(mul(arange(0, best.values.shape()[axis], 1, like), rule.stride), rule.padding);
    const Tensor along = axis == 2 ? unsqueeze(first, 1) : first;
    return clamp(add(embedding(reshape(in_window, {-1}), best.indices), along), 0, size - 1);
  };
  const Shape window{rule.height, rule.width};
  const Tensor row = place(expand(unsqueeze(arange(0, rule.height, 1, like), 1), window), 2, x.shape()[2]),
               column = place(expand(arange(0, rule.width, 1, like), window), 3, x.shape()[3]);
  return {best.values, add(mul(row, x.shape()[3]), column)};
}

Tensors MaxPool2d::grad(const GradArgs& args) const {
  const Shape& images = args.specs[0].shape;
  const DType dtype = args.specs[0].dtype;
  // A pixel of several windows has a sum, which in 16 bits stops growing.
  const bool overlap = rule.stride < std::max(rule.height, rule.width);
  const Tensor gy = overlap ? to(args.gy[0], compute_dtype(dtype)) : args.gy[0];
  const Shape lines{images[0], images[1], gy.shape()[2] * gy.shape()[3]};
  const Tensor gx =
      apply(Scatter{images[2] * images[3]}, reshape(gy, lines), reshape(args.outputs[1], lines));
  return {to(reshape(gx, images), dtype)};
}

Specs AvgPool2d::infer(SpecSpan in) const { return {pooled(name, in[0], rule)}; }

Tensors AvgPool2d::reference(Inputs in) const { return {mean(windows_of(in[0], rule, 0), {-1})}; }

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
  const std::int64_t area = rule.height * rule.width;
  const Tensor share = div(to(permute(gy, {0, 2, 3, 1}), compute_dtype(gy.dtype())), area);
  const Tensor windows =
      reshape(expand(unsqueeze(share, -1), {s[0], s[2], s[3], s[1], area}), {s[0], s[2], s[3], s[1] * area});
  return {to(apply(PatchesGrad{rule, rows, columns}, windows), gy.dtype())};
}

Tensors AvgPool2dGrad::grad(const GradArgs& args) const { return {apply(AvgPool2d{rule}, args.gy[0])}; }

}  // namespace ops

Tensor max_pool2d(const Tensor& x, std::int64_t kernel, PoolOptions options) {
  return apply_many(ops::MaxPool2d{rule_of(kernel, options)}, std::span(&x, 1))[0];
}

Tensor avg_pool2d(const Tensor& x, std::int64_t kernel, PoolOptions options) {
  return apply(ops::AvgPool2d{rule_of(kernel, options)}, x);
}

Tensor adaptive_avg_pool2d(const Tensor& x, std::int64_t down, std::int64_t across) {
  check_adaptive("adaptive_avg_pool2d", x, down, across);
  if (down == 1 && across == 1) return mean(x, {2, 3}, Keep::dims);
  // Rows, then columns, as sums of products in f32 at least.
  const Tensor wide = to(x, compute_dtype(x.dtype()));
  const Tensor rows = matmul(means_of(down, x.shape()[2], wide), wide);
  return to(matmul(rows, transpose(means_of(across, x.shape()[3], wide), 0, 1)), x.dtype());
}

Tensor adaptive_max_pool2d(const Tensor& x, std::int64_t down, std::int64_t across) {
  check_adaptive("adaptive_max_pool2d", x, down, across);
  const std::int64_t h = x.shape()[2], w = x.shape()[3];
  const auto most = [](std::int64_t n, std::int64_t size) {
    std::int64_t longest = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      const Span s(i, n, size);
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
      const Span rows(i, down, h), columns(j, across, w);
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
