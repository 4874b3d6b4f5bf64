#include "runtime/cuda/region_source.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <string_view>
#include <utility>

#include "runtime/cuda/fold_sizes.h"
#include "runtime/cuda/kernels.h"
#include "runtime/cuda/region_values.h"

namespace sherd::cuda {
namespace {

using ops::Lies;
using ops::Region;
using Loop = RegionValues::Loop;
using Store = RegionValues::Store;

constexpr std::int64_t threads = 256, warp = 32;
constexpr std::int64_t largest_unit = 64;       // blocks, whose number would hardly be another
constexpr std::int64_t longest_of_warp = 1024;  // columns; a block takes longer rows

std::string_view type_of_sum(DType d) { return d == DType::f64 ? "double" : "float"; }

/// What stands in a loop over elements: the values, before them the packs of results, behind them the stores.
struct Elements {
  Loop loop;
  std::string before{}, behind{};

  std::string text() const {
    return loop.loads + before + "#pragma unroll\nfor (int j = 0; j < V; ++j) {\n" + loop.body + "}\n" +
           behind;
  }
};

class Writing {
 public:
  explicit Writing(const Region& region) : region_(region), values_(region) {}

  /// Of elements that the threads of a product have.
  std::optional<RegionSource> run_behind(const ops::ProductRegion& product) {
    values_.give(product.result);
    if (!values_.look() || values_.by_rows()) return {};
    RegionSource source = write_product(type_of(product.of_result().first));
    if (!values_.possible()) return {};
    return source;
  }

  std::optional<RegionSource> run() {
    if (!values_.look()) return {};
    for (const Store& store : values_.stores())
      if (values_.of(store).over == Lies::column) column_sums_.push_back(store);
    RegionSource source = values_.by_rows() ? write_rows() : write_flat();
    if (!values_.possible()) return {};
    return source;
  }

 private:
  /// Where a pack of a row of so many columns begins.
  std::string position(std::int64_t columns) const {
    return values_.by_rows() ? fmt::format("row * {} + column", columns) : "i";
  }
  bool has_columns(const Store& store, std::int64_t columns) const {
    return values_.of(store).over == Lies::full && values_.of(store).columns() == columns;
  }

