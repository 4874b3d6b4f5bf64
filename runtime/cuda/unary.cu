#include "runtime/cuda/elementwise.cuh"
#include "runtime/cuda/half_table.h"
#include "runtime/ops/elementwise_list.h"

namespace sherd::cuda {
namespace {

/// Those that take longer than reading and writing 16-bit elements does.
using Costly = OpList<ops::Log, ops::Log1p, ops::Sin, ops::Cos, ops::Tanh, ops::Sigmoid, ops::Erf, ops::Gelu,
                      ops::GeluTanh, ops::Silu, ops::Tan, ops::Asin, ops::Acos, ops::Atan, ops::Sinh,
                      ops::Cosh, ops::Asinh, ops::Acosh, ops::Atanh, ops::Exp2, ops::Expm1, ops::Log2,
                      ops::Log10, ops::Softplus, ops::Elu>;

template <class O>
void costly_kernel(const void* op, Inputs in, Outputs out) {
  constexpr ElementwiseKernel kernel = elementwise_kernel<O, any_dtype>;
  if (!map_by_table(op, in, out, kernel)) kernel(op, in, out);
}

}  // namespace

void add_unary() {
  ops::UnaryOps::for_each([&]<class O>() { add_elementwise<O>(); });
  Costly::for_each([&]<class O>() { kernel_row<O>().set(DeviceType::cuda, costly_kernel<O>); });
}

}  // namespace sherd::cuda
