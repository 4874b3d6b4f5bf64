// What ranks hold in parts, put together: gradients of sharded parameters.
#pragma once

#include <sherd.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace sherd::test {

using Gradients = std::vector<std::vector<float>>;  // empty: none

/// `.grad()` of every parameter, in walk order.
Gradients gradients(const nn::Module& module);
/// The same of whole parameters, from what the ranks hold (of what is not sharded, those of `group`);
/// collective. A part that is whole already stays.
Gradients whole_gradients(const nn::Module& module, const Group& group);

/// What each rank's `backward(rank)` leaves in an unsharded `module`, averaged; the module's own gradients
/// are gone.
Gradients average_by_hand(nn::Module& module, int ranks, const std::function<void(int rank)>& backward);
/// In rank order, in f32, one division. A rank without a gradient counts as zeros; a gradient that no rank
/// has is none.
Gradients average(const std::vector<Gradients>& of_ranks);
/// The averages of a module by hand as those of `sharded`, a copy of it: in the flat layout a trainable
/// parameter without a gradient has zeros where others of its unit have one.
Gradients as_sharded(Gradients averages, nn::Module& sharded);
/// What is in one only counts as it is.
Gradients plus(const Gradients& a, const Gradients& b);
/// Where they differ, in words; empty if they are equal to the bit.
std::string difference(const Gradients& a, const Gradients& b);

/// Gives every parameter its gradient, or none.
void set_gradients(const nn::Module& module, const Gradients& gradients);

}  // namespace sherd::test
