// Convolutions of sizes that are cut into tiles, against the same in f64, which goes another way.
#include <limits>

#include "runtime/apply.h"
#include "runtime/ops/conv2d.h"
#include "tests/runtime/harness.h"
#include "tests/sanitizer.h"

using namespace sherd;
using namespace sherd::test;

namespace {

struct Sizes {
  Shape x, w;
  Conv2dOptions options;
};

const Sizes cases[] = {
    {{1, 64, 16, 16}, {64, 64, 3, 3}, {.padding = 1}},
    {{1, 64, 96, 90}, {40, 64, 3, 3}, {.padding = 1}},
    {{1, 128, 7, 7}, {256, 128, 3, 3}, {.padding = 1}},
    {{33, 48, 14, 14}, {48, 48, 3, 3}, {.padding = 1}},
    {{70, 4, 6, 6}, {8, 4, 3, 3}, {}},
    {{600, 1, 8, 8}, {6, 1, 3, 3}, {.padding = 1}},
    {{3, 3, 40, 40}, {32, 3, 7, 7}, {.stride = 2, .padding = 3}},
    {{2, 32, 41, 29}, {48, 32, 3, 3}, {.stride = 2, .padding = 1, .dilation = 2}},
    {{2, 40, 63, 61}, {72, 40, 3, 5}, {.stride = {3, 2}, .padding = {1, 2}, .dilation = {1, 2}}},
    {{4, 64, 33, 33}, {128, 64, 1, 1}, {.stride = 2}},
    {{2, 64, 58, 58}, {64, 64, 2, 3}, {.stride = 4}},
    {{2, 96, 33, 35}, {33, 96, 5, 5}, {.stride = 3, .padding = 2}},
    {{5, 20, 9, 9}, {10, 20, 1, 1}, {}},
    {{1, 8, 12, 12}, {8, 8, 1, 1}, {.padding = 1}},
    {{1, 64, 30, 30}, {128, 16, 3, 3}, {.padding = 1, .groups = 4}},
    {{9, 64, 16, 16}, {64, 16, 3, 3}, {.padding = 1, .groups = 4}},
    {{2, 36, 19, 19}, {24, 12, 3, 3}, {.padding = 1, .groups = 3}},
    {{2, 96, 40, 40}, {96, 1, 3, 3}, {.padding = 1, .groups = 96}},
    {{1, 200, 60, 60}, {200, 1, 5, 5}, {.stride = 2, .padding = 2, .groups = 200}},
    {{2, 24, 20, 20}, {48, 1, 3, 3}, {.padding = 1, .groups = 24}},
    // Columns of the kernel that see padding alone.
    {{2, 17, 16, 1}, {16, 17, 3, 3}, {.stride = {1, 2}, .padding = {1, 2}}},
    {{2, 64, 16, 1}, {64, 64, 3, 3}, {.stride = 2, .padding = 1}},
    {{2, 272, 8, 1}, {272, 16, 3, 3}, {.stride = {1, 2}, .padding = {1, 2}, .groups = 17}},
    {{1, 4, 20, 1}, {4, 4, 7, 1}, {.stride = {1, 3}, .padding = {3, 0}}},
    {{1, 8, 3, 3}, {8, 8, 5, 3}, {.stride = {3, 4}, .padding = {1, 0}}},
};

std::string name_of(const Sizes& s) {
  const Conv2dOptions& o = s.options;
  return fmt::format("x {} w {} stride {} {} padding {} {} dilation {} {} groups {}", s.x, s.w, o.stride.down,
                     o.stride.across, o.padding.down, o.padding.across, o.dilation.down, o.dilation.across,
                     o.groups);
}

/// What a convolution and its two gradients are.
struct Three {
  Tensor y, gx, gw;
};
Three three_of(const Sizes& s, const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& gy) {
  const Conv2dOptions& o = s.options;
  const ops::ConvRule rule{{o.stride.down, o.padding.down, o.dilation.down},
                           {o.stride.across, o.padding.across, o.dilation.across},
                           o.groups};
  return {conv2d(x, w, b, o), apply(ops::Conv2dGradInput{rule, s.x[2], s.x[3]}, gy, w, Tensor{}),
          apply(ops::Conv2dGradWeight{rule, s.w[2], s.w[3]}, gy, x)};
}

struct Given {
  Tensor x, w, b, gy;
  Given(const Sizes& s, DType dtype)
      : x(numbers(s.x, dtype, 1)),
        w(numbers(s.w, dtype, 2)),
        b(numbers({s.w[0]}, dtype, 3)),
        gy(numbers(shape_of_result(s), dtype, 4)) {}
  static Shape shape_of_result(const Sizes& s) {
    const TensorOptions nowhere{f32, Device::meta()};
    return conv2d(zeros(s.x, nowhere), zeros(s.w, nowhere), {}, s.options).shape();
  }
  Three run(const Sizes& s) const { return three_of(s, x, w, b, gy); }
  Three exact(const Sizes& s) const { return three_of(s, to(x, f64), to(w, f64), to(b, f64), to(gy, f64)); }
  /// The sums of the terms' sizes.
  Three sizes(const Sizes& s) const {
    return three_of(s, abs(to(x, f64)), abs(to(w, f64)), abs(to(b, f64)), abs(to(gy, f64)));
  }
};

/// Whether `y` is within what sums of `terms` terms in f32 may be off, rounded once to its dtype.
bool is_near(const Tensor& y, const Tensor& exact, const Tensor& size, std::int64_t terms) {
  const double round = y.dtype() == bf16 ? 1.0 / 256 : y.dtype() == f16 ? 1.0 / 2048 : 0;
  const Tensor sum_error = mul(size, double(terms) / (1 << 24)),
               allowed = add(mul(abs(exact), round), mul(sum_error, 1 + round)),
               excess = sub(abs(sub(to(y, f64), exact)), allowed);
  return y.shape() == exact.shape() && amax(excess).item() <= 0;
}

}  // namespace

