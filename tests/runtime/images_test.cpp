// Properties of transposed convolutions and of pooling, over sizes and options.
#include <cmath>

#include "runtime/context.h"
#include "runtime/ops.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::test;

namespace {

double dot(const Tensor& a, const Tensor& b) { return sum(mul(to(a, f64), to(b, f64))).item(); }

}  // namespace

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

TEST_CASE("images: pooling along an axis is that of each line, whatever the other axis") {
  for (const std::int64_t kernel : {1, 2, 3, 5})
    for (const std::int64_t stride : {0, 1, 2, 7})
      for (std::int64_t padding = 0; padding <= kernel / 2; ++padding) {
        INFO(kernel << " " << stride << " " << padding);
        const Tensor x = numbers({2, 3, 4, 9}, f32), lines = reshape(x, {2, 12, 9});
        const PoolOptions o{.stride = {1, stride}, .padding = {0, padding}};
        const Pool1dOptions line{stride, padding};
        const Tensor most = max_pool2d(x, {1, kernel}, o), mean = avg_pool2d(x, {1, kernel}, o);
        const std::int64_t count = (9 + 2 * padding - kernel) / (stride > 0 ? stride : kernel) + 1;
        CHECK(most.shape() == Shape{2, 3, 4, count});
        CHECK(same_bits(reshape(most, {2, 12, count}), max_pool1d(lines, kernel, line)));
        CHECK(same_bits(reshape(mean, {2, 12, count}), avg_pool1d(lines, kernel, line)));
        const PoolOptions turned{.stride = {stride, 1}, .padding = {padding, 0}};
        CHECK(same_bits(transpose(max_pool2d(transpose(x, 2, 3), {kernel, 1}, turned), 2, 3), most));
        CHECK(same_bits(transpose(avg_pool2d(transpose(x, 2, 3), {kernel, 1}, turned), 2, 3), mean));
      }
}
