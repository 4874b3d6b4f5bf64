#include "runtime/cuda/elementwise.cuh"
#include "runtime/ops/elementwise_list.h"

namespace sherd::cuda {
namespace {

using ComparedWithScalar =
    OpList<ops::Equal, ops::NotEqual, ops::Less, ops::LessEqual, ops::Greater, ops::GreaterEqual>;
using OfScalar = OpList<ops::Sub, ops::Div>;

}  // namespace

void add_scalar_kernels(KernelTable& table) {
  ops::ArithmeticOps::for_each([&]<class O>() {
    add_elementwise<WithScalar<O>>(table);
    add_gradient<WithScalar<O>, 0>(table);
  });
  ComparedWithScalar::for_each([&]<class O>() { add_elementwise<WithScalar<O>>(table); });
  OfScalar::for_each([&]<class O>() {
    add_elementwise<ScalarWith<O>>(table);
    add_gradient<ScalarWith<O>, 0>(table);
  });
}

}  // namespace sherd::cuda
