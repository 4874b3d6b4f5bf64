// Fused regions as kernels that are compiled while the program runs; until one is there, and where there is
// none, the members run one by one, with the same bits.
#include "runtime/fused_region.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <vector>

#include "runtime/cuda/check.h"
#include "runtime/cuda/kernels.h"
#include "runtime/cuda/nvrtc.h"
#include "runtime/cuda/rank.h"
#include "runtime/cuda/region_kernels.h"
#include "runtime/cuda/region_source.h"
#include "runtime/log.h"

namespace sherd::cuda {
namespace {

constexpr std::int64_t most_blocks_by_rows = 1 << 16;

/// What a region keeps.
struct RegionPlan {
  std::optional<RegionSource> source;
  std::shared_ptr<const RegionKernel> kernel{};
};

std::shared_ptr<const RegionPlan> plan_of(const ops::Region& region, Device device) {
  if (const auto known = region.plan.load(std::memory_order_acquire))
    return std::static_pointer_cast<const RegionPlan>(known);
  const auto made = std::make_shared<RegionPlan>(RegionPlan{region_source(region)});
  if (made->source) made->kernel = region_kernel(made->source->text, device.index);
  region.plan.store(made, std::memory_order_release);
  return made;
}

/// As the source takes it to be.
bool lies_as_planned(const ops::Region& region, Inputs in, Outputs out) {
  const auto aligned = [](const Tensor& t) { return reinterpret_cast<std::uintptr_t>(t.raw()) % 16 == 0; };
  for (std::size_t i = 0; i < in.size(); ++i)
    if (in[i].strides() != region.inputs[i].second.strides || !aligned(in[i])) return false;
  return std::ranges::all_of(out.begin() + std::ranges::count(region.written, true), out.end(),
                             [&](const Tensor& t) { return t.is_contiguous() && aligned(t); });
}

void launch(const RegionSource& source, cudaKernel_t kernel, const ops::Region& region, Inputs in,
            Outputs out) {
  std::vector<std::int64_t> given;  // as the kernel's `Given`: addresses, then the number of rows
  for (const auto& list : {in, Inputs(out.begin(), out.size())})
    for (const Tensor& t : list) given.push_back(std::bit_cast<std::int64_t>(t.raw()));
  given.push_back(region.space.rows());
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  const std::int64_t n = region.space.shape.numel();
  const auto unit = static_cast<unsigned>(source.grid_unit);
  config.gridDim = source.by_rows
                       ? looping_grid_of(std::min<std::int64_t>(
                             blocks_of(region.space.rows(), source.per_block), most_blocks_by_rows))
                       : (blocks_for(n / source.pack) + unit - 1) / unit * unit;
  config.blockDim = threads_per_block;
  config.stream = stream_of(in.empty() ? out[0].device() : in[0].device());
  config.attrs = &early;
  config.numAttrs = launches_early() ? 1 : 0;
  void* arguments[] = {given.data()};
  cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments);
  check_launch(ops::FusedRegion::name);
}

void fused_region(const ops::FusedRegion& op, Inputs in, Outputs out) {
  const ops::Region& region = *op.region;
  if (region.space.shape.numel() == 0 || !lies_as_planned(region, in, out)) return op.run(in, out);
  const Device device = in.empty() ? out[0].device() : in[0].device();
  const std::shared_ptr<const RegionPlan> plan = plan_of(region, device);
  if (!plan->source) return op.run(in, out);
  if (state_of(device).recording()) plan->kernel->wait();  // what is recorded stays so
  const cudaKernel_t kernel = plan->kernel->get();
  if (kernel == nullptr) return op.run(in, out);
  launch(*plan->source, kernel, region, in, out);
}

const ops::KnownMembers& known_members() {
  static const ops::KnownMembers all(DeviceType::cuda);
  return all;
}

bool is_member(const AnyOp& op) {
  static const bool can = [] {
    if (!has_nvrtc())
      write_log(LogLevel::info, "NVRTC is not installed, so Executor::fused is Executor::partition on GPUs");
    return has_nvrtc();
  }();
  if (!can) return false;
  return known_members().stands(op).value_or(!functor_source(op).empty());
}

}  // namespace

void add_fused_region() {
  add_functor_sources();
  known_members();
  add_kernel<fused_region>(DeviceType::cuda);
  ops::set_members(DeviceType::cuda, is_member);
}

}  // namespace sherd::cuda
