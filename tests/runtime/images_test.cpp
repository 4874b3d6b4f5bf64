// Properties of transposed convolutions, of pooling and of scaled images, over sizes and options.
#include <cmath>
#include <functional>

#include "runtime/apply.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "runtime/ops/interpolate.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::test;

namespace {

double dot(const Tensor& a, const Tensor& b) { return sum(mul(to(a, f64), to(b, f64))).item(); }

Tensor ramp(std::int64_t rows, std::int64_t columns, DType dtype) {
  return reshape(arange(0, rows * columns, 1, {dtype}), {1, 1, rows, columns});
}

}  // namespace

TEST_CASE("a mean of windows beside one another holds what is in its window alone") {
  const double nan = std::numeric_limits<double>::quiet_NaN(),
               infinite = std::numeric_limits<double>::infinity();
  const Tensor x = Tensor::from<double>({1, 2, 3, nan, 5, 6, infinite, 8}, {1, 1, 2, 4});
  const auto y = adaptive_avg_pool2d(x, {2, 2}).to_vector<double>();
  CHECK((y[0] == 1.5 && std::isnan(y[1]) && y[2] == 5.5 && y[3] == infinite));
  CHECK(same_bits(adaptive_avg_pool2d(x, {2, 2}), adaptive_avg_pool2d(x, 2, 2)));
}

TEST_CASE("images: a transposed convolution is the transpose of the convolution of its options",
          "[one thread]") {
  for (const std::int64_t stride : {1, 2, 3})
    for (const std::int64_t padding : {0, 1, 2})
      for (const std::int64_t dilation : {1, 2, 3})
        for (const std::int64_t kernel : {1, 2, 3})
          for (const std::int64_t groups : {1, 2})
            for (std::int64_t more = 0; more < std::max(stride, dilation); ++more) {
              const std::int64_t n = 4,
                                 size = (n - 1) * stride + dilation * (kernel - 1) + 1 + more - 2 * padding;
              if (size < 1) continue;
              INFO(fmt::format("stride {} padding {} dilation {} kernel {} groups {} more {}", stride,
                               padding, dilation, kernel, groups, more));
              // The other axis has other options, so that none is taken for another.
              const ConvTranspose2dOptions o{{stride, 2}, {padding, 1}, {more, 1}, {dilation, 1}, groups};
              const Tensor x = numbers({2, 4, n, 3}, f64, 1), w = numbers({4, 3, kernel, 2}, f64, 2);
              const Tensor y = conv_transpose2d(x, w, {}, o), u = numbers(y.shape(), f64, 3);
              CHECK(y.shape() == Shape{2, 3 * groups, size, 5});
              const Tensor back = conv2d(u, w, {}, {o.stride, o.padding, o.dilation, groups});
              const Tensor seen = narrow(narrow(back, 2, 0, n), 3, 0, 3);
              CHECK(std::abs(dot(y, u) - dot(x, seen)) < 1e-9);
              const Tensor first = select(x, 3, 0), tap = select(w, 3, 0);
              const Tensor line = conv_transpose1d(first, tap, {}, {stride, padding, more, dilation, groups});
              const Tensor v = numbers(line.shape(), f64, 4);
              const Tensor seen_in_line =
                  narrow(conv1d(v, tap, {}, {stride, padding, dilation, groups}), 2, 0, n);
              CHECK(std::abs(dot(line, v) - dot(first, seen_in_line)) < 1e-9);
              const auto by = [&](std::span<const Tensor> in) {
                return conv_transpose2d(in[0], in[1], {}, o);
              };
              const Tensor in[] = {narrow(x, 0, 0, 1), w};
              if (padding == 1) CHECK(gradient_error(by, in) < 1e-6);
            }
}

TEST_CASE("images: sums of a transposed convolution are rounded once, its bias with them") {
  for (const DType dtype : {f16, bf16}) {
    INFO(name_of(dtype));
    const Tensor x = numbers({2, 8, 5, 5}, dtype, 1), w = numbers({8, 4, 3, 3}, dtype, 2),
                 b = numbers({4}, dtype, 3);
    const ConvTranspose2dOptions o{.stride = 2, .padding = 1};
    const Tensor wide = conv_transpose2d(to(x, f32), to(w, f32), to(b, f32), o);
    CHECK(same_bits(conv_transpose2d(x, w, b, o), to(wide, dtype)));
  }
}

