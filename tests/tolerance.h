// How far a value may lie from the expected one, by dtype; PyTorch's defaults of assert_close.
#pragma once

#include "runtime/dtype.h"

namespace sherd::test {

struct Tolerance {
  double relative = 0, absolute = 0;
};

/// Zero for integers.
inline Tolerance tolerance_of(DType dtype) {
  switch (dtype) {
    case f16:
      return {1e-3, 1e-5};
    case bf16:
      return {1.6e-2, 1e-5};
    case f32:
      return {1.3e-6, 1e-5};
    case f64:
      return {1e-7, 1e-7};
    default:
      return {};
  }
}

}  // namespace sherd::test
