#include "runtime/cpu/region_plan.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "runtime/cpu/copy.h"
#include "runtime/error.h"
#include "runtime/ops/copy.h"
#include "runtime/ops/slice.h"

namespace sherd::cpu {
namespace {

using ops::Lies;
using ops::Region;
using sherd::detail::Loop;
using Instruction = TileInstruction;

constexpr std::int64_t tile_elements = 1024;
constexpr std::int64_t short_row = 64;  // calls for each would cost more than what they compute

bool is_half(DType d) { return d == DType::f16 || d == DType::bf16; }

class KeepsLoop final : public sherd::detail::LoopTaker {
 public:
  explicit KeepsLoop(Instruction& to) : to_(to) {}
  void take(const Loop& loop, const void* functor, std::size_t bytes) const override {
    copied = bytes > 0;
    std::copy_n(static_cast<const std::byte*>(functor), bytes, to_.functor.begin());
    to_.row = loop.row;
    numbers = loop.numbers;
    in_f32 = loop.in_f32;
  }
  mutable Mask numbers = 0;
  mutable bool in_f32 = false, copied = false;

 private:
  Instruction& to_;
};

class Planning {
 public:
  Planning(const Region& region, RegionPlan& plan) : region_(region), plan_(plan) {
    plan_.rows = region.space.rows();
    plan_.columns = region.space.columns();
    for (const auto& [dtype, layout] : region.inputs) dtypes_.push_back(dtype);
    values_.resize(region.inputs.size());
  }

  void run() {
    for (const Region::Member& member : region_.members) add(member);
    choose_tiles();
    place_buffers();
  }

 private:
  std::uint32_t add_place(TilePlace place, DType dtype) {
    place.size = size_of(dtype);
    plan_.places.push_back(std::move(place));
    place_dtypes_.push_back(dtype);
    return static_cast<std::uint32_t>(plan_.places.size() - 1);
  }
  std::uint32_t add_buffer(Lies lies, DType dtype) { return add_place({lies, columns_, 0, {}}, dtype); }
  Lies lies(std::uint32_t place) const { return plan_.places[place].lies; }

  /// An input as it lies in this call.
  std::uint32_t place_of_input(std::uint32_t input, const Layout& layout, const Shape& shape) {
    const Lies how = ops::lies_over(space_, layout, shape).value();
    TilePlace place{how, columns_, 0, input};
    if (how == Lies::apart) {
      const int extra = shape.rank() - layout.shape.rank();
      for (int d = 0; d < shape.rank(); ++d) {
        const std::int64_t step = d < extra || layout.shape[d - extra] == 1 ? 0 : layout.strides[d - extra];
        if (d + 1 == shape.rank())
          place.step = step;
        else if (!place.rows.empty() && place.rows.back().second == step * shape[d])
          place.rows.back() = {place.rows.back().first * shape[d], step};
        else
          place.rows.emplace_back(shape[d], step);
      }
    }
    const auto [known, is_new] = inputs_.try_emplace({input, how, columns_of(how), place.rows}, 0);
    if (!is_new) return known->second;
    return known->second = add_place(std::move(place), dtypes_[input]);
  }
  std::uint32_t place_of(const Region::Operand& operand, const Shape& shape) {
    if (operand.value < region_.inputs.size())
      return place_of_input(operand.value, region_.inputs[operand.value].second, shape);
    const std::uint32_t value = values_[operand.value].value();
    if (lies(value) != Lies::full || operand.layout.shape.numel() == plan_.rows * columns_at(value))
      return value;
    const ops::RowPart part = ops::row_part({shape}, operand.layout, columns_at(value)).value();
    TilePlace place{Lies::apart, 0, 0, {}};
    place.within = value;
    place.first = part.first;
    place.step = part.step;
    return add_place(std::move(place), place_dtypes_[value]);
  }
  std::int64_t columns_at(std::uint32_t place) const {
    const std::int64_t columns = plan_.places[place].columns;
    return columns == 0 ? plan_.columns : columns;
  }

