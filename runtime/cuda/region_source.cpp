#include "runtime/cuda/region_source.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/cuda/fold_sizes.h"
#include "runtime/ops/cat.h"
#include "runtime/ops/copy.h"
#include "runtime/ops/slice.h"

namespace sherd::cuda {
namespace {

using ops::Lies;
using ops::Region;
using ops::RowPart;
using ops::RowSpace;

constexpr std::int64_t threads = 256, warp = 32;
constexpr std::int64_t largest_unit = 64;  // blocks, whose number would hardly be another
// Values at other columns are lines of their own, twice as many with every part that is made of parts.
constexpr std::size_t most_lines = 400;
constexpr std::int64_t longest_of_warp = 1024;  // columns; a block takes longer rows
constexpr std::int64_t most_pieces = 4;         // of a row that is summed

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

/// Columns of a pack: element `j` of it is of column `base` + j, where that is packed, or of `base`.
struct Column {
  std::string base = "column";
  bool packed = true;  ///< `base` is a multiple of the pack
  bool own() const { return packed && base == "column"; }
  std::string of_element() const { return packed ? "(" + base + " + j)" : base; }
};

/// A loop over a row's columns, in packs of `V`, which `pack` is.
struct Loop {
  std::int64_t columns, pack;
  std::string loads{}, body{};
  std::string guard{};                         // under which what is loaded now is there
  std::map<std::string, std::string> names{};  // of values, by what they are and where
};

class Writing {
 public:
  explicit Writing(const Region& region) : region_(region), inputs_(region.inputs.size()) {}

  std::optional<RegionSource> run() {
    for (const Region::Member& member : region_.members)
      if (!look_at(member)) return {};
    if (!find_stores()) return {};
    for (const Store& store : stores_) need(store.of);
    if (!possible_) return {};
    RegionSource source = by_rows_ ? write_rows() : write_flat();
    if (!possible_) return {};
    return source;
  }

 private:
  /// What an operand shows: an input, or what a member made.
  struct Source {
    bool is_input;
    std::size_t number;
  };
  struct Info {
    std::vector<Shape> shapes{};  // of the operands as the member sees them
    RowSpace space{};             // of its result
    Lies over = Lies::full;
    const ops::Sum* sum = nullptr;
    std::vector<RowPart> parts{};
    std::string functor{};  // none: a conversion
    std::int64_t columns() const { return space.columns(); }
  };
  struct Store {
    Source of;
    std::size_t tensor;
  };

  DType dtype_of(std::uint32_t value) const {
    return value < inputs_ ? region_.inputs[value].first : region_.members[value - inputs_].result.dtype;
  }

