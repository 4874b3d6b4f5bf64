// The precision of products of f32: where it holds, and that the CPU does not look at it.
#include "runtime/float32_precision.h"

#include <thread>

#include "runtime/context.h"
#include "tests/runtime/op_cases.h"

using namespace sherd;
using namespace sherd::test;

namespace {

constexpr auto highest = Float32MatmulPrecision::highest, high = Float32MatmulPrecision::high;

}  // namespace

TEST_CASE("precision of f32 products: scopes nest, and end by exceptions too", "[one thread]") {
  CHECK(float32_matmul_precision() == highest);
  for (const auto outer : {highest, high}) {
    const Float32MatmulPrecisionScope scope(outer);
    for (const auto inner : {highest, high}) {
      CHECK_THROWS_AS(([&] {
                        const Float32MatmulPrecisionScope within(inner);
                        CHECK(float32_matmul_precision() == inner);
                        set_float32_matmul_precision(high);
                        CHECK(float32_matmul_precision() == high);
                        fail<StateError>("out of it");
                      }()),
                      StateError);
      CHECK(float32_matmul_precision() == outer);
    }
  }
  CHECK(float32_matmul_precision() == highest);
}

TEST_CASE("precision of f32 products: another thread has its own") {
  const Float32MatmulPrecisionScope scope(high);
  auto theirs = high;
  std::thread([&] {
    theirs = float32_matmul_precision();
    set_float32_matmul_precision(highest);
  }).join();
  CHECK(theirs == highest);
  CHECK(float32_matmul_precision() == high);
}

TEST_CASE("precision of f32 products: no op on the CPU, and no gradient of one, follows it", "[one thread]") {
  for_each_case_and_dtype([](const Case& c, DType dtype) {
    const std::vector<Tensor> in = draw(c, dtype, small_shapes(c));
    const bool derived = c.gradients && is_floating(dtype);
    const std::vector<Tensor> y = run(c, in),
                              g = derived ? gradients(c, in, Lay::dense) : std::vector<Tensor>{};
    const Float32MatmulPrecisionScope scope(high);
    check_agree(run(c, in), y, Bits::exact);
    if (derived) check_agree(gradients(c, in, Lay::dense), g, Bits::exact);
  });
}
