// Hooks on what a backward brings to a module; hooks on forwards are `ModuleObserver`.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "nn/module.h"

namespace sherd::nn {

/// Sees the gradients of a module's inputs and outputs, one for each tensor of `forward`'s arguments and
/// result, empty where there is none. What it returns takes the place of the inputs' gradients, of the same
/// shapes (ValueError for another number, ShapeError); an empty list leaves them.
using FullBackwardHook = std::function<std::vector<Tensor>(std::span<const Tensor> grad_input,
                                                           std::span<const Tensor> grad_output)>;

/// Ends its hook.
class SHERD_API ModuleHook {
 public:
  ModuleHook() = default;
  ModuleHook(std::shared_ptr<ModuleObserver> observer, Module& module);
  void reset();

 private:
  std::shared_ptr<ModuleObserver> observer_;
  Subscription watching_;  // ends first
};

/// `hook` runs once in every backward that comes to one of `module`'s forwards from now on, when the
/// gradients of its inputs are complete; where no input requires grad, when those of its outputs are. While
/// it lasts, forward gets copies of inputs that require grad, and gives copies of its outputs. Of a sharded
/// module as of any other: what it sees is this rank's, and parameters' gradients are averaged as ever.
[[nodiscard]] SHERD_API ModuleHook register_full_backward_hook(Module& module, FullBackwardHook hook);

}  // namespace sherd::nn
