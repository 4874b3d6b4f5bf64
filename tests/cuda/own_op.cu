// As an application compiles the kernels of its elementwise ops.
#include "tests/cuda/own_op.h"

#include "runtime/cuda/elementwise.cuh"

namespace sherd::test {

void add_own_ops_on_gpu() {
  cuda::add_elementwise<Bent>();
  cuda::add_gradient<Bent, 0>();
  cuda::add_elementwise<Blend>();
  cuda::add_gradient<Blend, 0>();
  cuda::add_gradient<Blend, 1>();
}

}  // namespace sherd::test
