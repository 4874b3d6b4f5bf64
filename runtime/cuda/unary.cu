#include "runtime/cuda/elementwise.cuh"
#include "runtime/ops/elementwise_list.h"

namespace sherd::cuda {

void add_unary_kernels(KernelTable& table) {
  ops::UnaryOps::for_each([&]<class O>() { add_elementwise<O>(table); });
}

}  // namespace sherd::cuda
