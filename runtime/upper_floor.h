// What the runtime declares and the floor above defines (autograd/): the one place where a declaration has no
// definition on its own floor, beside the autograd members of `Tensor`, whose class must name them.
#pragma once

#include <functional>

#include "runtime/forward.h"
#include "runtime/kernel.h"

namespace sherd {

class Context;

/// Adds the listeners that every context starts with: the tape.
void install_listeners(Context& context);

namespace detail {

/// Gradient of `reference` by running it again with grad mode on.
SHERD_API Tensors reference_gradient(const GradArgs& args, const std::function<Tensors(Inputs)>& reference);

}  // namespace detail
}  // namespace sherd