  /// Where a member's result goes.
  std::uint32_t place_of_result(const Region::Member& member, Lies over, std::uint32_t first) {
    if (member.writes()) return first;
    const auto number = static_cast<std::uint32_t>(values_.size());
    const std::optional<std::uint32_t> tensor = tensor_of(number);
    if (!tensor) return add_buffer(over, member.result.dtype);
    return add_place({over, columns_, 0, tensor}, member.result.dtype);
  }
  /// That of a result; none of what nobody outside reads.
  std::optional<std::uint32_t> tensor_of(std::uint32_t value) const {
    const auto result = std::ranges::find(region_.results, value);
    if (result == region_.results.end()) return {};
    const auto written = static_cast<std::uint32_t>(std::ranges::count(region_.written, true));
    return static_cast<std::uint32_t>(region_.inputs.size()) + written +
           static_cast<std::uint32_t>(result - region_.results.begin());
  }
  std::uint32_t tensors() const {
    return static_cast<std::uint32_t>(region_.inputs.size() + region_.results.size()) +
           static_cast<std::uint32_t>(std::ranges::count(region_.written, true));
  }

  /// The elements of `place` as those of another dtype.
  void convert(std::uint32_t from, std::uint32_t to) {
    Instruction& step = plan_.instructions.emplace_back();
    step.row = conversion(place_dtypes_[from], place_dtypes_[to]);
    step.over = lies(to);
    step.columns = columns_;
    step.by_row = lies(from) != lies(to);  // of one that lies apart
    step.count = 2;
    step.places = {to, from};
    step.steps = {1, 1};
  }
  std::uint32_t widened(std::uint32_t place) {
    if (lies(place) == Lies::apart && plan_.places[place].step != 1) place = spread(place, Lies::full);
    const auto [known, is_new] = derived_.try_emplace(key(place, Derived::wide), 0);
    if (!is_new) return known->second;
    const std::uint32_t wide = add_buffer(lies(place) == Lies::apart ? Lies::full : lies(place), DType::f32);
    derived_[key(place, Derived::wide)] = wide;
    convert(place, wide);
    return wide;
  }
  /// With an element for each of the tile, or each row of it.
  std::uint32_t spread(std::uint32_t place, Lies over) {
    const Derived how = over == Lies::full ? Derived::full : Derived::rows;
    const auto [known, is_new] = derived_.try_emplace(key(place, how), 0);
    if (!is_new) return known->second;
    const std::uint32_t to = add_buffer(over, place_dtypes_[place]);
    derived_[key(place, how)] = to;
    Instruction& step = plan_.instructions.emplace_back();
    step.does = Instruction::Does::spread;
    step.over = over;
    step.count = 2;
    step.places = {to, place};
    step.columns = columns_;
    step.steps = {1, step_in(place)};
    return to;
  }

  void add(const Region::Member& member) {
    std::vector<Shape> shapes;
    for (const Region::Operand& operand : member.in) shapes.push_back(operand.layout.shape);
    const ops::Sum* sum = ops::row_sum(*member.op, shapes[0], dtype_of(member.in[0]));
    if (sum != nullptr) {
      add_sum(member, *sum);
    } else if ((sum = ops::column_sum(*member.op, shapes[0], dtype_of(member.in[0])))) {
      add_column_sum(member, *sum);
    } else if (const std::vector<ops::RowPart> parts = ops::row_parts(*member.op, shapes); !parts.empty()) {
      add_parts(member, parts);
    } else {
      add_elementwise(member);
    }
    dtypes_.push_back(member.result.dtype);
  }
  void look_at_space(const Shape& shape) {
    space_ = ops::space_of_member(region_.space, shape).value();
    columns_ = space_ == region_.space ? 0 : space_.columns();
    short_rows_ = space_.columns() < short_row;
    most_columns_ = std::max(most_columns_, space_.columns());
    rows_ = rows_ || columns_ != 0;
  }