TEST_CASE("convolutions: each way is the sum of its terms, rounded once", "[one thread]") {
  for (const Sizes& s : cases)
    for (const DType dtype : {f32, f16, bf16}) {
      INFO(name_of(s) << " " << name_of(dtype));
      const Given given(s, dtype);
      const Three is = given.run(s), exact = given.exact(s), size = given.sizes(s);
      const std::int64_t taps = s.w[1] * s.w[2] * s.w[3], pixels = s.x[0] * exact.y.size(2) * exact.y.size(3);
      CHECK(is_near(is.y, exact.y, size.y, taps + 1));
      CHECK(is_near(is.gx, exact.gx, size.gx, s.w[0] / s.options.groups * s.w[2] * s.w[3]));
      CHECK(is_near(is.gw, exact.gw, size.gw, pixels));
    }
}

TEST_CASE("convolutions: the number of threads changes no bit") {
  for (const Sizes& s : cases)
    for (const DType dtype : {f32, f16, bf16}) {
      INFO(name_of(s) << " " << name_of(dtype));
      const Given given(s, dtype);
      const Threads one(1);
      const Three alone = given.run(s);
      for (const int threads : {2, 5}) {
        if (thread_sanitizer && threads == 2) continue;  // 5 meet wherever 2 do
        const Threads several(threads);
        const Three is = given.run(s);
        CHECK(same_bits(is.y, alone.y));
        CHECK(same_bits(is.gx, alone.gx));
        CHECK(same_bits(is.gw, alone.gw));
      }
    }
}

TEST_CASE("convolutions: what memory held before is in no result", "[one thread]") {
  for (const Sizes& s : cases)
    for (const DType dtype : {f32, f16, bf16}) {
      INFO(name_of(s) << " " << name_of(dtype));
      const Given given(s, dtype);
      const Three first = given.run(s);
      for (const double before : {std::numeric_limits<double>::quiet_NaN(), 1e30}) {
        for (const std::int64_t n : {1 << 10, 1 << 14, 1 << 18, 1 << 22}) (void)full({n}, before);
        const Three again = given.run(s);
        CHECK(same_bits(again.y, first.y));
        CHECK(same_bits(again.gx, first.gx));
        CHECK(same_bits(again.gw, first.gw));
      }
    }
}

TEST_CASE("convolutions: of images without rows padding is all that there is") {
  for (const DType dtype : {f32, f64, bf16}) {
    INFO(name_of(dtype));
    const Tensor b = numbers({16}, dtype, 3);
    const Tensor y =
        conv2d(numbers({1, 16, 0, 5}, dtype, 1), numbers({16, 16, 2, 3}, dtype, 2), b, {.padding = 1});
    CHECK(same_bits(y, expand(reshape(b, {1, 16, 1, 1}), {1, 16, 1, 5})));
  }
}
