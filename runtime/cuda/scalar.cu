#include "runtime/cuda/elementwise.cuh"
#include "runtime/ops/elementwise_list.h"

namespace sherd::cuda {

void add_scalar() {
  ops::BoundRight::for_each([&]<class O>() {
    add_elementwise<WithScalar<O>>();
    add_gradient<WithScalar<O>, 0>();
  });
  ops::BoundLeft::for_each([&]<class O>() {
    add_elementwise<ScalarWith<O>>();
    add_gradient<ScalarWith<O>, 0>();
  });
}

}  // namespace sherd::cuda
