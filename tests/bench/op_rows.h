// The rows of the table of ops: what each makes of a number of elements and a dtype, and the call that is
// timed. Tensors are made on the rank's default device.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "sherd.h"

namespace sherd::bench {

using List = std::vector<Tensor>;

struct OpRow {
  std::string name;
  std::function<List(std::int64_t n, DType dtype)>
      make;  ///< `n`: elements of the first input, or about as many
  std::function<Tensor(const List&)> call;
  bool gradient = true;
  /// Where the values of an elementwise op lie, of `arity` inputs; 0 for a row that was written by hand.
  int arity = 0;
  double low = 0, high = 0;
};

/// All rows: those written by hand, and one for every elementwise op that none of them is named after.
std::vector<OpRow> op_rows();

}  // namespace sherd::bench
