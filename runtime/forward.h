// Names that op headers need without what stands behind them. Safe to include in device code.
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

/// What an op declares of its inputs (or outputs): bit i stands for number i, the last for all from 63 on.
using Mask = std::uint64_t;
inline constexpr Mask all_of_them = ~Mask{0};
constexpr Mask bit(std::size_t i) { return Mask{1} << (i < 63 ? i : 63); }
constexpr bool has(Mask m, std::size_t i) { return (m & bit(i)) != 0; }

/// What a gradient needs kept: values of inputs and of outputs.
struct Reads {
  Mask inputs = 0, outputs = 0;
  constexpr Reads operator|(Reads o) const { return {inputs | o.inputs, outputs | o.outputs}; }
};

}  // namespace sherd
