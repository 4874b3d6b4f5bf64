// Sums over axes.
#pragma once

#include "runtime/op.h"

namespace sherd {
enum class Keep;

namespace ops {

/// What every op that reduces axes says: those of `axes` (bits), which stay with size 1 if `keep`.
struct OverAxes {
  Mask axes = 0;
  bool keep = false;

  /// What is left of `x`, in `dtype`.
  Spec reduced(const Spec& x, DType dtype) const;
  /// The same of floats (DTypeError).
  Spec reduced_floats(std::string_view op, const Spec& x, DType dtype) const;
  void fields(auto&& on) const {
    on("axes", axes);
    on("keep", keep);
  }
  bool operator==(const OverAxes&) const = default;
};

/// The sum over `axes`, divided by their number for a mean. Integers and bools sum to i64.
struct Sum : OverAxes {
  static constexpr std::string_view name = "sum";
  static constexpr Reads reads{};
  bool mean = false;

  Specs infer(SpecSpan in) const;
  Tensors grad(const GradArgs& args) const;
  void fields(auto&& on) const {
    OverAxes::fields(on);
    on("mean", mean);
  }
  bool operator==(const Sum&) const = default;
};

/// The sum of |x|^power, 1 or 2, over `axes`, in f64: f32 holds no squares of its larger half.
struct PowerSum : OverAxes {
  static constexpr std::string_view name = "power_sum";
  static constexpr Reads reads{.inputs = 1};
  int power = 2;

  Specs infer(SpecSpan in) const;
  Tensors reference(Inputs in) const;
  Tensors grad(const GradArgs& args) const;
  void fields(auto&& on) const {
    OverAxes::fields(on);
    on("power", power);
  }
  bool operator==(const PowerSum&) const = default;
};

/// The sum of |x| over `axes`, or the root of that of x^2: `power` 1 or 2. Outputs: that, and the same in
/// f64, which the gradient reads.
struct Norm : OverAxes {
  static constexpr std::string_view name = "norm";
  static constexpr Reads reads{.inputs = 1, .outputs = 0b10};
  int power = 2;

  Specs infer(SpecSpan in) const;
  Tensors reference(Inputs in) const;
  Tensors grad(const GradArgs& args) const;
  void fields(auto&& on) const {
    OverAxes::fields(on);
    on("power", power);
  }
  bool operator==(const Norm&) const = default;
};

/// The mean of x over `axes`, and the squares of what lies apart from it over their number less `correction`:
/// NaN where nothing is left. Outputs: that variance and the mean, f64.
struct Variance : OverAxes {
  static constexpr std::string_view name = "variance";
  static constexpr Reads reads{.inputs = 1, .outputs = 0b10};
  double correction = 1;

  /// What the squares of `n` elements are divided by.
  double left(std::int64_t n) const;
  Specs infer(SpecSpan in) const;
  Tensors reference(Inputs in) const;
  Tensors grad(const GradArgs& args) const;
  void fields(auto&& on) const {
    OverAxes::fields(on);
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

/// A variance, or its root if `root`. Outputs: that, and what the gradient reads, the same in f64 and the
/// mean.
struct Spread {
  static constexpr std::string_view name = "spread";
  static constexpr Reads reads{.inputs = 1, .outputs = 0b110};
  Variance of;
  bool root = false;

  Specs infer(SpecSpan in) const;
  Tensors reference(Inputs in) const;
  Tensors grad(const GradArgs& args) const;
  void fields(auto&& on) const {
    of.fields(on);
    on("root", root);
  }
  bool operator==(const Spread&) const = default;
};

/// log(sum(e^x)) over `axes`, in the compute dtype.
struct LogSumExp : OverAxes {
  static constexpr std::string_view name = "logsumexp";
  static constexpr Reads reads{.inputs = 1, .outputs = 1};

  Specs infer(SpecSpan in) const;
  Tensors reference(Inputs in) const;
  Tensors grad(const GradArgs& args) const;
  bool operator==(const LogSumExp&) const = default;
};

/// The axes of a call; none means all. ValueError for one that is named twice.
OverAxes over_axes(std::string_view op, const Tensor& x, const Shape& axes, Keep keep);

}  // namespace ops
}  // namespace sherd
