// The one door between an op and the world.
#pragma once

#include <array>

#include "runtime/op.h"

namespace sherd {

/// Makes every input resident and pins it, checks devices, lets the op infer and allocate, runs it on the inputs' device, and
/// tells this rank's listeners. Throws what the op's rules throw.
SHERD_API Tensors apply(const AnyOp& op, Inputs in);

/// Runs `op` once more into tensors made earlier: no listener hears it. For recomputation and replay.
SHERD_API void run_again(const AnyOp& op, Inputs in, Outputs out);

/// Applies a typed op with one output.
template <class O, class... T>
  requires(std::same_as<T, Tensor> && ...)
Tensor apply(const O& op, const T&... in) {
  const std::array<Tensor, sizeof...(T)> inputs{in...};
  const OpModel<O> model(op);
  return std::move(apply(static_cast<const AnyOp&>(model), Inputs(inputs))[0]);
}

/// Applies a typed op to a list of inputs, with all its outputs.
template <class O>
Tensors apply_many(const O& op, Inputs in) {
  const OpModel<O> model(op);
  return apply(static_cast<const AnyOp&>(model), in);
}

}  // namespace sherd
