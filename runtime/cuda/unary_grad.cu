#include "runtime/cuda/elementwise.cuh"
#include "runtime/ops/elementwise_list.h"

namespace sherd::cuda {

void add_unary_grad() {
  ops::UnaryOps::for_each([&]<class O>() { add_gradient<O, 0>(); });
}

}  // namespace sherd::cuda