TEST_CASE("images: windows of wide rows are what each window is by itself") {
  for (const DType dtype : {f64, f32, f16, bf16})
    for (const std::int64_t width : {5, 31, 64, 129, 200})
      for (const std::int64_t stride : {1, 2, 3})
        for (const std::int64_t kernel : {1, 2, 3, 5})
          for (const std::int64_t padding : {0, 1}) {
            if (padding > kernel / 2) continue;
            INFO(fmt::format("{} width {} stride {} kernel {} padding {}", name_of(dtype), width, stride,
                             kernel, padding));
            const Tensor x = with_specials({1, 2, 7, width}, dtype), plain = numbers({1, 2, 7, width}, dtype);
            const Pool2dOptions o{.stride = {2, stride}, .padding = {padding, padding}};
            const Tensor most = max_pool2d(x, kernel, o),
                         mean = avg_pool2d(plain, kernel, {o.stride, o.padding});
            // Zeros and the least number are what padding adds to a mean and to a maximum; a window that is
            // alone with a stride of 3 is looked at pixel by pixel.
            const double least = -std::numeric_limits<double>::infinity();
            const Tensor around = pad(x, {padding, padding, padding, padding}, Padding::constant, least),
                         among = pad(plain, {padding, padding, padding, padding});
            for (std::int64_t j = 0; j < most.size(3); ++j) {
              const std::int64_t first = j * stride;
              CHECK(same_bits(narrow(most, 3, j, 1),
                              max_pool2d(narrow(around, 3, first, kernel), kernel, {.stride = {2, 3}})));
              CHECK(same_bits(narrow(mean, 3, j, 1),
                              avg_pool2d(narrow(among, 3, first, kernel), kernel, {.stride = {2, 3}})));
            }
          }
}

TEST_CASE("images: an image of the same size is itself, and whole factors repeat its pixels") {
  for (const DType dtype : all_dtypes) {
    INFO(name_of(dtype));
    const Tensor x = numbers({2, 3, 4, 5}, dtype);
    CHECK(same_bits(interpolate(x, {.size = {4, 5}}), x));
    CHECK(same_bits(interpolate(x, {.scale = 1.19}), x));
    for (const std::int64_t factor : {2, 3, 4, 7}) {
      const Tensor tall =
          reshape(repeat(reshape(x, {2, 3, 4, 1, 5}), {1, 1, 1, factor, 1}), {2, 3, 4 * factor, 5});
      CHECK(same_bits(interpolate(x, {.size = {4 * factor, 5}}), tall));
      CHECK(same_bits(interpolate(x, {.scale = {double(factor), 1}}), tall));
      CHECK(
          same_bits(interpolate(transpose(x, 2, 3), {.scale = {1, double(factor)}}), transpose(tall, 2, 3)));
    }
    if (is_floating(dtype)) {
      CHECK(same_bits(interpolate(x, {.size = {4, 5}, .mode = Interpolation::bilinear}), x));
      CHECK(same_bits(interpolate(x, {.scale = 1.19, .mode = Interpolation::bilinear}), x));
    }
  }
}

