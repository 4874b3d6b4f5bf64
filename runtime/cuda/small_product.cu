#include "runtime/cuda/small_product.h"

#include <cmath>

#include "runtime/cuda/launch.cuh"
#include "runtime/cuda/small_product.cuh"

namespace sherd::cuda {
namespace {

template <class T>
__global__ void __launch_bounds__(small_side* small_side)
    small_product(const __grid_constant__ SmallFactors c, T* result) {
  wait_for_earlier();
  const std::int64_t matrix = blockIdx.z;
  small_product_of<T>(c, matrix, [&](std::int64_t row, std::int64_t column, compute_t<T> element) {
    result[(matrix * c.m + row) * c.n + column] = narrow<T>(element);
  });
}

}  // namespace

void launch_small_product(const SmallProduct& call) {
  const SmallFactors& c = call.of;
  const auto parts = [](std::int64_t n) { return static_cast<unsigned>((n + small_side - 1) / small_side); };
  for_floating(call.dtype, [&]<class T>() {
    launch_early(small_product<T>, dim3(parts(c.n), parts(c.m), static_cast<unsigned>(call.batch)),
                 dim3(small_side, small_side), call.stream, c, static_cast<T*>(call.result));
  });
}

}  // namespace sherd::cuda
