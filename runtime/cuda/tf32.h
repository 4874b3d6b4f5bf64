// Whether products may be made by tensor cores that round f32.
#pragma once

#include "runtime/element.h"
#include "runtime/float32_precision.h"

namespace sherd::cuda {

/// Of a call that is made now, of factors of `dtype`.
inline bool takes_tf32(DType dtype) {
  return dtype == DType::f32 && float32_matmul_precision() == Float32MatmulPrecision::high;
}

}  // namespace sherd::cuda
