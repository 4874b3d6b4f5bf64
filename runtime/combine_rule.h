// `ReduceOp` on numbers: what becomes of the elements of several ranks, in their order. Safe to include in
// device code: every back end that combines takes these rules.
#pragma once

#include <bit>
#include <functional>

#include "runtime/element.h"
#include "runtime/reduce_op.h"
#include "runtime/wrapping.h"

namespace sherd {

/// The first rank's element is `first(x)`, each further one adds to it by `next`, and `last` finishes, all in
/// `A`. `Exact`: averages are over a power of two, of which `scale` is the inverse. A product with it has the
/// quotient's bits, and a division is most of what a loop would do.
template <class A, ReduceOp::Kind K, bool Exact = false>
struct CombineRule {
  A scale = 1;
  constexpr A first(A x) const {
    if constexpr (K == ReduceOp::Kind::prescaled_sum) return x * scale;
    return x;
  }
  constexpr A next(A sum, A x) const {
    if constexpr (K != ReduceOp::Kind::max)
      return math::wrapping(std::plus<>{}, sum, first(x));
    else
      return (sum > x || sum != sum) ? sum : x;
  }
  constexpr A last(A sum, int sources) const {
    if constexpr (K != ReduceOp::Kind::average) return sum;
    return Exact ? sum * scale : sum / static_cast<A>(sources);
  }
};

/// Calls `body.operator()<T>(rule)` with the rule of `reduction` over `sources` elements of `dtype`; false if
/// there is none, as for bool.
template <class Body>
bool with_combine_rule(DType dtype, ReduceOp reduction, int sources, const Body& body) {
  using Kind = ReduceOp::Kind;
  bool found = true;
  with_element(dtype, [&]<class T>() {
    using A = compute_t<T>;
    constexpr bool floating = std::is_floating_point_v<A>;
    if constexpr (!std::is_same_v<T, bool>) {
      if (reduction.kind == Kind::sum) return body.template operator()<T>(CombineRule<A, Kind::sum>{});
      if (reduction.kind == Kind::max) return body.template operator()<T>(CombineRule<A, Kind::max>{});
    }
    if constexpr (floating) {
      if (reduction.kind == Kind::prescaled_sum)
        return body.template operator()<T>(
            CombineRule<A, Kind::prescaled_sum>{static_cast<A>(reduction.scale)});
      if (std::has_single_bit(static_cast<unsigned>(sources)))
        return body.template operator()<T>(
            CombineRule<A, Kind::average, true>{A(1) / static_cast<A>(sources)});
      return body.template operator()<T>(CombineRule<A, Kind::average>{});
    }
    found = false;
  });
  return found;
}

}  // namespace sherd
