// What a rule over lists of tensors is: a functor of several inputs and outputs that steps each element of a
// parameter and what is kept beside it. Safe to include in device code: a rule is the same source on every
// device, instantiated with a number; with `Expr` it is the reference in ops.
#pragma once

#include <cstddef>
#include <iterator>
#include <span>
#include <string_view>
#include <utility>

#include "runtime/forward.h"

namespace sherd {

struct Spec;

namespace ops {

/// Whether a step takes a second input, skip (0-d, f32): where that is not 0, nothing is changed.
enum class Skippable : std::uint8_t { no, yes };
/// Whether a step takes one more input after those, a factor (0-d, f64): gradients count as multiplied by it
/// and rounded to their dtype, the bits that `ClipScale` leaves; they themselves stay.
enum class Clipped : std::uint8_t { no, yes };
/// Whether each parameter brings one more tensor, of 16 bits, which gets the new values rounded.
enum class Twins : std::uint8_t { no, yes };

}  // namespace ops

/// What a rule gives for one element: its new value, and that of each tensor of state.
template <class T, std::size_t states>
struct Stepped {
  T value;
  T state[states];
};

/// How the inputs of one step lie: the rate, skip and factor if there are such, then for each parameter its
/// value, its gradient, the state that is kept, a count of steps and a twin, the last two if there.
struct StepLists {
  static constexpr std::size_t most_states = 3;
  std::string_view name;                     ///< of the op
  std::span<const std::string_view> states;  ///< what each tensor of state is, for messages
  Mask kept;                                 ///< those that are there
  bool counts, skippable, clipped, twins;

  constexpr std::size_t first() const { return std::size_t{1} + skippable + clipped; }
  constexpr std::size_t factor() const { return first() - 1; }
  constexpr std::size_t count() const {
    std::size_t at = 2;
    for (std::size_t k = 0; k < states.size(); ++k) at += has(kept, k);
    return at;
  }
  constexpr std::size_t twin() const { return count() + counts; }
  constexpr std::size_t stride() const { return twin() + twins; }
};

/// The base of a rule `Rule`, which makes an op of it: `struct Lion : ListStep<Lion> { ... };`. Parameters
/// and gradients are f32 or of 16 bits, state as the parameter; all are written but the gradients, of 16 bits
/// rounded once. A rule has
///  - `name`, and `states`, an array of what each tensor of state is;
///  - `factors(lr, step, rounded)`: the scalars of a step, computed in f64 from the rate and the number of
///  the step, which counts from 1, and each `rounded` to the dtype that is computed in;
///  - a call on those, a value, its gradient and its state, which gives `Stepped`;
///  - fields that say the rest of it, among them `skippable`, `clipped` and `twins` if it has such.
/// Numbers are those of `D = decltype(lr)` in the one and of the values' type in the other; choose with
/// `where` and call functions as a functor does. A rule that steps in several ways says how many `forms` it
/// has and which of them is its `form()`, and its call takes that as its first template argument.
template <class Rule>
struct SHERD_API ListStep {
  static constexpr Arity arity = Arity::at_least(1);
  static constexpr bool differentiable = false;
  static constexpr int forms = 1;
  constexpr int form() const { return 0; }
  /// Which tensors of state a form keeps; the others are zeros to the call, and what it gives for them is
  /// dropped.
  static constexpr Mask keeps([[maybe_unused]] int form) { return (Mask{1} << std::size(Rule::states)) - 1; }
  /// Whether a form looks at the number of the step, which is kept for each parameter (0-d, f64) and counts
  /// one up; else it is 1.
  static constexpr bool counts([[maybe_unused]] int form) { return false; }

  constexpr StepLists lists() const {
    const Rule& rule = self();
    StepLists lists{Rule::name, Rule::states, Rule::keeps(rule.form()), Rule::counts(rule.form()), false,
                    false,      false};
    if constexpr (requires { rule.skippable; }) lists.skippable = rule.skippable == ops::Skippable::yes;
    if constexpr (requires { rule.clipped; }) lists.clipped = rule.clipped == ops::Clipped::yes;
    if constexpr (requires { rule.twins; }) lists.twins = rule.twins == ops::Twins::yes;
    return lists;
  }
  constexpr std::size_t first() const { return lists().first(); }
  constexpr std::size_t stride() const { return lists().stride(); }
  constexpr bool writes(std::size_t i) const { return i >= first() && (i - first()) % stride() != 1; }
  // In runtime/list_step.h.
  InlineVec<Spec, 2> infer(std::span<const Spec> in) const;
  Tensors reference(std::span<const Tensor> in) const;
  bool operator==(const ListStep&) const = default;

 private:
  constexpr const Rule& self() const { return static_cast<const Rule&>(*this); }
};

namespace detail {

/// Calls `body.operator()<form>()` with the form of `rule`.
template <class Rule, class F>
constexpr void with_form(const Rule& rule, const F& body) {
  [&]<int... form>(std::integer_sequence<int, form...>) {
    ((rule.form() == form ? body.template operator()<form>() : void()), ...);
  }(std::make_integer_sequence<int, Rule::forms>{});
}

/// One element by a form of `rule`.
template <int form, class Rule, class Factors, class T, std::size_t states>
constexpr Stepped<T, states> stepped(const Rule& rule, const Factors& factors, T value, T gradient,
                                     const T (&state)[states]) {
  return [&]<std::size_t... k>(std::index_sequence<k...>) -> Stepped<T, states> {
    if constexpr (Rule::forms > 1)
      return rule.template operator()<form>(factors, value, gradient, state[k]...);
    else
      return rule(factors, value, gradient, state[k]...);
  }(std::make_index_sequence<states>{});
}

}  // namespace detail
}  // namespace sherd
