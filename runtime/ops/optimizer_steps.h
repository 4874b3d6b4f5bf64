// Optimizer steps over whole lists of parameters at once. Rate and step counts are tensors, so a recorded
// step can be replayed.
#pragma once

#include "runtime/op.h"

namespace sherd::ops {

/// Whether a step takes a second input, skip (0-d, f32): where that is not 0, nothing is changed.
enum class Skippable : std::uint8_t { no, yes };
/// Whether a step takes one more input after those, a factor (0-d, f64): gradients count as multiplied by it
/// and rounded to their dtype, the bits that `ClipScale` leaves; they themselves stay.
enum class Clipped : std::uint8_t { no, yes };
/// Whether each parameter brings one more tensor, of 16 bits, which gets the new values rounded.
enum class Twins : std::uint8_t { no, yes };

/// Which input begins the first parameter: before it are the rate, skip and factor, the last two if there.
constexpr std::size_t first_parameter(Skippable skippable, Clipped clipped) {
  return 1u + (skippable == Skippable::yes) + (clipped == Clipped::yes);
}

/// One step of Adam (Kingma and Ba, 2015) or AdamW (Loshchilov and Hutter, 2019), f32. Inputs: lr (0-d, f64),
/// skip if the step is skippable, the factor if it is clipped, then for each parameter p, g (f32 or of 16
/// bits), m, v, step (0-d, f64), which counts one up, and its twin if it has one. The first ones and g are
/// not written.
struct AdamStep {
  static constexpr std::string_view name = "adam_step_";
  static constexpr Arity arity = Arity::at_least(1);
  static constexpr bool differentiable = false;
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  bool decoupled = false;  ///< AdamW: decay shrinks the parameter instead of adding to the gradient
  Skippable skippable = Skippable::no;
  Clipped clipped = Clipped::no;
  Twins twins = Twins::no;

  std::size_t first() const { return first_parameter(skippable, clipped); }
  std::size_t stride() const { return twins == Twins::yes ? 6 : 5; }
  bool writes(std::size_t i) const { return i >= first() && (i - first()) % stride() != 1; }
  Specs infer(SpecSpan in) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const {
    on("beta1", beta1);
    on("beta2", beta2);
    on("eps", eps);
    on("weight_decay", weight_decay);
    on("decoupled", decoupled);
    on("skippable", skippable == Skippable::yes);
    on("clipped", clipped == Clipped::yes);
    on("twins", twins == Twins::yes);
  }
  bool operator==(const AdamStep&) const = default;
};

/// One step of SGD, f32. Inputs: lr (0-d, f64), skip if the step is skippable, the factor if it is clipped,
/// then for each parameter p and g (f32 or of 16 bits), and with momentum also the buffer and a 0-d f64 count
/// of steps taken (0: the buffer starts as the gradient). The first ones and g are not written. Without
/// momentum dampening and nesterov say nothing.
struct SgdStep {
  static constexpr std::string_view name = "sgd_step_";
  static constexpr Arity arity = Arity::at_least(1);
  static constexpr bool differentiable = false;
  double momentum = 0, weight_decay = 0, dampening = 0;
  bool nesterov = false;
  Skippable skippable = Skippable::no;
  Clipped clipped = Clipped::no;

  std::size_t first() const { return first_parameter(skippable, clipped); }
  std::size_t stride() const { return momentum != 0 ? 4 : 2; }
  bool writes(std::size_t i) const { return i >= first() && (i - first()) % stride() != 1; }
  Specs infer(SpecSpan in) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const {
    on("momentum", momentum);
    on("weight_decay", weight_decay);
    on("dampening", dampening);
    on("nesterov", nesterov);
    on("skippable", skippable == Skippable::yes);
    on("clipped", clipped == Clipped::yes);
  }
  bool operator==(const SgdStep&) const = default;
};

/// One step of RMSprop, f32. Inputs: lr (0-d, f64), skip if the step is skippable, the factor if it is
/// clipped, then for each parameter p, g (f32 or of 16 bits), the average of squares, that of gradients if it
/// is centred, and the buffer with momentum. The first ones and g are not written.
struct RmspropStep {
  static constexpr std::string_view name = "rmsprop_step_";
  static constexpr Arity arity = Arity::at_least(1);
  static constexpr bool differentiable = false;
  double alpha = 0.99, eps = 1e-8, weight_decay = 0, momentum = 0;
  bool centered = false;
  Skippable skippable = Skippable::no;
  Clipped clipped = Clipped::no;

  std::size_t first() const { return first_parameter(skippable, clipped); }
  std::size_t stride() const { return 3u + centered + (momentum != 0); }
  bool writes(std::size_t i) const { return i >= first() && (i - first()) % stride() != 1; }
  Specs infer(SpecSpan in) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const {
    on("alpha", alpha);
    on("eps", eps);
    on("weight_decay", weight_decay);
    on("momentum", momentum);
    on("centered", centered);
    on("skippable", skippable == Skippable::yes);
    on("clipped", clipped == Clipped::yes);
  }
  bool operator==(const RmspropStep&) const = default;
};

/// Largest absolute value of all inputs, f64 0-d: 0 for no elements, NaN when there is one.
struct LargestMagnitude {
  static constexpr std::string_view name = "largest_magnitude";
  static constexpr Arity arity = Arity::at_least(1);
  static constexpr bool differentiable = false;

  Specs infer(SpecSpan in) const;
  Tensors reference(Inputs in) const;
  bool operator==(const LargestMagnitude&) const = default;
};

// The Euclidean norm of any number of tensors in two steps. Its bits do not depend on how elements are
// ordered or cut into tensors, of one floating dtype or several, and not on ranks either: between the steps
// sums meet by a sum.

/// Sum of the squares of all inputs without rounding, i64 (134), as `ExactSquares` lays it out. Sums add
/// element by element. Fewer than 2^32 elements in all.
struct SquareSums {
  static constexpr std::string_view name = "square_sums";
  static constexpr Arity arity = Arity::at_least(1);
  static constexpr bool differentiable = false;

  Specs infer(SpecSpan in) const;
  bool operator==(const SquareSums&) const = default;
};

/// The norm, f64 0-d, of the whole sum (i64 (134)): infinite or NaN if an element was.
struct NormOfSums {
  static constexpr std::string_view name = "norm_of_sums";
  static constexpr Arity arity = 1;
  static constexpr Mask dense = 1;
  static constexpr bool differentiable = false;

  Specs infer(SpecSpan in) const;
  bool operator==(const NormOfSums&) const = default;
};

/// min(1, limit / (norm + 1e-6)), 0-d f64 as `norm` is.
SHERD_API Tensor clip_factor(const Tensor& norm, double limit);

/// Multiplies inputs 1.. by min(1, limit / (input 0 + 1e-6)), input 0 being their norm (0-d, f64); by NaN
/// when that is one.
struct ClipScale {
  static constexpr std::string_view name = "clip_scale_";
  static constexpr Arity arity = Arity::at_least(1);
  static constexpr bool differentiable = false;
  double limit = 1;

  bool writes(std::size_t i) const { return i >= 1; }
  Specs infer(SpecSpan in) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const { on("limit", limit); }
  bool operator==(const ClipScale&) const = default;
};

}  // namespace sherd::ops