  void add_elementwise(const Region::Member& member) {
    const Shape& shape = member.result.shape;
    look_at_space(shape);
    std::vector<std::uint32_t> in;
    for (const Region::Operand& operand : member.in) in.push_back(place_of(operand, shape));
    const Lies over = shape.numel() == space_.shape.numel() ? Lies::full : Lies::row;
    const std::uint32_t out = place_of_result(member, over, in[0]);
    rows_ = rows_ || over == Lies::row;
    if (&member.op->kernels() == &kernel_row<ops::Cast>() ||
        &member.op->kernels() == &kernel_row<ops::Clone>()) {
      const bool fits = lies(in[0]) == over ||
                        (over == Lies::full && lies(in[0]) == Lies::apart && plan_.places[in[0]].step == 1);
      convert(fits ? in[0] : spread(in[0], over), out);
      look_at_rows(plan_.instructions.back());
    } else {
      add_loop(member, over, std::move(in), out);
    }
    values_.emplace_back(out);
  }

  /// Rows that are put together of parts.
  void add_parts(const Region::Member& member, const std::vector<ops::RowPart>& parts) {
    look_at_space(member.result.shape);
    const std::uint32_t out = place_of_result(member, Lies::full, 0);
    const auto begin = [&](Instruction::Does does, int count) -> Instruction& {
      Instruction& step = plan_.instructions.emplace_back();
      step.does = does;
      step.columns = columns_;
      step.count = count;
      step.places[0] = out;
      return step;
    };
    if (&member.op->kernels() == &kernel_row<ops::Unslice>()) begin(Instruction::Does::clear, 1);
    for (std::size_t k = 0; k < parts.size(); ++k) {
      const Shape& shape = member.in[k].layout.shape;
      look_at_space(shape);
      const std::uint32_t in = place_of(member.in[k], shape);
      Instruction& step = begin(Instruction::Does::put, 2);
      step.places[1] = in;
      step.first = parts[k].first;
      step.steps = {parts[k].step, step_in(in)};
    }
    rows_ = true;
    values_.emplace_back(out);
  }
  /// From column to column.
  std::int64_t step_in(std::uint32_t place) const {
    const Lies how = lies(place);
    return how == Lies::apart ? plan_.places[place].step : how == Lies::row || how == Lies::number ? 0 : 1;
  }
  DType dtype_of(const Region::Operand& operand) const { return dtypes_[operand.value]; }

  void add_loop(const Region::Member& member, Lies over, std::vector<std::uint32_t> in, std::uint32_t out) {
    Instruction step;
    const KeepsLoop keeps(step);
    sherd::detail::loop_of(member.op->kernels())(member.op->value(), dtype_of(member.in.back()), keeps);
    plan_.complete = plan_.complete && keeps.copied;
    const bool strided = std::ranges::any_of(
        in, [&](std::uint32_t place) { return lies(place) == Lies::apart && step_in(place) != 1; });
    for (std::uint32_t& place : in) {
      if (over == Lies::row && lies(place) == Lies::apart) place = spread(place, over);
      if (keeps.in_f32 && is_half(place_dtypes_[place])) place = widened(place);
    }
    step.over = over;
    step.columns = columns_;
    step.count = static_cast<int>(in.size()) + 1;
    // The variant of the loop that a call of the op itself takes (`RowsOfCall`): of two NaN that meet the
    // variant decides whose sign comes out.
    const bool gathers = space_.columns() <= short_row &&
                         (strided || (keeps.in_f32 && std::ranges::any_of(in, [&](std::uint32_t place) {
                                        return place_dtypes_[place] == DType::f32;
                                      })));
    bool has_number = false;
    for (std::size_t k = 0; k < in.size(); ++k) {
      const Lies how = lies(in[k]);
      step.steps[k + 1] = 1;
      if (how == over) continue;
      const bool repeats = how == Lies::number || how == Lies::row;
      if (repeats && !has_number && has(keeps.numbers, k + 1) && (how == Lies::number || !gathers)) {
        has_number = true;
        step.steps[k + 1] = 0;
      } else if (repeats || short_rows_ || step_in(in[k]) != 1) {
        in[k] = spread(in[k], over);
      }
    }
    const bool wide = keeps.in_f32 && is_half(place_dtypes_[out]);
    step.places[0] = wide ? add_buffer(over, DType::f32) : out;
    std::ranges::copy(in, step.places.begin() + 1);
    look_at_rows(step);
    plan_.instructions.push_back(step);
    if (member.writes()) forget(out);
    if (wide) convert(step.places[0], out);
  }
  /// What was made of a place that is written now.
  void forget(std::uint32_t place) {
    std::erase_if(derived_, [&](const auto& entry) {
      const std::uint32_t from = std::get<0>(entry.first);
      return from == place || plan_.places[from].within == place;
    });
  }

