// How a fused region runs on the CPU: instructions over tiles, whose values stay in the nearest caches.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "runtime/cpu/column_sums.h"
#include "runtime/cpu/operands.h"
#include "runtime/cpu/row_sum.h"
#include "runtime/fused_region.h"

namespace sherd::cpu {

/// Where the part of a value that a tile needs is found: in a tensor of the call, or in a buffer of the tile.
struct TilePlace {
  ops::Lies lies;
  std::int64_t columns = 0;  ///< of `full` and `column`, whose rows are shorter or longer; 0: the space's
  std::int64_t size;         ///< bytes of an element
  std::optional<std::uint32_t> tensor;  ///< of the inputs, then the outputs, then the sums of columns
  std::int64_t offset = 0;              ///< of a buffer, in the tile's memory
  std::vector<std::pair<std::int64_t, std::int64_t>>
      rows{};                             ///< of `apart`: sizes and steps, the outermost first
  std::optional<std::uint32_t> within{};  ///< of `apart`: another place, of whose rows it is a part
  std::int64_t first = 0;                 ///< of that part: its first column there
  std::int64_t step = 1;                  ///< of `apart`, from column to column
};

/// One loop of a tile.
struct TileInstruction {
  enum class Does : std::uint8_t { loop, spread, sum, add_to_columns, clear, put } does = Does::loop;
  ops::Lies over =
      ops::Lies::full;       ///< what its result is for: each element, row or column of the tile, or one
  std::int64_t columns = 0;  ///< as of its place
  std::int64_t first = 0;    ///< of `put`: where in the result's rows, in steps of `steps[0]`
  bool by_row = false;       ///< a call for each row of the tile
  sherd::detail::Row row = nullptr;
  SumOfRow sum = nullptr;
  double divisor = 1;
  decltype(SumOfColumns::add) add = nullptr;  ///< of `add_to_columns`, for all rows of the tile
  alignas(sherd::detail::functor_alignment) std::array<std::byte, sherd::detail::largest_functor> functor{};
  int count = 0;  ///< of operands, the result first
  std::array<std::uint32_t, sherd::detail::Operands::most> places{};
  std::array<std::int64_t, sherd::detail::Operands::most> steps{};  ///< as `Row` takes them
};

/// A sum of columns: each task has sums of its own run of rows, a tensor that the instructions add to.
struct PlannedColumnSum {
  SumOfColumns sum;
  std::uint32_t out;  ///< the tensor
  double divisor;
};

struct RegionPlan {
  std::int64_t rows = 0, columns = 0;            ///< of the space, or all of it as one row
  std::int64_t tile_rows = 0, tile_columns = 0;  ///< several rows only where they are whole
  std::int64_t bytes = 0;                        ///< of a tile's memory
  std::vector<TilePlace> places;
  std::vector<TileInstruction> instructions;
  std::vector<PlannedColumnSum> column_sums{};
  std::optional<RowRuns> runs{};  ///< of the sums of columns; tiles end where they do
  bool complete = true;  ///< false where a functor cannot be copied: the members run one after the other

  explicit RegionPlan(const ops::Region& region);
};

}  // namespace sherd::cpu
