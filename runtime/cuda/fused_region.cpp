// Fused regions as kernels that are compiled while the program runs; until one is there, and where there is
// none, the members run one by one, with the same bits.
#include "runtime/fused_region.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <vector>

#include "runtime/cuda/check.h"
#include "runtime/cuda/fold_sizes.h"
#include "runtime/cuda/kernels.h"
#include "runtime/cuda/launchers.h"
#include "runtime/cuda/nvrtc.h"
#include "runtime/cuda/rank.h"
#include "runtime/cuda/region_kernels.h"
#include "runtime/cuda/region_launch.h"
#include "runtime/cuda/region_source.h"
#include "runtime/log.h"
#include "runtime/ops.h"

namespace sherd::cuda {
namespace {

bool is_aligned(const Tensor& t) { return reinterpret_cast<std::uintptr_t>(t.raw()) % 16 == 0; }

}  // namespace

bool lies_so(const Tensor& t, const Layout& layout) { return t.strides() == layout.strides && is_aligned(t); }
bool is_dense_and_aligned(const Tensor& t) { return t.is_contiguous() && is_aligned(t); }

cudaKernel_t RegionPlan::get(Device device) const {
  if (!source) return nullptr;
  if (state_of(device).recording()) kernel->wait();
  return kernel->get();
}

std::shared_ptr<const RegionPlan> plan_of(std::atomic<std::shared_ptr<const void>>& kept, Device device,
                                          const std::function<std::optional<RegionSource>()>& source) {
  if (const auto known = kept.load(std::memory_order_acquire))
    return std::static_pointer_cast<const RegionPlan>(known);
  const auto made = std::make_shared<RegionPlan>(RegionPlan{source()});
  if (made->source) made->kernel = region_kernel(made->source->text, device.index);
  kept.store(made, std::memory_order_release);
  return made;
}

void launch_region(cudaKernel_t kernel, dim3 grid, dim3 block, cudaStream_t stream, void** arguments) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = launches_early() ? 1 : 0;
  cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments);
}

namespace {

constexpr std::int64_t most_blocks_by_rows = 1 << 16;

bool lies_as_planned(const ops::Region& region, Inputs in, Outputs out) {
  for (std::size_t i = 0; i < in.size(); ++i)
    if (!lies_so(in[i], region.inputs[i].second)) return false;
  return std::ranges::all_of(out.begin() + std::ranges::count(region.written, true), out.end(),
                             is_dense_and_aligned);
}

/// `given`: as the kernel's `Given`.
void launch(cudaKernel_t kernel, unsigned blocks, cudaStream_t stream, std::vector<std::int64_t>& given) {
  void* arguments[] = {given.data()};
  launch_region(kernel, blocks, threads_per_block, stream, arguments);
  check_launch(ops::FusedRegion::name);
}

unsigned blocks_of_region(const RegionSource& source, const ops::Region& region) {
  if (source.by_rows)
    return looping_grid_of(
        std::min<std::int64_t>(blocks_of(region.space.rows(), source.per_block), most_blocks_by_rows));
  const auto unit = static_cast<unsigned>(source.grid_unit);
  return (blocks_for(region.space.shape.numel() / source.pack) + unit - 1) / unit * unit;
}

/// The same where columns are summed: lanes first, then what these have summed.
void launch_lanes(const RegionSource& source, cudaKernel_t kernel, std::int64_t rows, Device device,
                  std::vector<std::int64_t>& given) {
  const LanesOfColumns& one = source.column_sums[0];
  const ColumnLanes lanes(rows, one.columns, one.dtype);
  // Of a sum of columns, by 8 bytes, of which accumulators of pieces have as many each.
  const std::int64_t sums = lanes.count() * one.columns * size_of(compute_dtype(one.dtype)) / 8;
  const auto count = static_cast<std::int64_t>(source.column_sums.size());
  const Tensor room = empty(Shape{count * sums + lanes.pieces * one.columns}, {DType::i64, device});
  const auto place = [&](std::int64_t i) { return reinterpret_cast<std::int64_t*>(room.raw()) + i * sums; };
  for (std::int64_t i = 0; i < count; ++i) given.push_back(std::bit_cast<std::int64_t>(place(i)));
  for (const std::int64_t number : {rows, lanes.length, lanes.of_piece(), lanes.count()})
    given.push_back(number);
  launch(kernel, grid_of(blocks_of(lanes.count(), source.per_block)), stream_of(device), given);
  for (std::int64_t i = 0; i < count; ++i) {
    const LanesOfColumns& own = source.column_sums[static_cast<std::size_t>(i)];
    SumCall call{{.dtype = own.dtype, .reduce = rows, .inner = own.columns}};
    call.x = place(i);
    call.partial = place(count);
    call.stream = stream_of(device);
    call.divisor = own.mean ? static_cast<double>(rows) : 1.0;
    call.out = std::bit_cast<void*>(given[own.tensor]);
    launch_sum_of_lanes(call);
    check_launch(ops::FusedRegion::name);
  }
}

void launch(const RegionSource& source, cudaKernel_t kernel, const ops::Region& region, Inputs in,
            Outputs out) {
  std::vector<std::int64_t> given;
  for (const auto& list : {in, Inputs(out.begin(), out.size())})
    for (const Tensor& t : list) given.push_back(std::bit_cast<std::int64_t>(t.raw()));
  const Device device = in.empty() ? out[0].device() : in[0].device();
  if (!source.column_sums.empty()) return launch_lanes(source, kernel, region.space.rows(), device, given);
  given.push_back(region.space.rows());
  launch(kernel, blocks_of_region(source, region), stream_of(device), given);
}

void fused_region(const ops::FusedRegion& op, Inputs in, Outputs out) {
  const ops::Region& region = *op.region;
  if (region.space.shape.numel() == 0 || !lies_as_planned(region, in, out)) return op.run(in, out);
  const Device device = in.empty() ? out[0].device() : in[0].device();
  const std::shared_ptr<const RegionPlan> plan =
      plan_of(region.plan, device, [&] { return region_source(region); });
  const cudaKernel_t kernel = plan->get(device);
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

/// Sums of columns whose lanes keep the largest GPU busy, and whose threads keep few numbers each.
bool sums_columns(std::int64_t rows, std::int64_t columns, DType dtype) {
  constexpr std::int64_t enough_threads = 1 << 16, most_bytes = 1 << 14;
  const ColumnLanes lanes(rows, columns, dtype);
  const std::int64_t of_lane = columns <= longest_of_lane ? 32 : threads_per_block;
  return lanes.runs <= run_length && lanes.count() * of_lane >= enough_threads &&
         columns * size_of(compute_dtype(dtype)) <= most_bytes;
}

}  // namespace

void add_fused_region() {
  add_functor_sources();
  known_members();
  add_kernel<fused_region>(DeviceType::cuda);
  ops::set_members(DeviceType::cuda, is_member, sums_columns);
}

}  // namespace sherd::cuda
