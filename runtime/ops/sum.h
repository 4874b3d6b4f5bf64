// Sums over axes.
#pragma once

#include "runtime/op.h"

namespace sherd::ops {

/// The sum over `axes` (bits), divided by their number for a mean. Integers and bools sum to i64. Kept axes
/// have size 1 if `keep`.
struct Sum {
  static constexpr std::string_view name = "sum";
  static constexpr Reads reads{};
  Mask axes = 0;
  bool keep = false;
  bool mean = false;

  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  void fields(auto&& on) const {
    on("axes", axes);
    on("keep", keep);
    on("mean", mean);
  }
  bool operator==(const Sum&) const = default;
};

}  // namespace sherd::ops
