// The state of an optimizer over sharded parameters as that of the unsharded ones: what checkpoints hold, so
// that they load at any number of ranks, in any layout.
#pragma once

#include "nn/optimizer.h"

namespace sherd::shard {

// ---- by name: "state.<name of the parameter in `model`>.<what>" ----
// Whatever order the optimizer has its parameters in, there and where it is loaded, in as many groups, whose
// rates go by number. A parameter that `model` does not have keeps its number. What loads takes states by
// name and by number.

/// All of it with whole tensors, on every rank, as below.
SHERD_API nn::StateDict full_optimizer_state(nn::Module& model, const nn::Optimizer& optimizer);
SHERD_API void load_full_optimizer_state(nn::Module& model, nn::Optimizer& optimizer,
                                         const nn::StateDict& state);
/// `optimizer.state_dict()`, this rank's parts as they lie; a flat parameter has the name that the module
/// lists it by. Errors are those of `Optimizer::load_state_dict`.
SHERD_API nn::StateDict local_optimizer_state(nn::Module& model, const nn::Optimizer& optimizer);
SHERD_API void load_local_optimizer_state(nn::Module& model, nn::Optimizer& optimizer, nn::StateDict state);

// ---- by number, as `Optimizer::state_dict` has it ----

/// `optimizer.state_dict()` with whole tensors, on every rank; collective over the parameters' groups. Values
/// are copies. A flat parameter counts as the parameters in it, and an optimizer group that has one lists
/// them in the order of the outermost sharded module's members.
SHERD_API nn::StateDict full_optimizer_state(const nn::Optimizer& optimizer);
/// Takes this rank's part of whole values. In a flat parameter, a parameter without state counts as one whose
/// gradients were 0; ValueError for parameters that have taken different numbers of steps. Other errors are
/// those of `Optimizer::load_state_dict`. Nothing is changed when it throws.
SHERD_API void load_full_optimizer_state(nn::Optimizer& optimizer, const nn::StateDict& state);

}  // namespace sherd::shard