TEST_CASE(
    "images: straight lines stay straight, corners stay where they are told to, and constants everywhere") {
  for (const DType dtype : {f32, f64})
    for (const std::int64_t n : {1, 2, 3, 8, 31})
      for (const std::int64_t to_size : {1, 2, 5, 8, 16, 93}) {
        INFO(name_of(dtype) << " " << n << " to " << to_size);
        const double near = dtype == f32 ? 1e-5 : 1e-12;
        const Tensor x = ramp(n, 1, dtype);
        const InterpolateOptions size{.size = {to_size, 1}, .mode = Interpolation::bilinear};
        const std::vector<double> edges = doubles(interpolate(x, size));
        const double step = double(n) / double(to_size);
        for (std::int64_t i = 0; i < to_size; ++i) {
          const double at = std::clamp((double(i) + 0.5) * step - 0.5, 0.0, double(n - 1));
          CHECK(std::abs(edges[static_cast<std::size_t>(i)] - at) <= near * double(n));
        }
        InterpolateOptions corners = size;
        corners.align_corners = true;
        const std::vector<double> held = doubles(interpolate(x, corners));
        CHECK(held.front() == 0);
        if (to_size > 1) CHECK(std::abs(held.back() - double(n - 1)) <= near * double(n));
        CHECK(distance(interpolate(full({1, 1, n, 3}, 2.5, {dtype}),
                                   {.size = {to_size, 4}, .mode = Interpolation::bilinear}),
                       full({1, 1, to_size, 4}, 2.5, {dtype})) <= near);
      }
}

TEST_CASE("images: a scaled image is what its ops give, and its gradient is the transpose", "[one thread]") {
  for (const bool lines : {false, true})
    for (const bool corners : {false, true})
      for (const double scale : {0.0, 0.31, 1.1, 1.7})
        for (const std::int64_t from : {1, 2, 3, 5, 8, 13})
          for (const std::int64_t size : {1, 2, 3, 6, 7, 26}) {
            if (corners && !lines) continue;
            const auto axis = [&](std::int64_t before, std::int64_t after) {
              if (scale > 0) after = static_cast<std::int64_t>(std::floor(double(before) * scale));
              return ops::ResampledAxis{before, after, scale, lines, corners};
            };
            const ops::Interpolate op{axis(from, size), axis(size, from)};
            if (op.down.to == 0 || op.across.to == 0) continue;  // no image
            const ops::InterpolateGrad back{op.down, op.across};
            INFO(from << " by " << size << " to " << op.down.to << " by " << op.across.to << ", scale "
                      << scale << ", lines " << lines << ", corners " << corners);
            for (const DType dtype : {f64, f32, bf16, f16}) {
              const Tensor x = numbers({2, 1, from, size}, dtype), y = apply(op, x);
              CHECK(same_bits(y, op.reference(std::array{x})[0]));
              const Tensor gy = numbers(y.shape(), dtype), gx = apply(back, gy);
              const Tensor expected = back.reference(std::array{gy})[0];
              const double digits = dtype == f64   ? 0x1p-52
                                    : dtype == f32 ? 0x1p-23
                                    : dtype == f16 ? 0x1p-10
                                                   : 0x1p-7;
              CHECK(distance(gx, expected) <= 8 * digits * (1 + amax(abs(to(expected, f64))).item()));
              if (dtype == f64)
                CHECK(std::abs(dot(y, gy) - dot(x, gx)) <= 1e-10 * (1 + std::abs(dot(y, gy))));
            }
          }
}

TEST_CASE("images: what is not finite stays near its pixel") {
  for (const double value : {HUGE_VAL, double(NAN)}) {
    Tensor x = zeros({1, 1, 8, 8});
    fill_(select(select(x, 3, 4), 2, 4), value);
    const Tensor y = interpolate(x, {.scale = 2, .mode = Interpolation::bilinear});
    for (std::int64_t i = 0; i < 16; ++i)
      for (std::int64_t j = 0; j < 16; ++j)
        if (i < 6 || i > 11 || j < 6 || j > 11) CHECK(y[{0, 0, i, j}].item() == 0);
  }
}