  /// The widest element that packs have in a loop over all results of rows of so many columns; of all inputs,
  /// since nearly all are read by packs.
  std::int64_t widest(std::int64_t columns) const {
    std::int64_t bytes = 1;
    for (const auto& [dtype, layout] : region_.inputs)
      if (layout.shape.numel() >= region_.space.rows()) bytes = std::max(bytes, size_of(dtype));
    for (const Store& store : values_.stores())
      if (has_columns(store, columns)) bytes = std::max(bytes, size_of(values_.dtype_of(store)));
    return bytes;
  }
  /// The elements of all results of rows of so many columns.
  Elements storing(std::int64_t columns, std::int64_t pack) {
    Elements all{Loop{columns, pack}};
    for (const Store& store : values_.stores()) {
      if (!has_columns(store, columns)) continue;
      const std::string_view type = type_of(values_.dtype_of(store));
      const std::string value = values_.full(store.member, all.loop, {});
      all.before += fmt::format("Pack<{}, V> q{};\n", type, store.tensor);
      all.loop.body += fmt::format("q{}.at[j] = {};\n", store.tensor, value);
      all.behind +=
          fmt::format("*reinterpret_cast<Pack<{0}, V>*>(static_cast<{0}*>(given.at[{1}]) + ({2})) = q{1};\n",
                      type, store.tensor, position(columns));
    }
    for (const Store& store : column_sums_)
      if (values_.of(store).columns() == columns) {
        const std::string value = values_.summed(store, all.loop);
        all.loop.body += fmt::format("a{}[k * V + j] += static_cast<{}>(widen({}));\n", store.tensor,
                                     type_of_sum(values_.dtype_of_summed(store)), value);
      }
    return all;
  }
  std::string row_stores() const {
    std::string text;
    for (const Store& store : values_.stores())
      if (values_.of(store).over == Lies::row)
        text += fmt::format("static_cast<{}*>(given.at[{}])[row] = r{};\n", type_of(values_.dtype_of(store)),
                            store.tensor, store.member);
    return text;
  }
  std::string begin() const {
    return fmt::format(
        "using namespace sherd;\nusing namespace sherd::cuda;\nstruct Given {{ void* at[{}]; std::int64_t "
        "rows{}; }};\n",
        values_.tensors() + column_sums_.size(),
        column_sums_.empty() ? "" : ", length, lanes_of_piece, lanes");
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
    const std::int64_t columns = values_.columns();
    const RegionValues::Lines of_rows = values_.lines();
    const auto write = [&](std::int64_t size, bool hoists) {
      values_.set_lines(of_rows);
      values_.hoist(hoists);
      return storing(columns, size);
    };
    // Whether rows and columns matter shows when it is written.
    std::int64_t pack = 16 / widest(columns);
    Elements elements = write(pack, true);
    const auto places = [&] { return values_.asks_place() || !row_stores().empty(); };
    while (pack > 1 && places() && columns % pack != 0) elements = write(pack /= 2, true);
    // With as many elements at a time as are whole rows a thread stays at its columns.
    const std::int64_t unit = columns / std::gcd(columns, threads * pack);
    const bool hoists = !values_.lines().hoisted.empty(), stays = hoists && unit <= largest_unit;
    if (hoists && !stays) elements = write(pack, false);
    const auto& [head, rows, hoisted, loaded, offsets, count] = values_.lines();
    const std::string stores = row_stores().empty() ? "" : "if (column == 0) {\n" + row_stores() + "}\n";
    std::string text = begin() + index_type();
    if (stays) {
      text += kernel;
      text += fmt::format("constexpr int V = {};\n", pack) + head;
      text += fmt::format(
          "const Index n = static_cast<Index>(given.rows * {0}), first = (blockIdx.x * Index(256) + "
          "threadIdx.x) * V, column = first % {0};\n",
          columns);
      text += hoisted + "for (Index i = first; i < n; i += gridDim.x * Index(256) * V) {\n";
      text += fmt::format("[[maybe_unused]] const Index row = i / {};\n", columns);
      text += rows + elements.text() + stores + "}\n}\n";
      return {std::move(text), 1, false, pack, unit};
    }
    text += "template <int V>\n__device__ __forceinline__ void step(const Given& given, Index i) {\n" + head;
    if (places()) text += fmt::format("const Index row = i / {0}, column = i - row * {0};\n", columns);
    text += rows + elements.text() + stores + "}\n";
    text += kernel;
    text += fmt::format(
        "const Index n = static_cast<Index>(given.rows * {}), first = blockIdx.x * Index(256) + "
        "threadIdx.x;\n"
        "for (Index i = first; i < n / {}; i += gridDim.x * Index(256)) step<{}>(given, i * {});\n",
        columns, pack, pack, pack);
    if (pack > 1)
      text += fmt::format("if (const Index i = n / {0} * {0} + first; i < n) step<1>(given, i);\n", pack);
    text += "}\n";
    return {std::move(text), 1, false, pack};
  }

  RegionSource write_product(std::string_view type) {
    const std::int64_t columns = values_.columns();
    const Elements elements = storing(columns, 1);
    std::string text = begin() + index_type();
    text +=
        "extern \"C\" __global__ void __launch_bounds__(256) region(const __grid_constant__ Given given, "
        "const __grid_constant__ SmallFactors factors) {\n"
        "wait_for_earlier();\n";
    text += values_.lines().head;
    text += fmt::format(
        "small_product_of<{0}>(factors, 0, [&](std::int64_t r, std::int64_t c, auto element) {{\n"
        "const {0} product = narrow<{0}>(element);\nconstexpr int V = 1;\n"
        "[[maybe_unused]] const Index row = r, column = c, i = row * {1} + column;\n",
        type, columns);
    text += values_.lines().rows + elements.text();
    if (!row_stores().empty()) text += "if (column == 0) {\n" + row_stores() + "}\n";
    text += "});\n}\n";
    return {std::move(text)};
  }

  /// Of all rows that are stored or whose columns are summed.
  std::set<std::int64_t> all_columns() const {
    std::set<std::int64_t> all;
    for (const Store& store : values_.stores())
      if (values_.of(store).over != Lies::row) all.insert(values_.of(store).columns());
    return all;
  }
  std::int64_t pack_of(std::int64_t columns) const {
    std::int64_t pack = 16 / widest(columns);
    while (pack > 1 && (columns % pack != 0 || group_ * pack > columns)) pack /= 2;
    return pack;
  }
  bool sums(std::int64_t columns) const {
    return !column_sums_.empty() && values_.of(column_sums_[0]).columns() == columns;
  }
  /// Packs of a thread that keeps sums of its columns.
  std::int64_t rounds(std::int64_t columns) const { return blocks_of(columns, group_ * pack_of(columns)); }

