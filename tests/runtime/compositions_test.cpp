// Functions made of other ops: windows, places, order, distances. tests/golden has PyTorch's answers.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <random>

#include "autograd/autograd.h"
#include "runtime/apply.h"
#include "runtime/distances.h"
#include "runtime/images.h"
#include "runtime/order.h"
#include "tests/message_of.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr DType floats[] = {f64, f32, bf16, f16};

/// Small whole numbers, which every dtype holds and sums without rounding.
Tensor whole(const Shape& shape, DType dtype, std::int64_t below = 4) {
  return to(randint(0, below, shape), dtype);
}

double dot(const Tensor& a, const Tensor& b) { return sum(mul(to(a, f64), to(b, f64))).item(); }

}  // namespace

TEST_CASE("compositions: fold is the transposed map of unfold, and unfold is what a convolution sees") {
  std::mt19937 random(4);
  const auto from = [&](int low, int high) {
    return static_cast<std::int64_t>(std::uniform_int_distribution<int>(low, high)(random));
  };
  for (int i = 0; i < 200; ++i) {
    const WindowOptions o{{from(1, 3), from(1, 3)}, {from(0, 2), from(0, 2)}, {from(1, 3), from(1, 3)}};
    const PerAxis kernel(from(1, 3), from(1, 3)), size(from(5, 9), from(5, 9));
    const std::int64_t c = from(1, 3), n = from(0, 2);
    const DType dtype = floats[from(0, 3)];
    INFO("images " << size.down << " x " << size.across << ", kernel " << kernel.down << " x "
                   << kernel.across);
    if (o.dilation.down * (kernel.down - 1) + 1 > size.down + 2 * o.padding.down) continue;
    if (o.dilation.across * (kernel.across - 1) + 1 > size.across + 2 * o.padding.across) continue;
    const Tensor x = whole({n, c, size.down, size.across}, dtype);
    const Tensor columns = unfold(x, kernel, o), y = whole(columns.shape(), dtype);
    const Tensor images = fold(y, size, kernel, o);
    CHECK(images.shape() == x.shape());
    CHECK(dot(columns, y) == dot(x, images));
    const Tensor weight = whole({2, c, kernel.down, kernel.across}, dtype);
    const Tensor product = matmul(reshape(weight, {2, columns.size(1)}), columns);
    const Conv2dOptions as_conv{.stride = o.stride, .padding = o.padding, .dilation = o.dilation};
    const Tensor expected = conv2d(x, weight, {}, as_conv);
    CHECK(same_bits(reshape(product, expected.shape()), expected));
  }
}

TEST_CASE("compositions: shuffling pixels back and forth changes nothing, in any dtype") {
  for (const DType dtype : {f64, f32, bf16, f16, i64, i32, u8, DType::boolean})
    for (const std::int64_t factor : {1, 2, 3}) {
      const Tensor x = whole({2, 3 * factor * factor, 2, 4}, dtype, 2);
      const Tensor shuffled = pixel_shuffle(x, factor);
      CHECK(shuffled.shape() == Shape{2, 3, 2 * factor, 4 * factor});
      CHECK(same_bits(pixel_unshuffle(shuffled, factor), x));
    }
}

TEST_CASE("compositions: the grid of the identity gives the image, of a shift its neighbours") {
  for (const DType dtype : {f64, f32})
    for (const GridCorners corners : {GridCorners::edges, GridCorners::centres})
      for (const Interpolation mode : {Interpolation::nearest, Interpolation::bilinear})
        for (const GridPadding outside : {GridPadding::zeros, GridPadding::border, GridPadding::reflection}) {
          const Tensor x = randn({2, 3, 4, 5}, {dtype});
          const GridSampleOptions options{mode, outside, corners};
          // One pixel to the right, in coordinates of -1 to 1 over the width.
          const double step = corners == GridCorners::edges ? 2.0 / 5 : 2.0 / 4;
          for (const int shift : {0, 1}) {
            Tensor theta = zeros({2, 2, 3}, {dtype});
            theta[{Slice{}, 0, 0}] = 1, theta[{Slice{}, 1, 1}] = 1, theta[{Slice{}, 0, 2}] = shift * step;
            const Tensor y = grid_sample(x, affine_grid(theta, {4, 5}, corners), options);
            const Tensor known = narrow(x, 3, shift, 5 - shift);
            CHECK(allclose(narrow(y, 3, 0, 5 - shift), known, 1e-4, 1e-5));
            if (shift == 0) continue;
            const Tensor last = select(y, 3, 4);
            if (outside == GridPadding::zeros) CHECK(allclose(last, zeros_like(last), 0, 1e-5));
            if (outside == GridPadding::border) CHECK(allclose(last, select(x, 3, 4), 1e-4, 1e-5));
            if (outside == GridPadding::reflection)
              CHECK(allclose(last, select(x, 3, corners == GridCorners::edges ? 4 : 3), 1e-4, 1e-5));
          }
        }
}

