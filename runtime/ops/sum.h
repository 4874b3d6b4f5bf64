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

/// The sum of |x|^power, 1 or 2, over `axes`, in f64: f32 holds no squares of its larger half.
struct PowerSum {
  static constexpr std::string_view name = "power_sum";
  static constexpr Reads reads{.inputs = 1};
  Mask axes = 0;
  bool keep = false;
  int power = 2;

  Specs infer(SpecSpan in) const;
  Tensors reference(Inputs in) const;
  Tensors grad(const GradArgs& args) const;
  void fields(auto&& on) const {
    on("axes", axes);
    on("keep", keep);
    on("power", power);
  }
  bool operator==(const PowerSum&) const = default;
};

/// log(sum(e^x)) over `axes`, in the compute dtype.
struct LogSumExp {
  static constexpr std::string_view name = "logsumexp";
  static constexpr Reads reads{.inputs = 1, .outputs = 1};
  Mask axes = 0;
  bool keep = false;

  Specs infer(SpecSpan in) const;
  Tensors reference(Inputs in) const;
  Tensors grad(const GradArgs& args) const;
  void fields(auto&& on) const {
    on("axes", axes);
    on("keep", keep);
  }
  bool operator==(const LogSumExp&) const = default;
};

/// Axes as bits; none means all. ValueError for one that is named twice.
Mask axes_of(std::string_view op, const Tensor& x, const Shape& axes);

}  // namespace sherd::ops
