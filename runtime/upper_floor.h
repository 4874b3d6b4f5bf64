// Functions that runtime/ declares and calls, and autograd/ defines. With the autograd members of `Tensor`
// these are the only declarations without a definition in their own folder.
#pragma once

#include <functional>

#include "runtime/forward.h"
#include "runtime/kernel.h"

namespace sherd {

class Context;

/// Adds the listener that every context starts with: the tape.
void install_listeners(Context& context);

namespace detail {

/// The gradient of an op, one entry an input, from its `reference`: runs that with grad mode on and
/// differentiates it.
SHERD_API Tensors reference_gradient(const GradArgs& args, const std::function<Tensors(Inputs)>& reference);

}  // namespace detail
}  // namespace sherd
