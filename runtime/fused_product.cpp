#include "runtime/fused_product.h"

#include <array>

#include "runtime/apply.h"
#include "runtime/ops.h"
#include "runtime/ops/relu.h"

namespace sherd::ops {
namespace {

std::atomic<TakesRegion>& takes_of(DeviceType device) {
  static std::array<std::atomic<TakesRegion>, device_type_limit> all{};
  return all[static_cast<std::size_t>(device)];
}

}  // namespace

bool is_relu(const Region& region) {
  return region.members.size() == 1 && region.inputs.size() == 1 && region.results.size() == 1 &&
         &region.members[0].op->kernels() == &kernel_row<Relu>() && !region.members[0].op->mutating();
}

bool takes_region(const AnyOp& product, SpecSpan in, const Region& region, DeviceType device) {
  const TakesRegion takes = takes_of(device).load(std::memory_order_acquire);
  return takes != nullptr && takes(product, in, region);
}
void set_takes_region(DeviceType device, TakesRegion takes) {
  takes_of(device).store(takes, std::memory_order_release);
}

Specs FusedProduct::infer(SpecSpan in) const {
  const Region& region = *of->region;
  const std::size_t given = of->operands + region.inputs.size() - 1;
  check<ValueError>(in.size() == given, "fused_product: takes {} inputs, got {}", given, in.size());
  Specs specs;
  for (const std::uint32_t value : region.results)
    specs.push_back(region.members[value - region.inputs.size()].result);
  return specs;
}

void FusedProduct::run(Inputs in, Outputs out) const {
  const auto& [dtype, layout] = of->of_result();
  Tensor product = empty(Spec{layout.shape, dtype, out[0].device()});
  run_again(*of->product, in.first(of->operands), Outputs(&product, 1));
  Tensors given;
  for (std::size_t i = 0, next = of->operands; i < of->region->inputs.size(); ++i)
    given.push_back(i == of->result ? product : in[next++]);
  FusedRegion{of->region}.run(Inputs(given.begin(), given.size()), out);
}

const ProductRegion* product_region_of(const AnyOp& op) {
  if (&op.kernels() != &kernel_row<FusedProduct>()) return nullptr;
  return static_cast<const FusedProduct*>(op.value())->of.get();
}

}  // namespace sherd::ops