  /// What threads do with their packs of a row's columns.
  std::string over_columns(std::int64_t columns, const std::string& body) const {
    const std::int64_t pack = pack_of(columns);
    if (!sums(columns))
      return fmt::format(
          "for (Index column = t * {0}; column < {1}; column += {2}) {{\nconstexpr int V = {0};\n{3}}}\n",
          pack, columns, group_ * pack, body);
    return fmt::format(
        "#pragma unroll\nfor (int k = 0; k < {}; ++k) {{\nconstexpr int V = {};\n"
        "const Index column = (t + k * {}) * V;\nif (column < {}) {{\n{}}}\n}}\n",
        rounds(columns), pack, group_, columns, body);
  }
  std::string kept_sums() const {
    std::string text;
    for (const Store& store : column_sums_) {
      const std::int64_t columns = values_.of(store).columns();
      text += fmt::format("{} a{}[{}] = {{}};\n", type_of_sum(values_.dtype_of_summed(store)), store.tensor,
                          rounds(columns) * pack_of(columns));
    }
    return text;
  }
  /// The sums of a lane, behind the tensors.
  std::string stored_sums() const {
    std::string text;
    for (std::size_t i = 0; i < column_sums_.size(); ++i) {
      const Store& store = column_sums_[i];
      const std::int64_t columns = values_.of(store).columns();
      const std::string_view type = type_of_sum(values_.dtype_of_summed(store));
      text += over_columns(
          columns, fmt::format("Pack<{0}, V> sums;\n#pragma unroll\nfor (int j = 0; j < V; ++j) sums.at[j] = "
                               "a{1}[k * V + j];\n*reinterpret_cast<Pack<{0}, V>*>(static_cast<{0}*>("
                               "given.at[{2}]) + (lane * {3} + column)) = sums;\n",
                               type, store.tensor, values_.tensors() + i, columns));
    }
    return text;
  }
  std::string over_rows() const {
    const std::int64_t each = threads / group_;
    if (column_sums_.empty())
      return fmt::format(
          "for (Index row = blockIdx.x * Index({0}) + threadIdx.x / {1}; row < given.rows; "
          "row += gridDim.x * Index({0})) {{\n",
          each, group_);
    return fmt::format(
        "const Index lane = blockIdx.x * Index({0}) + threadIdx.x / {1};\nif (lane >= given.lanes) return;\n"
        "const auto rows = rows_of_lane<{2}, {3}>(lane, given);\n{4}"
        "for (Index row = rows.first; row < rows.end; row += {2}) {{\n",
        each, group_, block_rows, run_length, kept_sums());
  }

  RegionSource write_rows() {
    std::int64_t longest = values_.longest_sum();
    for (const std::int64_t columns : all_columns()) longest = std::max(longest, columns);
    group_ = longest <= (column_sums_.empty() ? longest_of_warp : longest_of_lane) ? warp : threads;
    std::string loops;
    for (const std::int64_t columns : all_columns())
      loops += over_columns(columns, storing(columns, pack_of(columns)).text());
    const std::string of_rows = row_stores();
    std::string text = begin() + index_type() + fmt::format("constexpr int Own = {};\n", threads / group_);
    text += kernel;
    text += values_.lines().head;
    text += fmt::format("const Index t = threadIdx.x % {};\n", group_);
    text += over_rows() + values_.lines().rows + loops;
    if (!of_rows.empty()) text += "if (t == 0) {\n" + of_rows + "}\n";
    text += "}\n" + stored_sums() + "}\n";
    RegionSource source{std::move(text), threads / group_, true, 1};
    for (const Store& store : column_sums_)
      source.column_sums.push_back({store.tensor, values_.of(store).columns(), values_.dtype_of_summed(store),
                                    values_.of(store).sum->mean});
    return source;
  }

  const Region& region_;
  RegionValues values_;
  std::vector<Store> column_sums_;
  std::int64_t group_ = 0;  // threads that take a row
};

}  // namespace

namespace {

/// With what an application's functors need before it.
std::optional<RegionSource> with_headers(const Region& region, std::optional<RegionSource> source) {
  if (!source) return {};
  std::vector<std::string> headers;  // each once
  for (const Region::Member& member : region.members)
    if (std::string text = functor_header(*member.op); std::ranges::find(headers, text) == headers.end())
      headers.push_back(std::move(text));
  for (auto header = headers.rbegin(); header != headers.rend(); ++header) source->text.insert(0, *header);
  return source;
}

}  // namespace

std::optional<RegionSource> region_source(const Region& region) {
  if (region.space.shape.numel() == 0) return {};
  return with_headers(region, Writing(region).run());
}

std::optional<RegionSource> product_region_source(const ops::ProductRegion& product) {
  const Region& region = *product.region;
  if (region.space.shape.numel() == 0 || region.space.columns() != product.of_result().second.shape.back())
    return {};
  return with_headers(region, Writing(region).run_behind(product));
}

}  // namespace sherd::cuda