TEST_CASE(
    "compositions: places that are no numbers are PyTorch's: none, or the first pixel's, and others stay") {
  const Tensor x = ones({1, 1, 3, 3}), grid = zeros({1, 1, 3, 2});
  grid[{0, 0, 1, 0}] = std::nan(""), grid[{0, 0, 2, 1}] = std::numeric_limits<double>::infinity();
  for (const GridPadding outside : {GridPadding::zeros, GridPadding::border, GridPadding::reflection}) {
    const auto y = grid_sample(x, grid, {.outside = outside}).to_vector<float>();
    CHECK(y[0] == 1);
    CHECK((outside == GridPadding::zeros ? std::isnan(y[1]) : y[1] == 1));
    const auto nearest =
        grid_sample(x, grid, {.mode = Interpolation::nearest, .outside = outside}).to_vector<float>();
    CHECK(nearest[0] == 1);
    CHECK(nearest[1] == (outside == GridPadding::zeros ? 0 : 1));
  }
}

TEST_CASE("compositions: unique values and their places are all there is to know of a tensor") {
  for (const DType dtype : {f64, f32, bf16, f16, i64, i32, u8, DType::boolean})
    for (const Shape& shape : {Shape{40}, Shape{3, 7}, Shape{2, 0}, Shape{}, Shape{1}}) {
      INFO(name_of(dtype) << " " << to_string(shape));
      const Tensor x = whole(shape, dtype, 5);
      for (const Unique& u : {unique(x), unique_consecutive(x)}) {
        CHECK(same_bits(reshape(index_select(u.values, 0, reshape(u.inverse, {x.numel()})), shape), x));
        CHECK(sum(u.counts).item<std::int64_t>() == x.numel());
        CHECK(same_bits(u.counts, bincount(reshape(u.inverse, {x.numel()}))));
      }
      const auto values = to(unique(x).values, f64).to_vector<double>();
      CHECK(std::ranges::is_sorted(values));
      CHECK(std::ranges::adjacent_find(values) == values.end());
    }
  const double nan = std::nan("");
  CHECK(
      unique(Tensor::from<float>({1, static_cast<float>(nan), static_cast<float>(nan), 1})).values.numel() ==
      3);
}

TEST_CASE("compositions: searchsorted finds what std::lower_bound and upper_bound find, NaN behind all") {
  std::mt19937 random(5);
  const double infinity = std::numeric_limits<double>::infinity(), nan = std::nan("");
  const std::vector<double> pool = {-infinity, -2, -1, 0, 0, 1, 3, infinity, nan};
  const auto before = [](double a, double b) { return std::isnan(b) ? !std::isnan(a) : a < b; };
  for (std::size_t n = 0; n < 40; ++n) {
    std::vector<double> sorted(n), values(11);
    for (auto* list : {&sorted, &values})
      for (double& x : *list)
        x = pool[std::uniform_int_distribution<std::size_t>(0, pool.size() - 1)(random)];
    std::ranges::sort(sorted, before);
    const Tensor line = Tensor::from(sorted, {std::ssize(sorted)}, Device::cpu()),
                 at = Tensor::from(values, {std::ssize(values)}, Device::cpu());
    const auto left = searchsorted(line, at).to_vector<std::int64_t>(),
               right = bucketize(at, line, SearchSide::right).to_vector<std::int64_t>();
    for (std::size_t i = 0; i < values.size(); ++i) {
      INFO(n << " values, of which " << values[i]);
      CHECK(left[i] == std::ranges::lower_bound(sorted, values[i], before) - sorted.begin());
      CHECK(right[i] == std::ranges::upper_bound(sorted, values[i], before) - sorted.begin());
    }
  }
}

TEST_CASE("compositions: medians and quantiles are those of the sorted values, and have their gradients") {
  for (const DType dtype : floats)
    for (const std::int64_t n : {1, 2, 5, 9}) {  // so that every q below is exact
      Tensor x = to(randperm(3 * n), dtype);
      x = reshape(x, {3, n}).detach().requires_grad_();
      const auto rows = to(sort(x.detach(), 1).values, f64);
      const Picked middle = median(x, 1);
      CHECK(same_bits(to(middle.values.detach(), f64), select(rows, 1, (n - 1) / 2)));
      CHECK(same_bits(gather(x.detach(), 1, unsqueeze(middle.indices, 1)),
                      unsqueeze(middle.values.detach(), 1)));
      const Tensor given = grad(sum(middle.values), std::span(&x, 1))[0];
      CHECK(dot(given, x.detach()) == sum(to(middle.values.detach(), f64)).item());
      for (std::int64_t i = 0; i < n; ++i) {
        const double q = n == 1 ? 0.3 : static_cast<double>(i) / static_cast<double>(n - 1);
        for (const QuantileInterpolation interpolation :
             {QuantileInterpolation::lower, QuantileInterpolation::higher, QuantileInterpolation::nearest})
          CHECK(same_bits(to(quantile(x, q, 1, Keep::drop, interpolation).detach(), f64),
                          select(rows, 1, n == 1 ? 0 : i)));
      }
      const double between[] = {0.1, 0.4};
      CHECK(quantile(x, between, -1, Keep::dims).shape() == Shape{2, 3, 1});
      CHECK(quantile(x, between).shape() == Shape{2});
    }
}