  bool look_at(const Region::Member& member) {
    Info& info = infos_.emplace_back();
    for (const Region::Operand& operand : member.in) info.shapes.push_back(operand.layout.shape);
    info.sum = ops::row_sum(*member.op, info.shapes[0], dtype_of(member.in[0].value));
    info.parts = ops::row_parts(*member.op, info.shapes);
    const KernelRow* const row = &member.op->kernels();
    if (info.sum != nullptr) {
      info.over = Lies::row;
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

  bool shows_all(const Region::Operand& operand, const Info& maker) const {
    return operand.layout.shape.numel() == region_.space.rows() * maker.columns();
  }

  /// What `value` is for member `before`, or behind all.
  Source resolve(std::uint32_t value, std::size_t before = ~std::size_t{0}) const {
    if (const auto its = writers_.find(value); its != writers_.end())
      for (auto w = its->second.rbegin(); w != its->second.rend(); ++w)
        if (*w < before) return {false, *w};
    return value < inputs_ ? Source{true, value} : Source{false, value - inputs_};
  }

  /// Where threads write what others read, kernels would have to wait for each other's rows.
  bool find_stores() {
    std::size_t tensor = inputs_;
    for (std::uint32_t i = 0; i < inputs_; ++i) {
      if (!region_.written[i]) continue;
      const Source of = resolve(i);
      if (infos_[of.number].over != Lies::full) return false;
      stores_.push_back({of, i});
      ++tensor;
    }
    const bool writes = !stores_.empty();
    for (const std::uint32_t value : region_.results) stores_.push_back({resolve(value), tensor++});
    tensors_ = tensor;
    std::set<std::int64_t> columns;
    for (const Store& store : stores_)
      if (infos_[store.of.number].over == Lies::full) columns.insert(infos_[store.of.number].columns());
    by_rows_ = by_rows_ || columns.size() > 1;
    columns_ = columns.empty() ? region_.space.columns() : *columns.begin();
    return !writes || (columns.size() == 1 && !reads_across_);
  }

  // ---- rows ----

  /// Writes the values of whole rows that `source` is made of, where they are not yet.
  void need(Source source) {
    if (source.is_input || !needed_.insert(source.number).second) return;
    const std::size_t m = source.number;
    const Region::Member& member = region_.members[m];
    for (const Region::Operand& operand : member.in) need(resolve(operand.value, m));
    if (!infos_[m].functor.empty()) head_ += fmt::format("const auto f{} = {};\n", m, infos_[m].functor);
    if (infos_[m].over != Lies::row) return;
    if (infos_[m].sum != nullptr) return write_sum(m);
    const std::string value = computed(m, nullptr, {});
    rows_ += fmt::format("const {} r{} = {};\n", type_of(member.result.dtype), m, value);
  }

  void write_sum(std::size_t m) {
    const Region::Member& member = region_.members[m];
    const DType dtype = dtype_of(member.in[0].value);
    const std::int64_t columns = infos_[m].columns(), rows = region_.space.rows();
    const std::int64_t pieces = rows >= rows_without_pieces ? 1 : (columns + piece_length - 1) / piece_length;
    const std::int64_t length = (columns + pieces - 1) / pieces, wide = 16 / size_of(dtype);
    const std::int64_t pack =
        length % wide == 0 && length >= threads * wide && columns % wide == 0 ? wide : 1;
    if (length > run_length * threads * pack || pieces > most_pieces) return void(possible_ = false);
    longest_ = std::max(longest_, columns);
    Loop loop{columns, pack};
    const std::string value = operand(m, 0, &loop, {});
    const std::string_view run = dtype == DType::f64 ? "double" : "float";
    std::string text = fmt::format("const auto part{} = [&](Index begin, Index end) {{\n", m);
    text +=
        fmt::format("constexpr int V = {}, own = Own < {} ? Own : {};\n", pack,
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
    rows_ += text;
  }

  // ---- values ----

  /// A value of member `m`, from its operands at `column`; without a loop, of a row.
  std::string computed(std::size_t m, Loop* loop, const Column& column) {
    const Region::Member& member = region_.members[m];
    std::string in;
    for (std::size_t k = 0; k < member.in.size(); ++k)
      in += fmt::format("{}{}", k == 0 ? "" : ", ", operand(m, k, loop, column));
    const std::string_view type = type_of(member.result.dtype);
    if (infos_[m].functor.empty()) return fmt::format("cast<{}>({})", type, in);
    return fmt::format("call<{}>(f{}, {})", type, m, in);
  }

  std::string operand(std::size_t m, std::size_t k, Loop* loop, const Column& column) {
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
  Column moved(Loop& loop, const Column& column, std::int64_t first, std::int64_t step) {
    reads_columns_ = true;
    if (column.packed && step == 1 && first % loop.pack == 0)
      return {fmt::format("({} + {})", column.base, first)};
    return named(loop, fmt::format("{} + {} * {}", first, step, column.of_element()));
  }
  /// Where the part that begins at `first` has that column of what is put together.
  Column back(Loop& loop, const Column& column, const RowPart& part, std::int64_t width) {
    if (column.packed && part.step == 1 && part.first % loop.pack == 0 && width % loop.pack == 0)
      return {fmt::format("({} - {})", column.base, part.first)};
    return named(loop, fmt::format("({} - {}) / {}", column.of_element(), part.first, part.step));
  }
  Column named(Loop& loop, const std::string& expression) {
    const auto [known, is_new] = loop.names.try_emplace("column " + expression, "");
    if (is_new) {
      known->second = fmt::format("c{}", counter_++);
      loop.body += fmt::format("const Index {} = {};\n", known->second, expression);
    }
    return {known->second, false};
  }

  /// The element of member `m`'s result.
  std::string full(std::size_t m, Loop& loop, const Column& column) {
    const std::string key = fmt::format("v{} {}", m, column.base);
    if (const auto known = loop.names.find(key); known != loop.names.end()) return known->second;
    const std::string name = fmt::format("v{}_{}", m, counter_++);
    const std::string_view type = type_of(region_.members[m].result.dtype);
    lines_ += 1 + infos_[m].parts.size();
    if (lines_ > most_lines) possible_ = false;
    if (!possible_) return name;
    if (infos_[m].parts.empty()) {
      const std::string value = computed(m, &loop, column);
      loop.body += fmt::format("const {} {} = {};\n", type, name, value);
    } else {
      put_together(m, loop, column, name);
    }
    return loop.names[key] = name;
  }

  void put_together(std::size_t m, Loop& loop, const Column& column, const std::string& name) {
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
  std::string input(std::size_t i, const Shape& shape, Loop* loop, const Column& column) {
    const auto& [dtype, layout] = region_.inputs[i];
    const RowSpace space = ops::space_of_member(region_.space, shape).value();
    const Lies lies = ops::lies_over(space, layout, shape).value();
    const std::string_view type = type_of(dtype);
    pointer(i, dtype);
    if (lies == Lies::number || lies == Lies::row) {
      const bool one = lies == Lies::number;
      const std::string name = fmt::format("{}{}", one ? "n" : "w", i);
      if (!one) reads_rows_ = true;
      if (loaded_.insert(name).second)
        rows_ += fmt::format("const {} {} = x{}[{}];\n", type, name, i, one ? "0" : "row");
      return name;
    }
    if (lies == Lies::column) {
      reads_columns_ = true;
      return element(i, type, *loop, column, "", 1, true, &hoisted_);
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
  std::string element(std::size_t i, std::string_view type, Loop& loop, const Column& column,
                      const std::string& before, std::int64_t step, bool begins_with_pack,
                      std::string* hoisted = nullptr) {
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

  /// Where a pack of a row of so many columns begins.
  std::string position(std::int64_t columns) const {
    return by_rows_ ? fmt::format("row * {} + column", columns) : "i";
  }

  /// Where a row lies of a tensor that does not lie as the space does, and the step from column to column.
  struct Apart {
    std::string offset;
    std::int64_t step;
    bool in_packs;  // rows begin where packs may
  };
  Apart apart(std::size_t i, const Layout& layout, const Shape& shape, std::int64_t pack) {
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
    const auto [known, is_new] = offsets_.try_emplace({i, text}, "");
    if (is_new) {
      known->second = fmt::format("o{}_{}", i, offsets_.size());
      rows_ +=
          fmt::format("Index {0};\n{{\nIndex at = 0, rest = row;\n{1}{0} = at;\n}}\n", known->second, text);
    }
    at.offset = known->second;
    return at;
  }

  void pointer(std::size_t i, DType dtype) {
    if (!loaded_.insert(fmt::format("x{}", i)).second) return;
    head_ +=
        fmt::format("const {0}* const x{1} = static_cast<const {0}*>(given.at[{1}]);\n", type_of(dtype), i);
  }

  // ---- kernels ----

  /// The widest element that packs have in a loop over all results of rows of so many columns; of all inputs,
  /// since nearly all are read by packs.
  std::int64_t widest(std::int64_t columns) const {
    std::int64_t bytes = 1;
    for (const auto& [dtype, layout] : region_.inputs)
      if (layout.shape.numel() >= region_.space.rows()) bytes = std::max(bytes, size_of(dtype));
    for (const Store& store : stores_)
      if (infos_[store.of.number].over == Lies::full && infos_[store.of.number].columns() == columns)
        bytes = std::max(bytes, size_of(region_.members[store.of.number].result.dtype));
    return bytes;
  }
  /// A loop that stores all results of rows of so many columns; `before` and `behind` their packs.
  Loop storing(std::int64_t columns, std::int64_t pack, std::string& before, std::string& behind) {
    Loop loop{columns, pack};
    for (const Store& store : stores_) {
      const Info& info = infos_[store.of.number];
      if (info.over != Lies::full || info.columns() != columns) continue;
      const std::string_view type = type_of(region_.members[store.of.number].result.dtype);
      const std::string value = full(store.of.number, loop, {});
      before += fmt::format("Pack<{}, V> q{};\n", type, store.tensor);
      loop.body += fmt::format("q{}.at[j] = {};\n", store.tensor, value);
      behind +=
          fmt::format("*reinterpret_cast<Pack<{0}, V>*>(static_cast<{0}*>(given.at[{1}]) + ({2})) = q{1};\n",
                      type, store.tensor, position(columns));
    }
    return loop;
  }
  std::string row_stores() const {
    std::string text;
    for (const Store& store : stores_)
      if (infos_[store.of.number].over == Lies::row)
        text += fmt::format("static_cast<{}*>(given.at[{}])[row] = r{};\n",
                            type_of(region_.members[store.of.number].result.dtype), store.tensor,
                            store.of.number);
    return text;
  }
  std::string begin() const {
    return fmt::format(
        "using namespace sherd;\nusing namespace sherd::cuda;\nstruct Given {{ void* at[{}]; std::int64_t "
        "rows; }};\n",
        tensors_);
  }
  static constexpr std::string_view kernel =
      "extern \"C\" __global__ void __launch_bounds__(256) region(const __grid_constant__ Given given) {\n"
      "wait_for_earlier();\n";

  /// Whether all places are below 2^30.
  bool is_small() const {
    const auto fits = [](const Layout& layout) {
      std::int64_t reach = 1;
      for (int d = 0; d < layout.shape.rank(); ++d)
        reach += (layout.shape[d] - 1) * std::max(layout.strides[d], -layout.strides[d]);
      return reach < (std::int64_t{1} << 30);
    };
    std::int64_t most = region_.space.shape.numel();
    for (const Region::Member& member : region_.members) most = std::max(most, member.result.shape.numel());
    return most < (std::int64_t{1} << 30) &&
           std::ranges::all_of(region_.inputs, [&](const auto& input) { return fits(input.second); });
  }
  std::string index_type() const {
    return fmt::format("using Index = {};\n", is_small() ? "int" : "std::int64_t");
  }

  RegionSource write_flat() {
    const std::string head = head_, rows = rows_;
    const auto loaded = loaded_;
    const auto offsets = offsets_;
    const auto write = [&](std::int64_t size, bool hoists) {
      head_ = head, rows_ = rows, loaded_ = loaded, offsets_ = offsets, hoists_ = hoists;
      lines_ = 0;
      before_ = behind_ = hoisted_ = {};
      return storing(columns_, size, before_, behind_);
    };
    // Whether rows and columns matter shows when it is written.
    std::int64_t pack = 16 / widest(columns_);
    Loop loop = write(pack, true);
    const auto places = [&] { return reads_rows_ || reads_columns_ || !row_stores().empty(); };
    while (pack > 1 && places() && columns_ % pack != 0) loop = write(pack /= 2, true);
    // With as many elements at a time as are whole rows a thread stays at its columns.
    const std::int64_t unit = columns_ / std::gcd(columns_, threads * pack);
    const bool stays = !hoisted_.empty() && unit <= largest_unit;
    if (!hoisted_.empty() && !stays) loop = write(pack, false);
    const std::string elements = loop.loads + before_ + "#pragma unroll\nfor (int j = 0; j < V; ++j) {\n" +
                                 loop.body + "}\n" + behind_;
    const std::string of_rows = row_stores().empty() ? "" : "if (column == 0) {\n" + row_stores() + "}\n";
    std::string text = begin() + index_type();
    if (stays) {
      text += kernel;
      text += fmt::format("constexpr int V = {};\n", pack) + head_;
      text += fmt::format(
          "const Index n = static_cast<Index>(given.rows * {0}), first = (blockIdx.x * Index(256) + "
          "threadIdx.x) * V, column = first % {0};\n",
          columns_);
      text += hoisted_ + "for (Index i = first; i < n; i += gridDim.x * Index(256) * V) {\n";
      text += fmt::format("[[maybe_unused]] const Index row = i / {};\n", columns_);
      text += rows_ + elements + of_rows + "}\n}\n";
      return {std::move(text), 1, false, pack, unit};
    }
    text += "template <int V>\n__device__ __forceinline__ void step(const Given& given, Index i) {\n" + head_;
    if (places()) text += fmt::format("const Index row = i / {0}, column = i - row * {0};\n", columns_);
    text += rows_ + elements + of_rows + "}\n";
    text += kernel;
    text += fmt::format(
        "const Index n = static_cast<Index>(given.rows * {}), first = blockIdx.x * Index(256) + "
        "threadIdx.x;\n"
        "for (Index i = first; i < n / {}; i += gridDim.x * Index(256)) step<{}>(given, i * {});\n",
        columns_, pack, pack, pack);
    if (pack > 1)
      text += fmt::format("if (const Index i = n / {0} * {0} + first; i < n) step<1>(given, i);\n", pack);
    text += "}\n";
    return {std::move(text), 1, false, pack};
  }

  RegionSource write_rows() {
    std::set<std::int64_t> all;
    for (const Store& store : stores_)
      if (infos_[store.of.number].over == Lies::full) all.insert(infos_[store.of.number].columns());
    for (const std::int64_t columns : all) longest_ = std::max(longest_, columns);
    const std::int64_t group = longest_ <= longest_of_warp ? warp : threads;
    std::string loops;
    for (const std::int64_t columns : all) {
      std::int64_t pack = 16 / widest(columns);
      while (pack > 1 && (columns % pack != 0 || group * pack > columns)) pack /= 2;
      before_ = behind_ = {};
      const Loop loop = storing(columns, pack, before_, behind_);
      loops += fmt::format(
          "for (Index column = t * {0}; column < {1}; column += {2}) {{\nconstexpr int V = {0};\n", pack,
          columns, group * pack);
      loops += loop.loads + before_ + "#pragma unroll\nfor (int j = 0; j < V; ++j) {\n" + loop.body + "}\n" +
               behind_ + "}\n";
    }
    const std::string of_rows = row_stores();
    std::string text = begin() + index_type() + fmt::format("constexpr int Own = {};\n", threads / group);
    text += kernel;
    text += head_;
    text += fmt::format("const Index t = threadIdx.x % {};\n", group);
    text += fmt::format(
        "for (Index row = blockIdx.x * Index({0}) + threadIdx.x / {1}; row < given.rows; row += gridDim.x * "
        "Index({0})) {{\n",
        threads / group, group);
    text += rows_ + loops;
    if (!of_rows.empty()) text += "if (t == 0) {\n" + of_rows + "}\n";
    text += "}\n}\n";
    return {std::move(text), threads / group, true, 1};
  }

  const Region& region_;
  std::size_t inputs_, tensors_ = 0;
  std::vector<Info> infos_;
  std::map<std::uint32_t, std::vector<std::size_t>> writers_;  // members, by the value that they write
  std::vector<Store> stores_;
  std::int64_t columns_ = 0;  // of rows that are stored, where they are of one length
  bool by_rows_ = false, reads_across_ = false, possible_ = true;
  bool reads_rows_ = false, reads_columns_ = false;
  std::int64_t longest_ = 1;
  std::set<std::size_t> needed_;  // members
  std::set<std::string> loaded_;  // names outside loops
  std::string head_, rows_;       // before all rows; of a row
  std::map<std::pair<std::size_t, std::string>, std::string>
      offsets_;  // of an input's rows, by how they are found
  bool hoists_ = false;
  std::string hoisted_;          // before the loop of a thread that stays at its columns
  std::string before_, behind_;  // a loop over elements: the packs of results
  int counter_ = 0;
  std::size_t lines_ = 0;
};

}  // namespace

std::optional<RegionSource> region_source(const ops::Region& region) {
  if (region.space.shape.numel() == 0) return {};
  return Writing(region).run();
}

}  // namespace sherd::cuda
