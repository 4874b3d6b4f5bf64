// The kernel of a fused region as CUDA source: straight lines over an element of each value, in the functors'
// own code, so that every element has the bits that the ops one by one give it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/fused_product.h"

namespace sherd::cuda {

/// The headers of the library's functors and what kernels are written in: every source begins with it.
const char* region_headers();

/// A sum of columns, of which the kernel makes those of lanes (`ColumnLanes`).
struct LanesOfColumns {
  std::size_t tensor;  ///< of the sum, among inputs and results
  std::int64_t columns;
  DType dtype;  ///< of what is summed
  bool mean;
};

/// Columns of which a warp makes a lane, since a thread keeps a sum for each of its own; a block takes longer
/// rows.
inline constexpr std::int64_t longest_of_lane = 256;

/// A kernel `region(Given)`, where `Given` is a pointer for each input and result of the region, then the
/// number of rows; where columns are summed, first a pointer for each to its sums [lane][column], last
/// `ColumnLanes`' length, lanes of a piece and lanes.
struct RegionSource {
  std::string text;            ///< without `region_headers`
  std::int64_t per_block = 1;  ///< rows that a block takes at once, where it is by rows
  bool by_rows = false;
  std::int64_t pack = 1;       ///< elements that a thread takes at once, where it is not by rows
  std::int64_t grid_unit = 1;  ///< the number of blocks is a multiple of it
  std::vector<LanesOfColumns> column_sums{};  ///< then a block takes `per_block` lanes
};

/// None where a region is of a shape that kernels do not come in: its members then run one by one. All
/// tensors begin at 16 bytes.
std::optional<RegionSource> region_source(const ops::Region& region);

/// The same behind a small product: a kernel `region(Given, SmallFactors)` of blocks of `small_side` by
/// `small_side` threads, where the product's result has no tensor.
std::optional<RegionSource> product_region_source(const ops::ProductRegion& product);

/// The source of a functor of an elementwise op, `sherd::cuda::functor<NAME>(BYTES...)`; empty for an op that
/// nobody told of, and where another kernel was put in its place.
std::string functor_source(const AnyOp& op);
/// What an application's functor needs before it; empty for the library's.
std::string functor_header(const AnyOp& op);

/// Tells of the functors of the library's ops, whose kernels are in the table.
void add_functor_sources();

}  // namespace sherd::cuda
