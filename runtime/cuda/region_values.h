// The values of a fused region as lines of CUDA source: how an element of each comes of others.
#pragma once

#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/fused_region.h"

namespace sherd::cuda {

/// The name of its elements' type.
std::string_view type_of(DType d);

/// Writes lines for the values that a kernel stores, and for those that these are made of.
class RegionValues {
 public:
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
  /// What an operand shows: an input, or what a member made.
  struct Source {
    bool is_input;
    std::size_t number;
  };
  /// Of a member.
  struct Info {
    std::vector<Shape> shapes{};  ///< of the operands as the member sees them
    ops::RowSpace space{};        ///< of its result
    ops::Lies over = ops::Lies::full;
    const ops::Sum* sum = nullptr;  ///< of rows, or of columns
    std::vector<ops::RowPart> parts{};
    std::string functor{};  ///< none: a conversion
    std::int64_t columns() const { return space.columns(); }
  };
  /// A value that is stored, always of a member.
  struct Store {
    std::size_t member;
    std::size_t tensor;
  };
  /// What is written outside loops over columns.
  struct Lines {
    std::string head, rows;        ///< before all rows; of a row
    std::string hoisted;           ///< of a thread that stays at its columns
    std::set<std::string> loaded;  ///< names
    std::map<std::pair<std::size_t, std::string>, std::string>
        offsets;            ///< of an input's rows, by how they are found
    std::size_t count = 0;  ///< lines of values, those in loops too
  };

  explicit RegionValues(const ops::Region& region);
  /// Looks at all members, and writes what is for each row; false where kernels do not come in the shape of
  /// such a region.
  bool look();
  const Info& of(const Store& store) const { return infos_[store.member]; }
  DType dtype_of(const Store& store) const { return region_.members[store.member].result.dtype; }
  const std::vector<Store>& stores() const { return stores_; }
  std::size_t tensors() const { return tensors_; }
  /// False once lines were too many.
  bool possible() const { return possible_; }
  /// Whether a group of threads takes whole rows; otherwise all that is stored has `columns()`.
  bool by_rows() const { return by_rows_; }
  std::int64_t columns() const { return columns_; }
  /// Columns of the longest rows that are summed.
  std::int64_t longest_sum() const { return longest_; }
  /// Whether what is written so far asks at which row and column it is.
  bool asks_place() const { return reads_rows_ || reads_columns_; }
  /// Input `i` is a value that the thread has, named `product`: all elements are at the thread's own place.
  void give(std::size_t i) { given_ = i; }
  /// Whether what is for each column is loaded before all rows.
  void hoist(bool does) { hoists_ = does; }

  /// The element of a member's result at a column of a loop over elements.
  std::string full(std::size_t member, Loop& loop, const Column& column);
  /// Of what a sum of columns sums.
  std::string summed(const Store& store, Loop& loop) { return operand(store.member, 0, &loop, {}); }
  DType dtype_of_summed(const Store& store) const {
    return dtype_of(region_.members[store.member].in[0].value);
  }

  const Lines& lines() const { return lines_; }
  void set_lines(Lines lines) { lines_ = std::move(lines); }

 private:
  DType dtype_of(std::uint32_t value) const;
  bool look_at(const ops::Region::Member& member);
  bool shows_all(const ops::Region::Operand& operand, const Info& maker) const;
  /// What `value` is for member `before`, or behind all.
  Source resolve(std::uint32_t value, std::size_t before = ~std::size_t{0}) const;
  bool find_stores();
  void need(std::size_t m);
  void write_sum(std::size_t m);
  std::string computed(std::size_t m, Loop* loop, const Column& column);
  std::string operand(std::size_t m, std::size_t k, Loop* loop, const Column& column);
  Column moved(Loop& loop, const Column& column, std::int64_t first, std::int64_t step);
  Column back(Loop& loop, const Column& column, const ops::RowPart& part, std::int64_t width);
  Column named(Loop& loop, const std::string& expression);
  void put_together(std::size_t m, Loop& loop, const Column& column, const std::string& name);
  std::string input(std::size_t i, const Shape& shape, Loop* loop, const Column& column);
  std::string element(std::size_t i, std::string_view type, Loop& loop, const Column& column,
                      const std::string& before, std::int64_t step, bool begins_with_pack,
                      std::string* hoisted = nullptr);
  /// Where a row lies of a tensor that does not lie as the space does, and the step from column to column.
  struct Apart {
    std::string offset;
    std::int64_t step;
    bool in_packs;  // rows begin where packs may
  };
  Apart apart(std::size_t i, const Layout& layout, const Shape& shape, std::int64_t pack);
  void pointer(std::size_t i, DType dtype);

  const ops::Region& region_;
  std::size_t inputs_, tensors_ = 0;
  std::size_t given_ = ~std::size_t{0};
  std::vector<Info> infos_;
  std::map<std::uint32_t, std::vector<std::size_t>> writers_;  // members, by the value that they write
  std::vector<Store> stores_;
  std::int64_t columns_ = 0;  // of rows that are stored, where they are of one length
  bool by_rows_ = false, reads_across_ = false, possible_ = true;
  bool reads_rows_ = false, reads_columns_ = false, hoists_ = false;
  std::int64_t longest_ = 1;
  std::set<std::size_t> needed_;  // members
  Lines lines_;
  int counter_ = 0;
};

}  // namespace sherd::cuda
