#include "runtime/cuda/elementwise.cuh"
#include "runtime/ops/elementwise_list.h"

namespace sherd::cuda {

void add_binary_grad() {
  ops::ArithmeticOps::for_each([&]<class O>() {
    add_gradient<O, 0>();
    add_gradient<O, 1>();
  });
}

}  // namespace sherd::cuda