  /// Whether a loop wants a call for each row.
  void look_at_rows(Instruction& step) const {
    for (int k = 1; k < step.count; ++k) {
      const Lies how = lies(step.places[static_cast<std::size_t>(k)]);
      step.by_row = step.by_row || (how != step.over && how != Lies::number);
    }
  }

  void add_sum(const Region::Member& member, const ops::Sum& sum) {
    look_at_space(member.in[0].layout.shape);
    rows_ = true;
    std::uint32_t in = place_of(member.in[0], member.in[0].layout.shape);
    if (lies(in) != Lies::full) in = spread(in, Lies::full);
    const std::uint32_t out = place_of_result(member, Lies::row, in);
    Instruction& step = plan_.instructions.emplace_back();
    step.does = Instruction::Does::sum;
    step.over = Lies::row;
    step.sum = sum_of_row(place_dtypes_[in]);
    step.columns = columns_;
    step.divisor = sum.mean ? static_cast<double>(space_.columns()) : 1;
    step.count = 2;
    step.places = {out, in};
    values_.emplace_back(out);
  }

  void add_column_sum(const Region::Member& member, const ops::Sum& sum) {
    const std::optional<std::uint32_t> out = tensor_of(static_cast<std::uint32_t>(values_.size()));
    values_.emplace_back();  // what no member reads
    if (!out) return;
    look_at_space(member.in[0].layout.shape);
    rows_ = true;
    const std::uint32_t in = place_of(member.in[0], member.in[0].layout.shape);
    const SumOfColumns of = sum_of_columns(place_dtypes_[in]);
    const auto column_place = [&](std::optional<std::uint32_t> tensor) {
      const std::uint32_t place = add_place({Lies::column, columns_, 0, tensor}, place_dtypes_[in]);
      plan_.places[place].size = of.size;
      return place;
    };
    const std::uint32_t sums = column_place(tensors() + static_cast<std::uint32_t>(plan_.column_sums.size()));
    pending_.push_back(column_place({}));
    plan_.column_sums.push_back({of, *out, sum.mean ? static_cast<double>(plan_.rows) : 1});
    plan_.runs.emplace(plan_.rows, space_.columns());
    Instruction& step = plan_.instructions.emplace_back();
    step.does = Instruction::Does::add_to_columns;
    step.over = Lies::column;
    step.columns = columns_;
    step.add = of.add;
    step.count = 3;
    step.places = {sums, in, pending_.back()};
  }

  /// Rows of a tile in which sums of columns add them up.
  static std::int64_t part_of_run(std::int64_t rows) {
    constexpr std::int64_t together = RowRuns::together;
    return rows < together ? together / 2 : std::min(rows / together * together, RowRuns::longest);
  }
  void choose_tiles() {
    const auto flat = [](const TilePlace& place) {
      return place.lies == Lies::full || place.lies == Lies::number;
    };
    if (!rows_ && std::ranges::all_of(plan_.places, flat)) {
      plan_.columns *= std::exchange(plan_.rows, 1);
      plan_.tile_rows = 1;
      plan_.tile_columns = std::min(plan_.columns, tile_elements);
      return;
    }
    plan_.tile_columns = rows_ ? plan_.columns : std::min(plan_.columns, tile_elements);
    plan_.tile_rows = std::clamp<std::int64_t>(tile_elements / most_columns_, 1, plan_.rows);
    if (plan_.runs) plan_.tile_rows = part_of_run(plan_.tile_rows);
  }

