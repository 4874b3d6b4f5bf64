// Rotary position embedding: the kernels against the op's formula, wherever heads lie, and what turning is.
#include <sherd.h>

#include <cstring>

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
