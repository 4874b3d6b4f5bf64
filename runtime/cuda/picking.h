// Picking and putting by positions, as calls on plain pointers. Safe to include in device code.
#pragma once

#include <cstdint>

#include "runtime/cuda/faults.h"
#include "runtime/cuda/kernels.h"

namespace sherd::cuda {

/// Where picks, numbered in row-major order, lie in a dense tensor x, in the index and among the values: axes
/// from the innermost on, with their steps in each. A position is worth `x_axis` elements of x.
struct PickWalk {
  static constexpr int most_axes = 8;
  int axes = 0;
  std::int64_t count = 1, columns = 0, x_axis = 1;
  std::int64_t size[most_axes], x_step[most_axes], index_step[most_axes], value_step[most_axes];

  /// One axis more, or a longer one where it goes on in all three.
  void add(std::int64_t n, std::int64_t in_x, std::int64_t in_index, std::int64_t in_values) {
    count *= n;
    if (n == 1) return;
    const int a = axes - 1;
    if (axes > 0 && x_step[a] * size[a] == in_x && index_step[a] * size[a] == in_index &&
        value_step[a] * size[a] == in_values) {
      size[a] *= n;
      return;
    }
    size[axes] = n, x_step[axes] = in_x, index_step[axes] = in_index, value_step[axes] = in_values;
    ++axes;
  }
};

/// What every call here has: the name by which positions outside are reported, and where.
struct ReportingCall {
  const char* name = nullptr;
  FaultSlot faults{};
  cudaStream_t stream = nullptr;
};
struct PositionsCall : ReportingCall {
  const std::int64_t* index = nullptr;
};

/// y[i] = x at pick i, in elements of `bytes` (1, 2, 4, 8 or 16). A position outside of [0, columns) is
/// reported, and gives bytes of 0xff: NaN in floating dtypes.
struct TakeCall : PositionsCall {
  PickWalk picks{};
  std::int64_t bytes = 4;
  const void* x = nullptr;
  void* y = nullptr;
};
void launch_take(const TakeCall& call);

/// The same, but only the last pick of an element (or of slices of a position) gets it; the others get zeros.
/// The last are `last`, or where it is null those of `lines`, dense ones of `line_picks`, which a block
/// finds.
struct TakeLastCall {
  TakeCall call;
  bool slices = false;
  const int* last = nullptr;
  PickWalk lines{};
  std::int64_t line_picks = 0;
};
void launch_take_last(const TakeLastCall& call);

/// Positions of slices that a block has memory for: a table of 2^slot_bits of them, one slot a column where
/// that is few enough, else two slots a position.
struct FewPositions {
  static constexpr std::int64_t most_words = 12288;
  int count = 0, slot_bits = 0;

  /// None where memory is too small.
  static FewPositions of(std::int64_t count, std::int64_t columns) {
    const std::int64_t slots = 2 * count < columns ? 2 * count : columns;
    int bits = 0;
    while (bits < 31 && std::int64_t{1} << bits < slots) ++bits;
    if ((std::int64_t{2} << bits) + count > most_words) return {};
    return {static_cast<int>(count), bits};
  }
};

/// y at pick i = values[i], or values[0] for all if `one_value`; positions outside take no part and are
/// reported. Where positions may repeat, `last` says which pick an element, or of slices a position, takes.
struct ReplaceCall : PositionsCall {
  PickWalk picks{};
  std::int64_t bytes = 4;
  bool slices = false, one_value = false;
  const void* values = nullptr;
  void* y = nullptr;
  const int* last = nullptr;
  PickWalk lines{};             ///< along the axis of the positions, if each is dense and short
  std::int64_t line_picks = 0;  ///< of a line; if not 0, a block finds in its own memory what is last
  FewPositions few{};           ///< of slices: if it has some, each block finds the same by itself
};
/// The same of elements of at most four bytes, with what is last and its value as one number for each element
/// of y, all 0 before: one scattered pass instead of three.
struct ReplacePackedCall {
  ReplaceCall call;
  std::int64_t numel = 0;      ///< of y
  const void* base = nullptr;  ///< what y has elsewhere, null for zeros; its own is left
  unsigned long long* packed = nullptr;
};
void launch_replace_packed(const ReplacePackedCall& call);
/// Columns of a line that a block has memory for.
constexpr std::int64_t most_line_columns = 14336;
void launch_replace(const ReplaceCall& call);

/// numbers[i] = the sum of at[k][i], or of that and size[k] where it is negative, times the sizes after k. Of
/// a position outside [-size[k], size[k]), which is reported, -1.
struct NumbersCall : ReportingCall {
  static constexpr int most_axes = 8;
  int axes = 0;
  std::int64_t count = 0;
  const std::int64_t* at[most_axes];
  std::int64_t size[most_axes];
  std::int64_t* numbers = nullptr;
};
void launch_numbers(const NumbersCall& call);

/// last[d] = the largest number of a pick whose place in x is d; all are -1 before. Reports positions
/// outside.
struct FindLastCall : PositionsCall {
  PickWalk picks{};
  int* last = nullptr;
};
void launch_find_last(const FindLastCall& call);

/// gx = gy, and gvalues at i the element of gy whose last pick i is, which is 0 in gx; `gvalues` are zeros
/// before.
struct SplitLastCall {
  std::int64_t numel = 0, bytes = 4;
  const int* last = nullptr;
  const void* gy = nullptr;
  void *gx = nullptr, *gvalues = nullptr;
  cudaStream_t stream = nullptr;
};
void launch_split_last(const SplitLastCall& call);

/// y at pick i += values[i], in order of i, in a tree that depends on the sizes and on the index alone, or in
/// whole numbers.
/// Positions outside take no part and are reported.
struct AddCall : PositionsCall {
  DType dtype = DType::f32;
  PickWalk picks{}, lines{};  ///< all picks; and the lines of x along the axis of the positions
  std::int64_t line_picks = 0, index_axis = 1,
               value_axis = 1;        ///< of a line: picks, and the steps to the next
  std::int64_t outer = 1, inner = 1;  ///< around the positions of slices
  std::int64_t numel = 0;             ///< of y
  bool slices = false, distinct = false;
  bool based = false;  ///< y has values to add to; else zeros, and nothing where `covers`
  const void* values = nullptr;
  void* y = nullptr;
  const void* base = nullptr;  ///< the values to add to, y's own unless `reads_base`
  void* scratch = nullptr;

  /// How it is done: one for each, where no element is met twice; sums of lines, which fit shared memory;
  /// small floats of few enough elements that whole numbers for all stay in the device's cache; and runs of
  /// picks with one destination, sorted, of elements or of wide slices.
  enum class Way { apart, lines, fixed, runs, wide_runs };
  Way way() const;
  /// Whether all of y is written, so that it need not be zero before.
  bool covers() const {
    return way() == Way::fixed || (way() == Way::lines && lines.count * picks.columns == numel);
  }
  /// Whether what is added to may lie elsewhere than y.
  bool reads_base() const { return way() == Way::fixed; }
  /// Picks that are sorted, and destinations; each less than 2^31.
  std::int64_t sorted() const { return way() == Way::wide_runs ? line_picks : picks.count; }
  std::int64_t destinations() const { return way() == Way::wide_runs ? picks.columns : numel; }
  std::size_t scratch_bytes() const;
};
void launch_add(const AddCall& call);
/// The same in `Way::fixed`.
void launch_add_fixed(const AddCall& call);

}  // namespace sherd::cuda