TEST_CASE("compositions: distances by products are those of differences, near zero as far as digits go") {
  for (const DType dtype : {f64, f32}) {
    Tensor a = randn({30, 4}, {dtype}), b = randn({7, 4}, {dtype});
    const Tensor direct = norm(sub(unsqueeze(a, 1), unsqueeze(b, 0)), 2, {-1});
    CHECK(allclose(cdist(a, b), direct, 1e-4, 1e-4));
    a.requires_grad_();
    const Tensor given = grad(sum(cdist(a, a.detach())), std::span(&a, 1))[0];
    CHECK(all(isfinite(given)).item<bool>());
    for (const double p : {0.0, 1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()})  // of no columns
      CHECK(to(cdist(zeros({2, 30, 0}, {dtype}), zeros({2, 7, 0}, {dtype}), p), f64).to_vector<double>() ==
            std::vector<double>(2 * 30 * 7));
  }
}

TEST_CASE("compositions: what does not fit is one line that names the call, the rule and both values") {
  const std::map<std::string, std::function<void()>> refused = {
      {"pixel_shuffle: 6 channels of shape (1, 6, 2, 2) are no multiple of 2 x 2",
       [] { pixel_shuffle(zeros({1, 6, 2, 2}), 2); }},
      {"pixel_shuffle: factor 0", [] { pixel_shuffle(zeros({1, 4, 2, 2}), 0); }},
      {"pixel_unshuffle: 3 x 2 pixels", [] { pixel_unshuffle(zeros({1, 3, 2}), 2); }},
      {"unfold: a window of 4 pixels, 1 apart, does not fit 3 pixels",
       [] { unfold(zeros({1, 1, 3, 3}), 4); }},
      {"unfold: takes (N, C, H, W)", [] { unfold(zeros({3, 3}), 1); }},
      {"fold: shape (1, 4, 5) is not (N, C 4, 4)", [] { fold(zeros({1, 4, 5}), 3, 2); }},
      {"affine_grid: takes (N, 2, 3)", [] { affine_grid(zeros({2, 3}), 2); }},
      {"grid_sample: takes places", [] { grid_sample(zeros({2, 1, 3, 3}), zeros({1, 2, 2, 2})); }},
      {"grid_sample: images have dtype f64",
       [] { grid_sample(zeros({1, 1, 3, 3}, {f64}), zeros({1, 2, 2, 2})); }},
      {"meshgrid: takes 0-d and 1-D tensors, got shape (2, 2)", [] { meshgrid({zeros({2, 2})}); }},
      {"instance_norm: one element a channel", [] { instance_norm(zeros({2, 3, 1})); }},
      {"instance_norm: no channels in shape (1, 0, 3)", [] { instance_norm(zeros({1, 0, 3})); }},
      {"instance_norm: takes floating dtypes, got i64", [] { instance_norm(zeros({2, 3, 4}, {i64})); }},
      {"instance_norm: weight or bias of shape (2) for 3 channels",
       [] { instance_norm(zeros({2, 3, 4}), zeros({2})); }},
      {"bincount: 9223372036854775807 is among the numbers",
       [] { bincount(full({2}, std::numeric_limits<std::int64_t>::max(), {i64})); }},
      {"bincount: -1 is among the numbers", [] { bincount(Tensor::from<std::int64_t>({3, -1})); }},
      {"bincount: takes integers, got f32", [] { bincount(zeros({2})); }},
      {"bincount: weights of shape (3)", [] { bincount(zeros({2}, {i64}), zeros({3})); }},
      {"searchsorted: sorted has dtype f32 and values i64",
       [] { searchsorted(zeros({2}), zeros({2}, {i64})); }},
      {"searchsorted: takes sorted (..., n)", [] { searchsorted(zeros({2, 3}), zeros({3, 3})); }},
      {"median: axis 0 of shape (0, 2) has no elements", [] { median(zeros({0, 2}), 0); }},
      {"quantile: q 1.5 is not from 0 to 1", [] { quantile(zeros({2}), 1.5); }},
      {"quantile: takes floating dtypes, got i64", [] { quantile(zeros({2}, {i64}), 0.5); }},
      {"quantile: shape (0) has no elements", [] { quantile(zeros({0}), 0.5); }},
      {"cosine_similarity: takes two tensors of one floating dtype, got f32 and f64",
       [] { cosine_similarity(zeros({2, 2}), zeros({2, 2}, {f64})); }},
      {"cdist: takes (..., P, M) and (..., R, M), got (2, 3) and (2, 4)",
       [] { cdist(zeros({2, 3}), zeros({2, 4})); }},
      {"cdist: p -1 is below 0", [] { cdist(zeros({2, 3}), zeros({2, 3}), -1); }}};
  for (const auto& [words, call] : refused) CHECK_THAT(message_of<Error>(call), ContainsSubstring(words));
}
