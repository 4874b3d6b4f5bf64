// Fused regions, tile by tile.
#include "runtime/fused_region.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "runtime/cpu/reduce.h"
#include "runtime/cpu/region_plan.h"
#include "runtime/cpu/row_copy.h"
#include "runtime/cpu/scratch.h"
#include "runtime/error.h"
#include "runtime/parallel.h"

namespace sherd::cpu {
namespace {

using ops::Lies;
using Instruction = TileInstruction;

constexpr std::int64_t elements_per_task = 16384;

/// `rows` rows from `row`, of each `columns` from `column`.
struct TileArea {
  std::int64_t row, rows, column, columns;
  PartOfRun part{};  ///< those rows, where columns are summed
};

/// A tile under way.
class RegionTile {
 public:
  RegionTile(const RegionPlan& plan, std::byte* const* tensors, std::byte* room, TileArea area)
      : plan_(plan),
        tensors_(tensors),
        room_(room),
        row_(area.row),
        rows_(area.rows),
        column_(area.column),
        columns_(area.columns),
        part_(area.part) {}

  void run() const {
    for (const Instruction& step : plan_.instructions) switch (step.does) {
        case Instruction::Does::loop:
          run_loop(step);
          break;
        case Instruction::Does::spread:
          run_spread(step);
          break;
        case Instruction::Does::sum:
          for (std::int64_t r = 0; r < rows_; ++r)
            step.sum(at(step.places[1], r), columns_of(step.columns), step.divisor, at(step.places[0], r));
          break;
        case Instruction::Does::add_to_columns:
          step.add(at(step.places[1], 0), part_, columns_of(step.columns), at(step.places[2], 0),
                   at(step.places[0], 0));
          break;
        case Instruction::Does::clear:
          for (std::int64_t r = 0; r < rows_; ++r)
            std::memset(at(step.places[0], r), 0,
                        static_cast<std::size_t>(columns_of(step.columns) * size_at(step.places[0])));
          break;
        case Instruction::Does::put:
          for (std::int64_t r = 0; r < rows_; ++r)
            copy_elements(size_at(step.places[0]), at(step.places[1], r), step.steps[1],
                          at(step.places[0], r) + step.first * size_at(step.places[0]), step.steps[0],
                          columns_of(step.columns));
          break;
      }
  }

 private:
  std::int64_t columns_of(std::int64_t own) const { return own == 0 ? columns_ : own; }
  std::int64_t size_at(std::uint32_t place) const { return plan_.places[place].size; }
  /// Of the place, what belongs to row `r` of the tile.
  std::byte* at(std::uint32_t number, std::int64_t r) const {
    const TilePlace& place = plan_.places[number];
    std::int64_t element = 0;
    if (place.within) return at(*place.within, r) + place.first * place.size;
    switch (place.lies) {
      case Lies::full:
        element = place.tensor ? (row_ + r) * (place.columns == 0 ? plan_.columns : place.columns) + column_
                               : r * columns_of(place.columns);
        break;
      case Lies::row:
        element = place.tensor ? row_ + r : r;
        break;
      case Lies::column:
        element = place.tensor ? column_ : 0;
        break;
      case Lies::number:
        break;
      case Lies::apart:
        element = column_ * place.step;
        for (std::int64_t rest = row_ + r, d = std::ssize(place.rows); d-- > 0;) {
          const auto& [size, step] = place.rows[static_cast<std::size_t>(d)];
          element += rest % size * step;
          rest /= size;
        }
        break;
    }
    return (place.tensor ? tensors_[*place.tensor] : room_ + place.offset) + element * place.size;
  }

  void run_loop(const Instruction& step) const {
    std::byte* given[sherd::detail::Operands::most];
    const std::int64_t calls = step.by_row ? rows_ : 1;
    const std::int64_t columns = columns_of(step.columns);
    const std::int64_t n = step.by_row || step.over == Lies::column ? columns
                           : step.over == Lies::full                ? rows_ * columns
                           : step.over == Lies::row                 ? rows_
                                                                    : 1;
    for (std::int64_t r = 0; r < calls; ++r) {
      for (int k = 0; k < step.count; ++k) given[k] = at(step.places[static_cast<std::size_t>(k)], r);
      step.row(step.functor.data(), n, given, step.steps.data());
    }
  }

  void run_spread(const Instruction& step) const {
    const std::int64_t size = size_at(step.places[0]);
    if (step.over == Lies::row)
      return copy_elements(size, at(step.places[1], 0), 0, at(step.places[0], 0), 1, rows_);
    for (std::int64_t r = 0; r < rows_; ++r)
      copy_elements(size, at(step.places[1], r), step.steps[1], at(step.places[0], r), 1,
                    columns_of(step.columns));
  }

