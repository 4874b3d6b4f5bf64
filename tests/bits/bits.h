// The bits of everything that the library's own kernels compute, as digests that are the same on every
// processor.
#pragma once

#include <set>
#include <string>
#include <vector>

namespace sherd::test {

/// What was computed, in one line with a digest for each dtype.
struct BitsLine {
  std::string name, digests;
};

/// All lines: each elementwise op and its gradients, each case of the other ops and its gradients, casts,
/// random numbers and steps of optimizers. Left out is what runs an op of `products`.
std::vector<BitsLine> all_bits();

/// Ops of which matrix products are a part: those are Eigen's or oneDNN's, which promise no bits.
const std::set<std::string>& products();

/// The names of the ops that `all_bits` ran, those beside a product too.
const std::set<std::string>& ops_in_bits();

}  // namespace sherd::test