  std::int64_t bytes_of(const TilePlace& place) const {
    const std::int64_t columns = place.columns == 0 ? plan_.tile_columns : place.columns;
    const std::int64_t count = place.lies == Lies::full     ? plan_.tile_rows * columns
                               : place.lies == Lies::row    ? plan_.tile_rows
                               : place.lies == Lies::column ? columns
                                                            : 1;
    // A line more than they need: buffers at multiples of a page push each other out of the nearest cache.
    constexpr std::int64_t line = 64;
    return (count * place.size + line - 1) / line * line + line;
  }

  /// Buffers take the bytes of those that were used for the last time.
  void place_buffers() {
    std::vector<std::size_t> last(plan_.places.size());
    const auto each_place = [&](std::size_t i, const auto& at) {
      for (int k = 0; k < plan_.instructions[i].count; ++k) {
        const std::uint32_t place = plan_.instructions[i].places[static_cast<std::size_t>(k)];
        at(plan_.places[place].within.value_or(place));
      }
    };
    for (std::size_t i = 0; i < plan_.instructions.size(); ++i)
      each_place(i, [&](std::uint32_t place) { last[place] = i; });
    std::vector<bool> placed(plan_.places.size());
    for (const std::uint32_t place : pending_)
      plan_.places[place].offset = std::exchange(plan_.bytes, plan_.bytes + bytes_of(plan_.places[place]));
    std::multimap<std::int64_t, std::int64_t> free;  // bytes, offset
    for (std::size_t i = 0; i < plan_.instructions.size(); ++i) {
      const std::uint32_t out = plan_.instructions[i].places[0];
      TilePlace& place = plan_.places[out];
      if (!place.tensor && !placed[out]) {
        placed[out] = true;
        const std::int64_t bytes = bytes_of(place);
        if (const auto its = free.find(bytes); its != free.end()) {
          place.offset = its->second;
          free.erase(its);
        } else {
          place.offset = std::exchange(plan_.bytes, plan_.bytes + bytes);
        }
      }
      each_place(i, [&](std::uint32_t used) {
        if (plan_.places[used].tensor || last[used] != i || !placed[used]) return;
        free.emplace(bytes_of(plan_.places[used]), plan_.places[used].offset);
        placed[used] = false;  // an operand may stand there twice
      });
    }
  }

  /// What is made of a place for loops that want it otherwise.
  enum class Derived : std::uint8_t { wide, full, rows };

  /// What is for each row, or one for all, is the same beside rows of any length.
  std::int64_t columns_of(Lies how) const { return how == Lies::row || how == Lies::number ? 0 : columns_; }
  std::tuple<std::uint32_t, Derived, std::int64_t> key(std::uint32_t place, Derived how) const {
    return {place, how, how == Derived::wide ? columns_of(lies(place)) : columns_};
  }

  const Region& region_;
  RegionPlan& plan_;
  bool rows_ = false;  // tiles have whole rows
  // Of the member that is added.
  ops::RowSpace space_;
  std::int64_t columns_ = 0;  // 0: those of the region
  bool short_rows_ = false;
  std::int64_t most_columns_ = 1;                     // of a member
  std::vector<DType> dtypes_;                         // of values
  std::vector<std::optional<std::uint32_t>> values_;  // places
  std::vector<DType> place_dtypes_;
  std::vector<std::uint32_t> pending_;  // buffers that stay from tile to tile
  std::map<std::tuple<std::uint32_t, Lies, std::int64_t, std::vector<std::pair<std::int64_t, std::int64_t>>>,
           std::uint32_t>
      inputs_;  // of so many columns, and rows that lie so
  std::map<std::tuple<std::uint32_t, Derived, std::int64_t>, std::uint32_t> derived_;
};

}  // namespace

RegionPlan::RegionPlan(const ops::Region& region) { Planning(region, *this).run(); }

}  // namespace sherd::cpu
