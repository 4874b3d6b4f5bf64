// Declarations that op headers need, without the definitions. Safe to include in device code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "runtime/element.h"
#include "runtime/export.h"

namespace sherd {

class Tensor;
struct GradArgs;
template <class T, std::size_t N>
class InlineVec;
using Tensors = InlineVec<Tensor, 2>;

/// A set of an op's inputs (or outputs): bit i stands for number i, bit 63 for number 63 and all after it.
using Mask = std::uint64_t;
inline constexpr Mask all_of_them = ~Mask{0};
constexpr Mask bit(std::size_t i) { return Mask{1} << (i < 63 ? i : 63); }
constexpr bool has(Mask m, std::size_t i) { return (m & bit(i)) != 0; }

/// How many inputs an op takes; an optional one counts, given or not.
struct Arity {
  std::size_t least, most;
  constexpr Arity(int exactly) : least(static_cast<std::size_t>(exactly)), most(least) {}
  static constexpr Arity at_least(std::size_t n) { return Arity(n, ~std::size_t{0}); }

 private:
  constexpr Arity(std::size_t least, std::size_t most) : least(least), most(most) {}
};

/// The inputs and outputs whose values a gradient rule reads; the tape keeps these until the backward.
struct Reads {
  Mask inputs = 0, outputs = 0;
  constexpr Reads operator|(Reads o) const { return {inputs | o.inputs, outputs | o.outputs}; }
};

}  // namespace sherd