TEST_CASE(
    "images: pooling refuses images without pixels, though padding alone may hold a window, and no others") {
  using Pool = std::function<Tensor(const Tensor&)>;
  std::vector<std::pair<int, Pool>> pools;  // with the axes of their images
  for (const std::int64_t kernel : {1, 2, 3})
    for (const std::int64_t stride : {0, 1, 3})
      for (std::int64_t padding = 0; padding <= kernel / 2; ++padding) {
        const Pool2dOptions o{.stride = stride, .padding = padding};
        const Pool1dOptions line{.stride = stride, .padding = padding};
        const AvgPool2dOptions means{.stride = stride, .padding = padding};
        const AvgPool1dOptions line_means{.stride = stride, .padding = padding};
        pools.emplace_back(4, [=](const Tensor& x) { return max_pool2d(x, kernel, o); });
        pools.emplace_back(4, [=](const Tensor& x) { return avg_pool2d(x, kernel, means); });
        pools.emplace_back(3, [=](const Tensor& x) { return max_pool1d(x, kernel, line); });
        pools.emplace_back(3, [=](const Tensor& x) { return avg_pool1d(x, kernel, line_means); });
      }
  for (const std::int64_t to : {1, 2, 3}) {
    pools.emplace_back(4, [=](const Tensor& x) { return adaptive_avg_pool2d(x, to, 1); });
    pools.emplace_back(4, [=](const Tensor& x) { return adaptive_max_pool2d(x, to, 2); });
  }
  for (const DType dtype : {f64, f32, f16, bf16})
    for (const auto& [rank, pool] : pools)
      for (int axis = -1; axis < rank; ++axis) {
        Shape shape = rank == 4 ? Shape{2, 3, 6, 6} : Shape{2, 3, 6};
        if (axis >= 0) shape[axis] = 0;
        INFO(fmt::format("{} {}", name_of(dtype), shape));
        Tensor x = zeros(shape, {dtype}).requires_grad_();
        if (axis >= 2) {
          CHECK_THROWS_AS(pool(x), ShapeError);
          continue;
        }
        const Tensor y = pool(x);
        CHECK((y.numel() == 0) == (axis >= 0));
        sum(y).backward();
        CHECK(x.grad().shape() == shape);
      }
}

TEST_CASE("images: pooling along an axis is that of each line, whatever the other axis") {
  for (const std::int64_t kernel : {1, 2, 3, 5})
    for (const std::int64_t stride : {0, 1, 2, 7})
      for (std::int64_t padding = 0; padding <= kernel / 2; ++padding) {
        INFO(kernel << " " << stride << " " << padding);
        const Tensor x = numbers({2, 3, 4, 9}, f32), lines = reshape(x, {2, 12, 9});
        const Pool2dOptions o{.stride = {1, stride}, .padding = {0, padding}};
        const Pool1dOptions line{stride, padding};
        const Tensor most = max_pool2d(x, {1, kernel}, o),
                     mean = avg_pool2d(x, {1, kernel}, {o.stride, o.padding});
        const std::int64_t count = (9 + 2 * padding - kernel) / (stride > 0 ? stride : kernel) + 1;
        CHECK(most.shape() == Shape{2, 3, 4, count});
        CHECK(same_bits(reshape(most, {2, 12, count}), max_pool1d(lines, kernel, line)));
        CHECK(same_bits(reshape(mean, {2, 12, count}), avg_pool1d(lines, kernel, {stride, padding})));
        const Pool2dOptions turned{.stride = {stride, 1}, .padding = {padding, 0}};
        CHECK(same_bits(transpose(max_pool2d(transpose(x, 2, 3), {kernel, 1}, turned), 2, 3), most));
        const AvgPool2dOptions turned_means{.stride = turned.stride, .padding = turned.padding};
        CHECK(same_bits(transpose(avg_pool2d(transpose(x, 2, 3), {kernel, 1}, turned_means), 2, 3), mean));
      }
}

namespace {

/// Windows of an axis of `size` with ceil_mode: each begins within the image or the padding before it.
std::int64_t windows_of(std::int64_t size, std::int64_t kernel, std::int64_t stride, std::int64_t padding) {
  std::int64_t count = 1;
  while ((count - 1) * stride + kernel < size + 2 * padding && count * stride < size + padding) ++count;
  return count;
}

/// The sum over window `i` and how many places it counts, those of the padding too.
struct WindowSum {
  Tensor pixels;
  double counted;
};
WindowSum window_of(const Tensor& x, int axis, std::int64_t i, std::int64_t kernel, std::int64_t stride,
                    std::int64_t padding, bool include_pad) {
  const std::int64_t size = x.size(axis), first = i * stride - padding;
  const std::int64_t begin = std::max<std::int64_t>(first, 0), end = std::min(first + kernel, size);
  const std::int64_t places = std::min(first + kernel, size + padding) - first;
  return {narrow(x, axis, begin, end - begin), static_cast<double>(include_pad ? places : end - begin)};
}

}  // namespace

