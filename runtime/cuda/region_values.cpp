#include "runtime/cuda/region_values.h"

#include <algorithm>
#include <utility>

#include "runtime/cuda/fold_sizes.h"
#include "runtime/cuda/region_source.h"
#include "runtime/ops/copy.h"

namespace sherd::cuda {
namespace {

using ops::Lies;
using ops::Region;
using ops::RowPart;
using ops::RowSpace;

constexpr std::int64_t threads = 256, warp = 32;
// Values at other columns are lines of their own, twice as many with every part that is made of parts.
constexpr std::size_t most_lines = 400;
constexpr std::int64_t most_pieces = 4;  // of a row that is summed

}  // namespace

std::string_view type_of(DType d) {
  switch (d) {
    case DType::f64:
      return "double";
    case DType::f32:
      return "float";
    case DType::f16:
      return "Half";
    case DType::bf16:
      return "BFloat16";
    case DType::i64:
      return "std::int64_t";
    case DType::i32:
      return "std::int32_t";
    case DType::u8:
      return "std::uint8_t";
    case DType::boolean:
      return "bool";
  }
  return {};
}

RegionValues::RegionValues(const Region& region) : region_(region), inputs_(region.inputs.size()) {}

bool RegionValues::look() {
  for (const Region::Member& member : region_.members)
    if (!look_at(member)) return false;
  if (!find_stores()) return false;
  for (const Store& store : stores_) need(store.member);
  return possible_;
}

DType RegionValues::dtype_of(std::uint32_t value) const {
  return value < inputs_ ? region_.inputs[value].first : region_.members[value - inputs_].result.dtype;
}

bool RegionValues::look_at(const Region::Member& member) {
  Info& info = infos_.emplace_back();
  for (const Region::Operand& operand : member.in) info.shapes.push_back(operand.layout.shape);
  info.sum = ops::row_sum(*member.op, info.shapes[0], dtype_of(member.in[0].value));
  const bool of_rows = info.sum != nullptr;
  if (!of_rows) info.sum = ops::column_sum(*member.op, info.shapes[0], dtype_of(member.in[0].value));
  info.parts = ops::row_parts(*member.op, info.shapes);
  const KernelRow* const row = &member.op->kernels();
  if (info.sum != nullptr) {
    info.over = of_rows ? Lies::row : Lies::column;
    info.space = ops::space_of_member(region_.space, info.shapes[0]).value();
    by_rows_ = true;
  } else {
    info.space = ops::space_of_member(region_.space, member.result.shape).value();
    if (info.parts.empty()) {
      std::ranges::fill(info.shapes, member.result.shape);
      info.over = member.result.shape.numel() == info.space.shape.numel() ? Lies::full : Lies::row;
      if (row != &kernel_row<ops::Cast>() && row != &kernel_row<ops::Clone>()) {
        info.functor = functor_source(*member.op);
        if (info.functor.empty()) return false;
      }
    } else {
      reads_across_ = true;
    }
  }
  for (const Region::Operand& operand : member.in)
    if (operand.value >= inputs_) {
      const Info& maker = infos_[operand.value - inputs_];
      const bool is_part = maker.over == Lies::full && !shows_all(operand, maker);
      if (is_part && info.over == Lies::row) return false;  // an element of a row that a loop makes
      reads_across_ = reads_across_ || is_part;
    }
  if (member.writes()) writers_[member.in[0].value].push_back(infos_.size() - 1);
  return true;
}

bool RegionValues::shows_all(const Region::Operand& operand, const Info& maker) const {
  return operand.layout.shape.numel() == region_.space.rows() * maker.columns();
}

RegionValues::Source RegionValues::resolve(std::uint32_t value, std::size_t before) const {
  if (const auto its = writers_.find(value); its != writers_.end())
    for (auto w = its->second.rbegin(); w != its->second.rend(); ++w)
      if (*w < before) return {false, *w};
  return value < inputs_ ? Source{true, value} : Source{false, value - inputs_};
}

/// Where threads write what others read, kernels would have to wait for each other's rows.
bool RegionValues::find_stores() {
  std::size_t tensor = inputs_;
  for (std::uint32_t i = 0; i < inputs_; ++i) {
    if (!region_.written[i]) continue;
    const Source of = resolve(i);
    if (infos_[of.number].over != Lies::full) return false;
    stores_.push_back({of.number, i});
    ++tensor;
  }
  const bool writes = !stores_.empty();
  for (const std::uint32_t value : region_.results) stores_.push_back({resolve(value).number, tensor++});
  tensors_ = tensor;
  std::set<std::int64_t> columns;
  for (const Store& store : stores_)
    if (of(store).over == Lies::full) columns.insert(of(store).columns());
  const auto sums_columns = [&](const Store& store) { return of(store).over == Lies::column; };
  by_rows_ = by_rows_ || columns.size() > 1 || std::ranges::any_of(stores_, sums_columns);
  columns_ = columns.empty() ? region_.space.columns() : *columns.begin();
  return !writes || (columns.size() == 1 && !reads_across_);
}

/// Writes the values of whole rows that a member's are made of, where they are not yet, and its own.
void RegionValues::need(std::size_t m) {
  if (!needed_.insert(m).second) return;
  const Region::Member& member = region_.members[m];
  for (const Region::Operand& operand : member.in)
    if (const Source source = resolve(operand.value, m); !source.is_input) need(source.number);
  if (!infos_[m].functor.empty()) lines_.head += fmt::format("const auto f{} = {};\n", m, infos_[m].functor);
  if (infos_[m].over != Lies::row) return;
  if (infos_[m].sum != nullptr) return write_sum(m);
  const std::string value = computed(m, nullptr, {});
  lines_.rows += fmt::format("const {} r{} = {};\n", type_of(member.result.dtype), m, value);
}

void RegionValues::write_sum(std::size_t m) {
  const Region::Member& member = region_.members[m];
  const DType dtype = dtype_of(member.in[0].value);
  const std::int64_t columns = infos_[m].columns(), rows = region_.space.rows();
  const std::int64_t pieces = rows >= rows_without_pieces ? 1 : (columns + piece_length - 1) / piece_length;
  const std::int64_t length = (columns + pieces - 1) / pieces, wide = 16 / size_of(dtype);
  const std::int64_t pack = length % wide == 0 && length >= threads * wide && columns % wide == 0 ? wide : 1;
  if (length > run_length * threads * pack || pieces > most_pieces) return void(possible_ = false);
  longest_ = std::max(longest_, columns);
  Loop loop{columns, pack};
  const std::string value = operand(m, 0, &loop, {});
  const std::string_view run = dtype == DType::f64 ? "double" : "float";
  std::string text = fmt::format("const auto part{} = [&](Index begin, Index end) {{\n", m);
  text += fmt::format("constexpr int V = {}, own = Own < {} ? Own : {};\n", pack,
                      (length + warp * pack - 1) / (warp * pack), (length + warp * pack - 1) / (warp * pack));
  text += "double total[Own] = {};\n#pragma unroll\nfor (int k = 0; k < own; ++k) {\n";
  text += fmt::format("{} run[V] = {{}};\n", run);
  text += "for (Index column = begin + (t + 32 * k) * V; column < end; column += 256 * V) {\n" + loop.loads;
  text += "#pragma unroll\nfor (int j = 0; j < V; ++j) {\n" + loop.body;
  text += fmt::format("run[j] += static_cast<{}>(widen({}));\n}}\n}}\n", run, value);
  text += "#pragma unroll\nfor (int j = 0; j < V; ++j) total[k] += run[j];\n}\n";
  text += fmt::format("return {}sum_of_row(total);\n}};\n", pieces == 1 ? "" : fmt::format("({})", run));
  const auto part = [&](std::int64_t p) {
    return p < pieces ? fmt::format("part{}({}, {})", m, p * length, std::min(columns, (p + 1) * length))
                      : "0.0";
  };
  if (pieces == 1) {
    text += fmt::format("const double s{} = {};\n", m, part(0));
  } else {
    for (std::int64_t p = 0; p < most_pieces; ++p)
      text += fmt::format("const double s{}_{} = {};\n", m, p, part(p));
    text += fmt::format("const double s{0} = (s{0}_0 + s{0}_2) + (s{0}_1 + s{0}_3);\n", m);
  }
  const double divisor = infos_[m].sum->mean ? static_cast<double>(columns) : 1.0;
  text += fmt::format("const {} r{} = static_cast<{}>(static_cast<{}>(s{}) / static_cast<{}>({:a}));\n",
                      type_of(member.result.dtype), m, type_of(member.result.dtype), run, m, run, divisor);
  lines_.rows += text;
}

/// A value of member `m`, from its operands at `column`; without a loop, of a row.
std::string RegionValues::computed(std::size_t m, Loop* loop, const Column& column) {
  const Region::Member& member = region_.members[m];
  std::string in;
  for (std::size_t k = 0; k < member.in.size(); ++k)
    in += fmt::format("{}{}", k == 0 ? "" : ", ", operand(m, k, loop, column));
  const std::string_view type = type_of(member.result.dtype);
  if (infos_[m].functor.empty()) return fmt::format("cast<{}>({})", type, in);
  return fmt::format("call<{}>(f{}, {})", type, m, in);
}

std::string RegionValues::operand(std::size_t m, std::size_t k, Loop* loop, const Column& column) {
  const Region::Operand& operand = region_.members[m].in[k];
  const Source source = resolve(operand.value, m);
  if (source.is_input) return input(source.number, infos_[m].shapes[k], loop, column);
  const Info& maker = infos_[source.number];
  if (maker.over == Lies::row) return fmt::format("r{}", source.number);
  if (operand.value < inputs_ || shows_all(operand, maker)) return full(source.number, *loop, column);
  const RowPart part = ops::row_part({infos_[m].shapes[k]}, operand.layout, maker.columns()).value();
  return full(source.number, *loop, moved(*loop, column, part.first, part.step));
}

/// Column `first` + `step` times that.
RegionValues::Column RegionValues::moved(Loop& loop, const Column& column, std::int64_t first,
                                         std::int64_t step) {
  reads_columns_ = true;
  if (column.packed && step == 1 && first % loop.pack == 0)
    return {fmt::format("({} + {})", column.base, first)};
  return named(loop, fmt::format("{} + {} * {}", first, step, column.of_element()));
}
/// Where the part that begins at `first` has that column of what is put together.
RegionValues::Column RegionValues::back(Loop& loop, const Column& column, const RowPart& part,
                                        std::int64_t width) {
  if (column.packed && part.step == 1 && part.first % loop.pack == 0 && width % loop.pack == 0)
    return {fmt::format("({} - {})", column.base, part.first)};
  return named(loop, fmt::format("({} - {}) / {}", column.of_element(), part.first, part.step));
}
RegionValues::Column RegionValues::named(Loop& loop, const std::string& expression) {
  const auto [known, is_new] = loop.names.try_emplace("column " + expression, "");
  if (is_new) {
    known->second = fmt::format("c{}", counter_++);
    loop.body += fmt::format("const Index {} = {};\n", known->second, expression);
  }
  return {known->second, false};
}

std::string RegionValues::full(std::size_t m, Loop& loop, const Column& column) {
  const std::string key = fmt::format("v{} {}", m, column.base);
  if (const auto known = loop.names.find(key); known != loop.names.end()) return known->second;
  const std::string name = fmt::format("v{}_{}", m, counter_++);
  const std::string_view type = type_of(region_.members[m].result.dtype);
  lines_.count += 1 + infos_[m].parts.size();
  if (lines_.count > most_lines) possible_ = false;
  if (!possible_) return name;
  if (infos_[m].parts.empty()) {
    const std::string value = computed(m, &loop, column);
    loop.body += fmt::format("const {} {} = {};\n", type, name, value);
  } else {
    put_together(m, loop, column, name);
  }
  return loop.names[key] = name;
}

void RegionValues::put_together(std::size_t m, Loop& loop, const Column& column, const std::string& name) {
  const Info& info = infos_[m];
  reads_columns_ = true;
  loop.body += fmt::format("{} {}{{}};\n", type_of(region_.members[m].result.dtype), name);
  for (std::size_t k = 0; k < info.parts.size(); ++k) {
    const auto [first, step] = info.parts[k];
    const std::int64_t width = info.shapes[k].back(), last = first + (width - 1) * step;
    const auto outside = loop.names;
    const std::string around = loop.guard;
    const auto is_inside = [&](const std::string& at) {
      return fmt::format("{0} >= {1} && {0} <= {2} && ({0} - {1}) % {3} == 0", at, first, last, step);
    };
    Loop inner{loop.columns, loop.pack, {}, {}, around, outside};
    const Column part = back(inner, column, {first, step}, width);
    const std::string condition = is_inside(part.packed ? column.base : column.of_element());
    if (part.packed) inner.guard = around.empty() ? condition : around + " && " + condition;
    const std::string value = operand(m, k, &inner, part);
    loop.loads += inner.loads;
    loop.body += fmt::format("if ({}) {{\n{}{} = {};\n}}\n", condition, inner.body, name, value);
  }
}

/// An input, as it lies over the space that `shape` is of.
std::string RegionValues::input(std::size_t i, const Shape& shape, Loop* loop, const Column& column) {
  const auto& [dtype, layout] = region_.inputs[i];
  const RowSpace space = ops::space_of_member(region_.space, shape).value();
  const Lies lies = ops::lies_over(space, layout, shape).value();
  const std::string_view type = type_of(dtype);
  if (i == given_) {
    if (lies != Lies::full || !column.own() || by_rows_ || space.columns() != columns_) possible_ = false;
    return "product";
  }
  pointer(i, dtype);
  if (lies == Lies::number || lies == Lies::row) {
    const bool one = lies == Lies::number;
    const std::string name = fmt::format("{}{}", one ? "n" : "w", i);
    if (!one) reads_rows_ = true;
    if (lines_.loaded.insert(name).second)
      lines_.rows += fmt::format("const {} {} = x{}[{}];\n", type, name, i, one ? "0" : "row");
    return name;
  }
  if (lies == Lies::column) {
    reads_columns_ = true;
    return element(i, type, *loop, column, "", 1, true, &lines_.hoisted);
  }
  if (lies == Lies::apart) {
    reads_rows_ = reads_columns_ = true;
    const Apart at = apart(i, layout, shape, loop->pack);
    return element(i, type, *loop, column, at.offset + " + ", at.step, at.in_packs);
  }
  if (column.own() && !by_rows_ && space.columns() == columns_)
    return element(i, type, *loop, {"i"}, "", 1, true);
  reads_rows_ = reads_columns_ = true;
  return element(i, type, *loop, column, fmt::format("row * {} + ", space.columns()), 1,
                 space.columns() % loop->pack == 0);
}

/// The element of input `i` at `before` and `step` times the column; of a pack that is loaded at once where
/// its columns are `packed`, lie one behind another, and begin where packs may.
std::string RegionValues::element(std::size_t i, std::string_view type, Loop& loop, const Column& column,
                                  const std::string& before, std::int64_t step, bool begins_with_pack,
                                  std::string* hoisted) {
  if (!column.packed || step != 1 || !begins_with_pack)
    return fmt::format("x{}[{}{} * {}]", i, before, column.base == "i" ? "(i + j)" : column.of_element(),
                       step);
  const std::string place = before + column.base;
  const auto [known, is_new] = loop.names.try_emplace(fmt::format("p{} {}", i, place), "");
  if (is_new) {
    known->second = fmt::format("p{}_{}", i, counter_++);
    const std::string pack = fmt::format("Pack<{}, V>", type);
    const std::string load = fmt::format("*reinterpret_cast<const {}*>(x{} + ({}))", pack, i, place);
    std::string& to = hoisted != nullptr && hoists_ && loop.guard.empty() ? *hoisted : loop.loads;
    if (loop.guard.empty())
      to += fmt::format("const {} {} = {};\n", pack, known->second, load);
    else
      to += fmt::format("{0} {1};\nif ({2}) {1} = {3};\n", pack, known->second, loop.guard, load);
  }
  return known->second + ".at[j]";
}

RegionValues::Apart RegionValues::apart(std::size_t i, const Layout& layout, const Shape& shape,
                                        std::int64_t pack) {
  const int extra = shape.rank() - layout.shape.rank();
  const auto step_of = [&](int d) {
    return d < extra || layout.shape[d - extra] == 1 ? 0 : layout.strides[d - extra];
  };
  const int last = shape.rank() - 1;
  Apart at{{}, last >= 0 ? step_of(last) : 0, true};
  std::string text;
  // Dimensions that lie one behind another are one.
  for (int d = last - 1; d >= 0;) {
    std::int64_t size = shape[d];
    const std::int64_t step = step_of(d);
    int next = d - 1;
    for (; next >= 0 && step_of(next) == step * size; --next) size *= shape[next];
    at.in_packs = at.in_packs && step % pack == 0;
    text += next < 0 ? fmt::format("at += rest * {};\n", step)
                     : fmt::format("at += rest % {} * {}; rest /= {};\n", size, step, size);
    d = next;
  }
  const auto [known, is_new] = lines_.offsets.try_emplace({i, text}, "");
  if (is_new) {
    known->second = fmt::format("o{}_{}", i, lines_.offsets.size());
    lines_.rows +=
        fmt::format("Index {0};\n{{\nIndex at = 0, rest = row;\n{1}{0} = at;\n}}\n", known->second, text);
  }
  at.offset = known->second;
  return at;
}

void RegionValues::pointer(std::size_t i, DType dtype) {
  if (!lines_.loaded.insert(fmt::format("x{}", i)).second) return;
  lines_.head +=
      fmt::format("const {0}* const x{1} = static_cast<const {0}*>(given.at[{1}]);\n", type_of(dtype), i);
}

}  // namespace sherd::cuda
