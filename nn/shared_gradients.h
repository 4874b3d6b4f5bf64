// Sinks that average gradients over ranks each of which has the whole parameter.
#pragma once

#include "collectives/group.h"
#include "runtime/tensor.h"

namespace sherd::nn {

/// What such a sink is besides: it says which ranks, for those that meet only the parameter.
class SHERD_API SharedGradients {
 public:
  virtual ~SharedGradients();
  virtual const Group& ranks() const = 0;
  /// The program sets the gradient of `leaf` to zeros in place.
  virtual void zeroed(const Tensor& leaf) = 0;
};

}  // namespace sherd::nn
