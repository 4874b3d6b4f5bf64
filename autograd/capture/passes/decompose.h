// The pass that takes ops apart into the ones that they are made of.
#pragma once

#include "autograd/capture/recorded.h"

namespace sherd {

/// The program with each op that has a reference replaced by it, and so on down to primitives
/// (`ops::Primitives` and elementwise ops of tensors), to the bit what a device with kernels for these alone
/// computes. What the reference of an op does is found by running it on zeros once; an op stays where this
/// fails, since its reference reads values or draws random numbers. Calls among ranks and views stay.
Recorded decompose(Recorded program);

}  // namespace sherd