  const RegionPlan& plan_;
  std::byte* const* tensors_;
  std::byte* room_;
  const std::int64_t row_, rows_, column_, columns_;
  const PartOfRun part_;
};

/// In one place, so that the compiler sees the tile whole and keeps it in registers.
void run_tile(const RegionPlan& plan, std::byte* const* tensors, std::byte* room, const TileArea& area) {
  RegionTile(plan, tensors, room, area).run();
}

std::shared_ptr<const RegionPlan> plan_of(const ops::Region& region) {
  if (const auto known = region.plan.load(std::memory_order_acquire))
    return std::static_pointer_cast<const RegionPlan>(known);
  const auto made = std::make_shared<const RegionPlan>(region);
  region.plan.store(made, std::memory_order_release);
  return made;
}

bool lies_as_planned(const ops::Region& region, Inputs in, Outputs out) {
  for (std::size_t i = 0; i < in.size(); ++i)
    if (in[i].strides() != region.inputs[i].second.strides) return false;
  return std::ranges::all_of(out.begin() + std::ranges::count(region.written, true), out.end(),
                             [](const Tensor& t) { return t.is_contiguous(); });
}

using Addresses = InlineVec<std::byte*, 16>;

Scratch<std::byte> room_of_tile(const RegionPlan& plan) {
  Scratch<std::byte> room = scratch<std::byte>(plan.bytes);
  check<OutOfMemoryError>(room != nullptr || plan.bytes == 0, "fused: no memory for {} bytes of a tile",
                          plan.bytes);
  return room;
}

void run_tiles(const RegionPlan& plan, const Addresses& tensors) {
  const std::int64_t across = (plan.columns + plan.tile_columns - 1) / plan.tile_columns;
  const std::int64_t tiles = (plan.rows + plan.tile_rows - 1) / plan.tile_rows * across;
  const std::int64_t grain =
      std::max<std::int64_t>(1, elements_per_task / (plan.tile_rows * plan.tile_columns));
  parallel_for(tiles, grain, [&](std::int64_t begin, std::int64_t end) {
    const Scratch<std::byte> room = room_of_tile(plan);
    for (std::int64_t tile = begin; tile < end; ++tile) {
      const std::int64_t row = tile / across * plan.tile_rows, column = tile % across * plan.tile_columns;
      const TileArea area{row, std::min(plan.tile_rows, plan.rows - row), column,
                          std::min(plan.tile_columns, plan.columns - column)};
      run_tile(plan, tensors.begin(), room.get(), area);
    }
  });
}

/// The same where columns are summed: by runs of rows, each with sums of its own.
void run_runs(const RegionPlan& plan, const Addresses& tensors) {
  const RowRuns& runs = *plan.runs;
  std::vector<std::vector<std::byte>> sums;
  for (const PlannedColumnSum& own : plan.column_sums)
    sums.emplace_back(static_cast<std::size_t>(runs.count() * runs.columns() * own.sum.size));
  const std::int64_t grain = std::max<std::int64_t>(1, elements_per_task / (RowRuns::longest * plan.columns));
  parallel_for(runs.count(), grain, [&](std::int64_t begin, std::int64_t end) {
    const Scratch<std::byte> room = room_of_tile(plan);
    for (std::int64_t i = begin; i < end; ++i) {
      Addresses own = tensors;
      for (std::size_t k = 0; k < sums.size(); ++k)
        own.push_back(sums[k].data() + i * runs.columns() * plan.column_sums[k].sum.size);
      const auto [first, all] = runs.at(i);
      for (std::int64_t r = 0; r < all; r += plan.tile_rows) {
        const std::int64_t rows = std::min(plan.tile_rows, all - r);
        const TileArea area{first + r, rows, 0, plan.columns, {r, rows, all}};
        run_tile(plan, own.begin(), room.get(), area);
      }
    }
  });
  for (std::size_t k = 0; k < sums.size(); ++k) {
    const PlannedColumnSum& own = plan.column_sums[k];
    own.sum.join(runs, sums[k].data(), own.divisor, tensors[own.out]);
  }
}

void fused_region(const ops::FusedRegion& op, Inputs in, Outputs out) {
  if (op.region->space.shape.numel() == 0 || !lies_as_planned(*op.region, in, out)) return op.run(in, out);
  const std::shared_ptr<const RegionPlan> plan = plan_of(*op.region);
  if (!plan->complete) return op.run(in, out);
  Addresses tensors;
  for (const Tensor& t : in) tensors.push_back(t.raw());
  for (const Tensor& t : out) tensors.push_back(t.raw());
  plan->runs ? run_runs(*plan, tensors) : run_tiles(*plan, tensors);
}

/// As many threads as there are runs of rows have work; of few elements hardly more would without the sums.
bool sums_columns(std::int64_t rows, std::int64_t columns, DType) {
  constexpr std::int64_t enough = 8;
  return RowRuns(rows, columns).count() >= std::min(enough, ceil_div(rows * columns, elements_per_task));
}

const ops::KnownMembers& known_members() {
  static const ops::KnownMembers all(DeviceType::cpu);
  return all;
}

bool is_member(const AnyOp& op) {
  return known_members().stands(op).value_or(sherd::detail::loop_of(op.kernels()) != nullptr);
}

}  // namespace

void add_fused_region() {
  known_members();
  add_kernel<fused_region>(DeviceType::cpu);
  ops::set_members(DeviceType::cpu, is_member, sums_columns);
}

}  // namespace sherd::cpu
