// Small products with regions behind them, as kernels that are compiled while the program runs, and others
// with ReLU, as the library's.
#include "runtime/fused_product.h"

#include <algorithm>
#include <memory>

#include "runtime/cuda/check.h"
#include "runtime/cuda/kernels.h"
#include "runtime/cuda/nvrtc.h"
#include "runtime/cuda/product.h"
#include "runtime/cuda/rank.h"
#include "runtime/cuda/region_launch.h"
#include "runtime/cuda/small_product.h"
#include "runtime/ops/linear.h"
#include "runtime/ops/matmul.h"

namespace sherd::cuda {
namespace {

bool lies_as_planned(const ops::ProductRegion& of, Inputs in, Outputs out) {
  for (std::size_t i = 0, next = of.operands; i < of.region->inputs.size(); ++i)
    if (i != of.result && !lies_so(in[next++], of.region->inputs[i].second)) return false;
  return std::ranges::all_of(out, is_dense_and_aligned);
}

void fused_product(const ops::FusedProduct& op, Inputs in, Outputs out) {
  const ops::ProductRegion& of = *op.of;
  const Device device = out[0].device();
  const Factors factors = factors_of(*of.product, in.first(of.operands), of.of_result().second.shape);
  const ProductShape& shape = factors.shape;
  if (!SmallProduct::fits(in[0].dtype(), shape.m, shape.n, shape.k, shape.batch)) {
    const bool at_once =
        ops::is_relu(*of.region) && is_dense_and_aligned(out[0]) && multiply_with_relu(factors, out[0]);
    return at_once ? void() : op.run(in, out);
  }
  if (!lies_as_planned(of, in, out)) return op.run(in, out);
  const cudaKernel_t kernel =
      plan_of(of.plan, device, [&] { return product_region_source(of); })->get(device);
  if (kernel == nullptr) return op.run(in, out);
  SmallFactors small = small_factors(factors);
  std::vector<std::int64_t> given;
  for (std::size_t i = 0, next = of.operands; i < of.region->inputs.size(); ++i)
    given.push_back(i == of.result ? 0 : std::bit_cast<std::int64_t>(in[next++].raw()));
  for (const Tensor& t : out) given.push_back(std::bit_cast<std::int64_t>(t.raw()));
  given.push_back(small.m);
  const auto parts = [](std::int64_t n) { return static_cast<unsigned>(blocks_of(n, small_side)); };
  void* arguments[] = {given.data(), &small};
  launch_region(kernel, dim3(parts(small.n), parts(small.m)), dim3(small_side, small_side), stream_of(device),
                arguments);
  check_launch(ops::FusedProduct::name);
}

/// Of matrices, not of batches of them, for which there is `SmallProduct`.
bool is_small(const AnyOp& product, SpecSpan in) {
  const Shape &a = in[0].shape, &b = in[1].shape;
  const DType dtype = in[0].dtype;
  if (b.rank() != 2) return false;
  if (&product.kernels() == &kernel_row<ops::Linear>())
    return SmallProduct::fits(dtype, a.numel() / std::max<std::int64_t>(1, b[1]), b[0], b[1], 1);
  const auto& op = *static_cast<const ops::MatMul*>(product.value());
  return a.rank() == 2 && SmallProduct::fits(dtype, a[op.transpose_a ? 1 : 0], b[op.transpose_b ? 0 : 1],
                                             a[op.transpose_a ? 0 : 1], 1);
}

/// A small product takes any region, others take ReLU.
bool takes_region(const AnyOp& product, SpecSpan in, const ops::Region& region) {
  static const Kernel own[] = {kernel_row<ops::MatMul>().on(DeviceType::cuda),
                               kernel_row<ops::Linear>().on(DeviceType::cuda)};
  const bool multiplies = &product.kernels() == &kernel_row<ops::MatMul>(),
             is_linear = &product.kernels() == &kernel_row<ops::Linear>();
  if ((!multiplies && !is_linear) || product.kernels().on(DeviceType::cuda) != own[is_linear ? 1 : 0] ||
      !is_floating(in[0].dtype) || in[0].dtype != in[1].dtype)
    return false;
  return is_small(product, in) ? has_nvrtc() : ops::is_relu(region) && in[0].dtype != DType::f64;
}

}  // namespace

void add_fused_product() {
  add_kernel<fused_product>(DeviceType::cuda);
  ops::set_takes_region(DeviceType::cuda, takes_region);
}

}  // namespace sherd::cuda
