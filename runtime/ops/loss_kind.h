// Losses that are summed over all elements. Safe to include in device code.
#pragma once

#include "runtime/ops/absolute_error.h"
#include "runtime/ops/bce_with_logits.h"
#include "runtime/ops/huber.h"
#include "runtime/ops/squared_error.h"

namespace sherd::ops {

/// Which loss: a name for an elementwise op of input and target.
struct LossKind {
  enum class Of : std::uint8_t { squared_error, absolute_error, huber, bce_with_logits };
  Of of = Of::squared_error;
  double bound = 1, divisor = 1;  ///< as in `Huber`

  /// Calls `body` with the elementwise op.
  template <class F>
  decltype(auto) visit(const F& body) const {
    switch (of) {
      case Of::squared_error:
        return body(SquaredError{});
      case Of::absolute_error:
        return body(AbsoluteError{});
      case Of::huber:
        return body(Huber{bound, divisor});
      default:
        return body(BceWithLogits{});
    }
  }
  bool operator==(const LossKind&) const = default;
};

}  // namespace sherd::ops
