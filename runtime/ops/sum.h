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

/// The mean of x over `axes`, and the squares of what lies apart from it over their number less `correction`:
/// NaN where nothing is left. Outputs: that variance and the mean, f64.
struct Variance {
  static constexpr std::string_view name = "variance";
  static constexpr Reads reads{.inputs = 1, .outputs = 0b10};
  Mask axes = 0;
  bool keep = false;
  double correction = 1;

  /// What the squares of `n` elements are divided by.
  double left(std::int64_t n) const;
  Specs infer(SpecSpan in) const;
  Tensors reference(Inputs in) const;
  Tensors grad(const GradArgs& args) const;
  void fields(auto&& on) const {
    on("axes", axes);
    on("keep", keep);
    on("correction", correction);
  }
  bool operator==(const Variance&) const = default;
};

/// Inputs: the gradient of the variance, x, the mean. Output: the gradient of x.
struct VarianceGrad {
  static constexpr std::string_view name = "variance_grad";
  static constexpr Arity arity = 3;
  static constexpr Mask dense = 0b111;
  static constexpr bool differentiable = false;
  Variance of;

  Specs infer(SpecSpan in) const { return {in[1]}; }
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const { of.fields(on); }
  bool operator==(const VarianceGrad&) const = default;
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
