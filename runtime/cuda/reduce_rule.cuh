// `ReduceOp` in kernels: what becomes of the elements of several ranks, in their order.
#pragma once

#include <bit>
#include <type_traits>

#include "runtime/cuda/kernels.h"
#include "runtime/cuda/types.cuh"
#include "runtime/reduce_op.h"

namespace sherd::cuda {

template <class A>
__device__ A added(A a, A b) {
  if constexpr (std::is_integral_v<A>) {
    using U = std::make_unsigned_t<A>;
    return static_cast<A>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
  } else {
    return a + b;
  }
}

/// `Exact`: averages are over a power of two, of which `scale` is the inverse. A product with it has the
/// quotient's bits, and a division is most of what the kernel would do.
template <class A, ReduceOp::Kind K, bool Exact>
struct Rule {
  A scale;
  __device__ A first(A x) const { return K == ReduceOp::Kind::prescaled_sum ? x * scale : x; }
  __device__ A next(A sum, A x) const {
    if constexpr (K == ReduceOp::Kind::max) {
      if constexpr (std::is_floating_point_v<A>) return (sum > x || sum != sum) ? sum : x;
      return sum > x ? sum : x;
    } else {
      return added(sum, first(x));
    }
  }
  __device__ A last(A sum, int sources) const {
    if constexpr (K != ReduceOp::Kind::average) return sum;
    return Exact ? sum * scale : sum / static_cast<A>(sources);
  }
};

/// Calls `launch.operator()<T>(rule)` with the rule of `reduction` over `sources` elements of `dtype`.
template <class Launch>
void with_rule(DType dtype, ReduceOp reduction, int sources, const Launch& launch) {
  for_any(dtype, [&]<class T>() {
    using Kind = ReduceOp::Kind;
    using A = compute_t<T>;
    if constexpr (!std::is_same_v<T, bool>) {  // no rank may ask for bool
      if (reduction.kind == Kind::max) return launch.template operator()<T>(Rule<A, Kind::max, false>{1});
      if constexpr (std::is_floating_point_v<A>) {
        if (reduction.kind == Kind::average && std::has_single_bit(static_cast<unsigned>(sources)))
          return launch.template operator()<T>(
              Rule<A, Kind::average, true>{static_cast<A>(1 / static_cast<float>(sources))});
        if (reduction.kind == Kind::average)
          return launch.template operator()<T>(Rule<A, Kind::average, false>{1});
        if (reduction.kind == Kind::prescaled_sum)
          return launch.template operator()<T>(
              Rule<A, Kind::prescaled_sum, false>{static_cast<A>(reduction.scale)});
      }
      launch.template operator()<T>(Rule<A, Kind::sum, false>{1});
    }
  });
}

}  // namespace sherd::cuda
