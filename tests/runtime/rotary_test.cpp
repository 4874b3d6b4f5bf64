// Rotary position embedding: the kernels against the op's formula, wherever heads lie, and what turning is.
#include <sherd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numbers>

#include "runtime/apply.h"
#include "runtime/ops/rotary.h"
#include "tests/catch.h"

using namespace sherd;

namespace {

bool same_bits(const Tensor& a, const Tensor& b) {
  const Tensor one = contiguous(a), two = contiguous(b);
  return a.shape() == b.shape() && a.dtype() == b.dtype() &&
         std::memcmp(one.raw(), two.raw(), static_cast<std::size_t>(one.numel() * size_of(a.dtype()))) == 0;
}

constexpr DType dtypes[] = {f32, f64, f16, bf16};

}  // namespace

TEST_CASE("rotary turns as its formula says, whatever lies between steps and features") {
  manual_seed(1);
  for (const DType dtype : dtypes)
    for (const std::int64_t width : {2, 6, 16, 64})
      for (const bool neighbours : {false, true})
        for (const bool back : {false, true}) {
          const Tensor steps = randn({2, 5, 3, width}, {dtype}), heads = randn({2, 3, 5, width}, {dtype}),
                       apart = randn({2, 5, 3, width, 2}, {dtype});
          const TensorOptions wide{dtype == f64 ? f64 : f32};
          const ops::Rotary op{neighbours, back};
          for (const Tensor& x :
               {steps, transpose(heads, 1, 2), select(apart, -1, 1), narrow(steps, 2, 1, 2)}) {
            const Tensor in[] = {x, rand({5, width / 2}, wide), rand({5, width / 2}, wide)};
            INFO(name_of(dtype) << " " << width << " " << neighbours << back);
            CHECK(same_bits(apply_many(op, in)[0], op.reference(in)[0]));
          }
        }
}

TEST_CASE("rotary keeps heads where they lie, and is the same wherever that is") {
  manual_seed(1);
  for (const DType dtype : dtypes)
    for (const RotaryPairs pairs : {RotaryPairs::halves, RotaryPairs::neighbours}) {
      const Tensor x = randn({2, 3, 5, 8}, {dtype}), within = transpose(contiguous(transpose(x, 1, 2)), 1, 2);
      const RotaryOptions options{.first = 7, .pairs = pairs, .scaling = {.factor = 4, .original = 64}};
      const Tensor y = rotary(x, options), same = rotary(within, options);
      CHECK(same_bits(y, same));
      CHECK(y.is_contiguous());
      CHECK(same.strides() == within.strides());
      CHECK(same_bits(rotary(x[{1, 2}], options), y[{1, 2}]));
    }
}

TEST_CASE("the gradient of rotary is what turns it back") {
  manual_seed(1);
  for (const DType dtype : dtypes)
    for (const RotaryPairs pairs : {RotaryPairs::halves, RotaryPairs::neighbours}) {
      const Tensor x = randn({2, 6, 8}, {dtype}).requires_grad_();
      const Tensor y = rotary(x, {.first = 3, .pairs = pairs});
      y.backward(y.detach());
      const double most = amax(abs(sub(to(x.grad(), f64), to(x.detach(), f64)))).item();
      CHECK(most < (dtype == f64 ? 1e-14 : dtype == f32 ? 1e-6 : dtype == f16 ? 4e-3 : 4e-2));
    }
}

TEST_CASE("rotary slows each pair as its kind of scaling says") {
  // 32 pairs of base 10^4: pair i turns 10^(-i / 8) 512 / (2 pi) times in 512 positions, so that pair 3.3
  // turns 32 times and pair 15.3 once.
  constexpr std::int64_t pairs = 32, at = 600;
  constexpr double base = 1e4, factor = 4;
  const auto rate = [](double b, int pair) { return std::pow(b, -pair / 32.0); };
  const auto mixed = [&](double slow, double fast) {
    return [=](int pair) {
      const double slowed = std::clamp((pair - fast) / (slow - fast), 0.0, 1.0);
      return rate(base, pair) * (slowed / factor + 1 - slowed);
    };
  };
  const auto turning = [](double turns) { return 8 * std::log10(512 / (turns * 2 * std::numbers::pi)); };
  const std::vector<std::pair<RotaryKind, std::function<double(int)>>> kinds = {
      {RotaryKind::linear, [&](int pair) { return rate(base, pair) / factor; }},
      {RotaryKind::dynamic,  // step 600 is the 601st
       [&](int pair) { return rate(base * std::pow(factor * 601 / 512 - 3, 64.0 / 62), pair); }},
      {RotaryKind::yarn, mixed(std::ceil(turning(1)), std::floor(turning(32)))},
      {RotaryKind::yarn_fractional, mixed(turning(1), turning(32))}};
  const Tensor x = cat({ones({1, pairs}, {f64}), zeros({1, pairs}, {f64})}, 1);
  for (const auto& [kind, expected] : kinds)
    for (const double amplitude : {1.0, 1.5}) {
      const Tensor y =
          rotary(x, {.first = at, .base = base, .scaling = {factor, 1, 32, 512, kind, amplitude}});
      for (int pair = 0; pair < pairs; ++pair) {
        INFO(static_cast<int>(kind) << " " << amplitude << " " << pair);
        const double angle = at * expected(pair);
        CHECK(std::abs(y[{0, pair}].item() - amplitude * std::cos(angle)) < 1e-10);
        CHECK(std::abs(y[{0, pair + pairs}].item() - amplitude * std::sin(angle)) < 1e-10);
      }
    }
  // Within the positions that a model knows, `dynamic` changes nothing, and several steps share a base.
  const RotaryScaling dynamic{factor, 1, 4, 512, RotaryKind::dynamic};
  CHECK(same_bits(rotary(x, {.first = 511, .scaling = dynamic}), rotary(x, {.first = 511})));
  const Tensor many = expand(x, {3, 2 * pairs});
  CHECK(same_bits(narrow(rotary(many, {.first = 598, .scaling = dynamic}), 0, 2, 1),
                  rotary(x, {.first = 600, .scaling = dynamic})));
}
