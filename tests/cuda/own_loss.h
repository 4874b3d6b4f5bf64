// The kernels of losses that are no part of the library.
#pragma once

namespace sherd::test {

/// Adds those of tests/runtime/own_losses.h.
void add_own_losses_on_gpu();

}  // namespace sherd::test
