// Marks in the graph behind a module's outputs.
#pragma once

#include <memory>
#include <span>

#include "autograd/sink.h"
#include "runtime/tensor.h"

namespace sherd::shard {

/// By which every backward that reaches one of `outputs` tells `sink` before it walks, also on a rank where
/// that one comes of no parameter. Outputs that are not floating have no gradients, and get no mark.
void anchor(std::span<Tensor* const> outputs, const std::shared_ptr<GradSink>& sink);

}  // namespace sherd::shard
