#include "runtime/fused_region.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "runtime/apply.h"
#include "runtime/ops.h"
#include "runtime/ops/cat.h"
#include "runtime/ops/copy.h"
#include "runtime/ops/slice.h"

namespace sherd::ops {
namespace {

/// Steps over dimensions of more than one element, broadcast to those of a call.
struct Steps {
  Shape sizes, strides;

  Steps(const Layout& layout, const Shape& shape) {
    const int extra = shape.rank() - layout.shape.rank();
    for (int d = 0; d < shape.rank(); ++d) {
      if (shape[d] == 1) continue;
      sizes.push_back(shape[d]);
      const bool repeated = d < extra || layout.shape[d - extra] == 1;
      strides.push_back(repeated ? 0 : layout.strides[d - extra]);
    }
  }
  /// Whether the first `count` dimensions lie one behind another, the last of them in steps of 1.
  bool dense(int count) const {
    std::int64_t step = 1;
    for (int d = count - 1; d >= 0; --d) {
      if (strides[d] != step) return false;
      step *= sizes[d];
    }
    return true;
  }
  bool repeat(int count) const {
    return std::ranges::all_of(strides.begin(), strides.begin() + count, [](auto s) { return s == 0; });
  }
};

/// What a back end says of its kernel for regions.
struct Taken {
  std::atomic<IsMember> is_member{};
  std::atomic<SumsColumns> sums_columns{};
};
Taken& taken(DeviceType device) {
  static std::array<Taken, device_type_limit> all{};
  return all[static_cast<std::size_t>(device)];
}

bool same_layout(const Layout& a, const Layout& b) {
  return a.offset == b.offset && a.shape == b.shape && a.strides == b.strides;
}

}  // namespace

std::optional<RowSpace> space_of_member(const RowSpace& space, const Shape& result) {
  const std::int64_t n = result.numel();
  if (n == space.shape.numel() || (n == space.rows() && space.columns() > 1)) return space;
  const RowSpace own{result};
  if (result.empty() || own.columns() < 2 || own.rows() != space.rows()) return {};
  return own;
}

std::vector<RowPart> row_parts(const AnyOp& op, std::span<const Shape> in) {
  std::vector<RowPart> parts;
  if (&op.kernels() == &kernel_row<Cat>()) {
    std::int64_t first = 0;
    for (const Shape& shape : in) {
      if (static_cast<const Cat*>(op.value())->axis != shape.rank() - 1) return {};
      parts.push_back({first, 1});
      first += shape.back();
    }
  } else if (&op.kernels() == &kernel_row<Unslice>()) {
    const Slice& slice = static_cast<const Unslice*>(op.value())->slice;
    if (slice.axis == in[0].rank() - 1) parts.push_back({slice.start, slice.step});
  }
  return parts;
}

std::optional<RowPart> row_part(const RowSpace& space, const Layout& layout, std::int64_t columns) {
  if (layout.shape != space.shape || layout.offset < 0 || layout.shape.empty()) return {};
  const int rank = layout.shape.rank();
  std::int64_t step = columns;
  for (int d = rank - 2; d >= 0; --d) {
    if (layout.shape[d] != 1 && layout.strides[d] != step) return {};
    step *= layout.shape[d];
  }
  const RowPart part{layout.offset, layout.strides[rank - 1]};
  const bool inside = part.step > 0 && part.first + (space.columns() - 1) * part.step < columns;
  return inside ? std::optional(part) : std::nullopt;
}

std::optional<Lies> lies_over(const RowSpace& space, const Layout& layout, const Shape& shape) {
  const std::int64_t columns = space.columns(), n = shape.numel();
  const Steps steps(layout, shape);
  const int rank = steps.sizes.rank();
  const bool of_rows = n != space.shape.numel();
  if (of_rows && (n != space.rows() || columns < 2)) return {};
  if (steps.dense(rank)) return of_rows ? Lies::row : Lies::full;
  if (steps.repeat(rank)) return Lies::number;
  if (of_rows) return {};
  if (columns > 1 && shape.back() == columns) {
    if (steps.strides[rank - 1] == 1 && steps.repeat(rank - 1)) return Lies::column;
    if (steps.strides[rank - 1] == 0 && steps.dense(rank - 1)) return Lies::row;
  }
  if (shape == space.shape) return Lies::apart;
  return {};
}

bool joins_regions(const AnyOp& op, DeviceType device) {
  const IsMember is_member = taken(device).is_member.load(std::memory_order_acquire);
  return is_member != nullptr && is_member(op);
}
bool sums_columns(std::int64_t rows, std::int64_t columns, DType dtype, DeviceType device) {
  const SumsColumns sums = taken(device).sums_columns.load(std::memory_order_acquire);
  return sums != nullptr && sums(rows, columns, dtype);
}
void set_members(DeviceType device, IsMember is_member, SumsColumns sums_columns) {
  taken(device).is_member.store(is_member, std::memory_order_release);
  taken(device).sums_columns.store(sums_columns, std::memory_order_release);
}

KnownMembers::KnownMembers(DeviceType device) : device_(device) {
  for (const KernelRow* row : {&kernel_row<Cast>(), &kernel_row<Clone>(), &kernel_row<Sum>(),
                               &kernel_row<Cat>(), &kernel_row<Unslice>()})
    kernels_.emplace_back(row, row->on(device));
}
std::optional<bool> KnownMembers::stands(const AnyOp& op) const {
  const KernelRow* const row = &op.kernels();
  const auto known = std::ranges::find(kernels_, row, &std::pair<const KernelRow*, Kernel>::first);
  return known == kernels_.end() ? std::nullopt : std::optional(row->on(device_) == known->second);
}

namespace {
struct Efforts {
  std::mutex mutex;
  std::unordered_map<const KernelRow*, Effort> of{};
};
/// Never destroyed, as rows of kernels are not.
Efforts& efforts() {
  static auto& all = *std::make_unique<Efforts>().release();
  return all;
}
}  // namespace

std::optional<Effort> effort_of(const AnyOp& op) {
  const KernelRow* const row = &op.kernels();
  if (row == &kernel_row<Cast>() || row == &kernel_row<Clone>()) return Effort::light;
  const std::scoped_lock lock(efforts().mutex);
  const auto known = efforts().of.find(row);
  return known == efforts().of.end() ? std::nullopt : std::optional(known->second);
}
void set_effort(const KernelRow& row, Effort effort) {
  const std::scoped_lock lock(efforts().mutex);
  efforts().of[&row] = effort;
}

namespace {
/// The op, if it is a sum of rows or columns of such a tensor over the axes.
const Sum* sum_over(Mask axes, const AnyOp& op, const Shape& shape, DType dtype) {
  if (&op.kernels() != &kernel_row<Sum>() || !is_floating(dtype)) return nullptr;
  const auto* const sum = static_cast<const Sum*>(op.value());
  return sum->axes == axes && shape.back() > 1 && shape.back() <= most_columns ? sum : nullptr;
}
}  // namespace

const Sum* row_sum(const AnyOp& op, const Shape& shape, DType dtype) {
  if (shape.empty()) return nullptr;
  return sum_over(bit(static_cast<std::size_t>(shape.rank() - 1)), op, shape, dtype);
}

const Sum* column_sum(const AnyOp& op, const Shape& shape, DType dtype) {
  if (shape.rank() < 2) return nullptr;
  return sum_over(bit(static_cast<std::size_t>(shape.rank() - 1)) - 1, op, shape, dtype);
}

bool Region::operator==(const Region& other) const {
  const auto same_member = [](const Member& a, const Member& b) {
    return a.op->equals(*b.op) && a.result == b.result &&
           std::ranges::equal(a.in, b.in, [](const Operand& x, const Operand& y) {
             return x.value == y.value && same_layout(x.layout, y.layout);
           });
  };
  const auto same_input = [](const auto& a, const auto& b) {
    return a.first == b.first && same_layout(a.second, b.second);
  };
  return space == other.space && written == other.written && results == other.results &&
         std::ranges::equal(inputs, other.inputs, same_input) &&
         std::ranges::equal(members, other.members, same_member);
}

std::string Region::text() const {
  std::string text;
  for (std::size_t i = 0; i < members.size(); ++i) {
    std::string in;
    for (const Operand& operand : members[i].in)
      in += fmt::format("{}{}", in.empty() ? "" : " ", operand.value);
    text += fmt::format("{}{} = {}({})", i == 0 ? "" : ", ", inputs.size() + i, members[i].op->text(), in);
  }
  return text;
}

std::int64_t Region::bytes_saved() const {
  std::int64_t bytes = 0;
  for (std::size_t m = 0; m < members.size(); ++m)
    if (!members[m].writes() &&
        std::ranges::find(results, static_cast<std::uint32_t>(inputs.size() + m)) == results.end())
      bytes += members[m].result.bytes();
  return bytes;
}

const Region* region_of(const AnyOp& op) {
  if (&op.kernels() != &kernel_row<FusedRegion>()) return nullptr;
  return static_cast<const FusedRegion*>(op.value())->region.get();
}

Specs FusedRegion::infer(SpecSpan in) const {
  check<ValueError>(in.size() == region->inputs.size(), "fused: takes {} inputs, got {}",
                    region->inputs.size(), in.size());
  Specs specs;
  for (std::size_t i = 0; i < in.size(); ++i)
    check<ShapeError>(in[i].shape == region->inputs[i].second.shape && in[i].dtype == region->inputs[i].first,
                      "fused: input {} is {} {}, the region was made for {} {}", i, name_of(in[i].dtype),
                      in[i].shape, name_of(region->inputs[i].first), region->inputs[i].second.shape);
  for (const std::uint32_t value : region->results)
    specs.push_back(region->members[value - region->inputs.size()].result);
  return specs;
}

void FusedRegion::run(Inputs in, Outputs out) const {
  std::vector<Tensor> values(in.begin(), in.end());
  std::vector<bool> made(in.size());  // in memory of the region's own
  const auto written = static_cast<std::size_t>(std::ranges::count(region->written, true));
  const auto given = [&](const Region::Operand& operand) {
    const Tensor& value = values[operand.value];
    if (!made[operand.value]) return value;
    Layout layout = operand.layout;
    layout.offset += value.layout().offset;
    return Tensor(make_ref<TensorImpl>(value.storage_ref(), layout, value.dtype()));
  };
  for (const Region::Member& member : region->members) {
    Tensors operands;
    for (const Region::Operand& operand : member.in) operands.push_back(given(operand));
    const auto result = std::ranges::find(region->results, static_cast<std::uint32_t>(values.size()));
    const auto number = static_cast<std::size_t>(result - region->results.begin());
    Tensor value = member.writes()                   ? operands[0]
                   : result != region->results.end() ? out[written + number]
                                                     : empty(member.result);
    run_again(*member.op, Inputs(operands.begin(), operands.size()), Outputs(&value, 1));
    made.push_back(!member.writes() || made[member.in[0].value]);
    values.push_back(std::move(value));
  }
}

}  // namespace sherd::ops
