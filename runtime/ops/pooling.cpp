// Pooling of images, made of other ops.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "runtime/apply.h"
#include "runtime/ops.h"
#include "runtime/ops/patches.h"

namespace sherd {
namespace {

/// Windows of each channel in the last axis: (N, down, across, C, kernel^2).
Tensor windows_of(std::string_view call, const Tensor& x, std::int64_t kernel, PoolOptions o, Number around) {
  check<DTypeError>(is_floating(x.dtype()), "{}: takes floating dtypes, got {}; cast the input first", call,
                    name_of(x.dtype()));
  check<ShapeError>(x.rank() == 4, "{}: input (N, C, H, W), got shape {}", call, x.shape());
  const std::int64_t stride = o.stride == 0 ? kernel : o.stride;
  check<ValueError>(kernel > 0 && stride > 0 && o.padding >= 0 && o.padding <= kernel / 2,
                    "{}: kernel {} and stride {} must be positive, and padding {} at most half the kernel",
                    call, kernel, stride, o.padding);
  const std::int64_t h = x.shape()[2] + 2 * o.padding, w = x.shape()[3] + 2 * o.padding;
  check<ShapeError>(h >= kernel && w >= kernel, "{}: windows of {} x {} do not fit input {} padded by {}",
                    call, kernel, kernel, x.shape(), o.padding);
  const std::int64_t p = o.padding;
  const Tensor padded = p > 0 ? pad(x, {p, p, p, p}, Padding::constant, around) : x;
  const Tensor rows = apply(ops::Patches{{kernel, kernel, stride, 0}}, padded);
  const Shape& s = rows.shape();
  return reshape(rows, {s[0], s[1], s[2], x.shape()[1], kernel * kernel});
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

Tensor max_pool2d(const Tensor& x, std::int64_t kernel, PoolOptions options) {
  const Tensor windows =
      windows_of("max_pool2d", x, kernel, options, -std::numeric_limits<double>::infinity());
  return contiguous(permute(max(windows, -1).values, {0, 3, 1, 2}));
}

Tensor avg_pool2d(const Tensor& x, std::int64_t kernel, PoolOptions options) {
  return contiguous(permute(mean(windows_of("avg_pool2d", x, kernel, options, 0), {-1}), {0, 3, 1, 2}));
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

Tensor group_norm(const Tensor& x, std::int64_t groups, const Tensor& weight, const Tensor& bias,
                  double eps) {
  check<DTypeError>(is_floating(x.dtype()), "group_norm: takes floating dtypes, got {}", name_of(x.dtype()));
  check<ShapeError>(x.rank() >= 2, "group_norm: input (N, C, ...), got shape {}", x.shape());
  const std::int64_t n = x.shape()[0], channels = x.shape()[1];
  check<ValueError>(groups > 0 && channels % groups == 0, "group_norm: {} groups do not divide {} channels",
                    groups, channels);
  Shape along{channels};
  for (int i = 2; i < x.rank(); ++i) along.push_back(1);
  for (const Tensor& t : {weight, bias})
    check<ShapeError>(!t.defined() || t.shape() == Shape{channels},
                      "group_norm: weight or bias of shape {} for {} channels",
                      t.defined() ? t.shape() : Shape{}, channels);
  if (x.numel() == 0) return clone(x);
  const DType wide = compute_dtype(x.dtype());  // so that 16-bit floats are rounded once
  Tensor y = reshape(layer_norm(reshape(to(x, wide), {n * groups, -1}), {}, {}, eps), x.shape());
  if (weight.defined()) y = mul(y, to(reshape(weight, along), wide));
  if (bias.defined()) y = add(y, to(reshape(bias, along), wide));
  return to(y, x.dtype());
}

}  // namespace sherd
