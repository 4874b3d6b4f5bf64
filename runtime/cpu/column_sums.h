// Sums over all axes but the last, of rows that are made a few at a time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/dtype.h"

namespace sherd::cpu {

/// The rows of such a sum in the runs that `sum` adds up, each by itself and in the order of its rows.
class RowRuns {
 public:
  struct Run {
    std::int64_t first, rows;
  };
  /// A run has no more rows, which are added up so many at a time: whoever adds parts of a run adds
  /// multiples.
  static constexpr std::int64_t longest = 64, together = 4;

  RowRuns(std::int64_t rows, std::int64_t columns);
  std::int64_t columns() const { return columns_; }
  std::int64_t count() const { return (chunks() - 1) * per_chunk_ + runs_of(rows_in(chunks() - 1)); }
  Run at(std::int64_t i) const;
  /// The sums of runs are added up to sums of chunks, these to the result.
  std::int64_t chunks() const { return (rows_ + chunk_ - 1) / chunk_; }
  std::int64_t rows_in(std::int64_t chunk) const;
  /// The number of a chunk's first run.
  std::int64_t first_of(std::int64_t chunk) const { return chunk * per_chunk_; }

 private:
  static std::int64_t runs_of(std::int64_t rows) { return (rows + longest - 1) / longest; }

  std::int64_t rows_, columns_, chunk_, per_chunk_;
};

/// Rows of a run from `first` on, of `run` in all: two at an even place, or all or a multiple of those
/// together.
struct PartOfRun {
  std::int64_t first, rows, run;
};

/// To the bit what `sum` gives.
struct SumOfColumns {
  std::int64_t size;  ///< bytes of what a column is added up in
  /// Adds the next rows of a run, one behind another, to `sums`; `pending` stays between the parts of a run.
  void (*add)(const std::byte* x, PartOfRun part, std::int64_t columns, std::byte* pending, std::byte* sums);
  /// Writes to `out` what the sums of all runs, [run][column], come to over `divisor`.
  void (*join)(const RowRuns& runs, const std::byte* sums, double divisor, std::byte* out);
};
SumOfColumns sum_of_columns(DType dtype);

}  // namespace sherd::cpu
