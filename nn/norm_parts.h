// The norm of gradients that lie in several places: parts that ranks join, and what is made of them.
#pragma once

#include <span>
#include <string_view>

#include "collectives/group.h"
#include "nn/parameter.h"
#include "runtime/tensor.h"

namespace sherd::nn {

/// A norm of an order above 0, which may be INFINITY; that of order 2 and of INFINITY has the same bits for
/// every cut of the elements.
class NormParts {
 public:
  /// ValueError, in the name of `call`, for another order.
  NormParts(std::string_view call, double order);
  /// What `gradients` add, which may be none, on `device`.
  Tensor of(std::span<const Tensor> gradients, Device device) const;
  Tensor both(const Tensor& a, const Tensor& b) const;
  /// How the parts of all ranks are joined.
  ReduceOp among_ranks() const;
  /// The norm of what was joined; 0-d f64.
  Tensor norm(const Tensor& parts) const;

 private:
  double order_;
};

/// The gradients of `params` were clipped or unscaled in place: see `note_scaled_gradients`.
void note_scaled(std::span<const Parameter> params);

/// ValueError, in the name of `call`, for a parameter that is listed twice, whose gradient would be scaled
/// twice.
void check_listed_once(std::string_view call, std::span<const Parameter> params);

}  // namespace sherd::nn