TEST_CASE("images: windows of ceil_mode begin before the padding, and a mean counts what it is told to") {
  for (const std::int64_t size : {1, 2, 5, 6, 7, 20})
    for (const std::int64_t kernel : {1, 2, 3, 4, 5})
      for (const std::int64_t stride : {1, 2, 3, 5})
        for (std::int64_t padding = 0; padding <= kernel / 2; ++padding) {
          if (size + 2 * padding - kernel <= -stride) {
            CHECK_THROWS_AS(max_pool1d(ones({1, 1, size}), kernel, {stride, padding, true}), ShapeError);
            continue;
          }
          INFO(fmt::format("size {} kernel {} stride {} padding {}", size, kernel, stride, padding));
          const Tensor x = sub(numbers({2, 3, size, 4}, f64, 3), 5);  // below 0, where zeros would win
          const std::int64_t count = windows_of(size, kernel, stride, padding);
          const Tensor most =
              max_pool2d(x, {kernel, 1}, {.stride = {stride, 1}, .padding = {padding, 0}, .ceil_mode = true});
          REQUIRE(most.shape() == Shape{2, 3, count, 4});
          for (const bool include : {false, true})
            for (const bool up : {false, true})
              for (const std::int64_t divisor : {0, 3, -2}) {
                if (!up && size + 2 * padding < kernel) continue;
                AvgPool2dOptions o{.stride = {stride, 1},
                                   .padding = {padding, 0},
                                   .ceil_mode = up,
                                   .count_include_pad = include};
                if (divisor != 0) o.divisor_override = divisor;
                const Tensor mean = avg_pool2d(x, {kernel, 1}, o);
                REQUIRE(mean.size(2) == (up ? count : (size + 2 * padding - kernel) / stride + 1));
                for (std::int64_t i = 0; i < mean.size(2); ++i) {
                  const WindowSum w = window_of(x, 2, i, kernel, stride, padding, include);
                  const Tensor expected =
                      sum(w.pixels, {2}, Keep::dims) / (divisor != 0 ? double(divisor) : w.counted);
                  CHECK(distance(narrow(mean, 2, i, 1), expected) < 1e-12);
                  CHECK(same_bits(
                      narrow(most, 2, i, 1),
                      amax(window_of(x, 2, i, kernel, stride, padding, true).pixels, {2}, Keep::dims)));
                  if (!up) break;
                }
                const Tensor lines = reshape(transpose(x, 2, 3), {2, 12, size});
                const AvgPool1dOptions line{stride, padding, up, include, o.divisor_override};
                CHECK(same_bits(avg_pool1d(lines, kernel, line),
                                reshape(contiguous(transpose(mean, 2, 3)), {2, 12, mean.size(2)})));
              }
        }
  CHECK_THROWS_AS(avg_pool2d(ones({1, 1, 4, 4}), 2, {.divisor_override = 0}), ValueError);
}

TEST_CASE("images: gradients of pooling with ceil_mode and of means that count pixels alone") {
  for (const auto& [kernel, stride, padding] : {std::tuple{2, 2, 0}, {3, 2, 1}, {2, 3, 1}, {5, 4, 2}}) {
    const Tensor x = numbers({2, 2, 7, 6}, f64, 5);
    const Pool2dOptions up{stride, padding, true};
    CHECK(gradient_error([&](std::span<const Tensor> in) { return max_pool2d(in[0], kernel, up); },
                         std::span(&x, 1)) < 1e-6);
    for (const bool include : {false, true}) {
      const AvgPool2dOptions o{stride, padding, true, include};
      CHECK(gradient_error([&](std::span<const Tensor> in) { return avg_pool2d(in[0], kernel, o); },
                           std::span(&x, 1)) < 1e-6);
    }
  }
}
