#include "runtime/cuda/elementwise.cuh"
#include "runtime/ops/elementwise_list.h"

namespace sherd::cuda {

void add_unary() {
  ops::UnaryOps::for_each([&]<class O>() { add_elementwise<O>(); });
}

}  // namespace sherd::cuda
