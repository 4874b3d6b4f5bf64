// Where a runtime dtype becomes a C++ type in device code.
#pragma once

#include "runtime/element.h"

namespace sherd::cuda {

/// Calls `f.operator()<T>()` with the element type of a floating dtype; others were refused before.
template <class F>
void for_floating(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f64:
      return f.template operator()<double>();
    case DType::f16:
      return f.template operator()<Half>();
    case DType::bf16:
      return f.template operator()<BFloat16>();
    default:
      return f.template operator()<float>();
  }
}

/// The same for any dtype.
template <class F>
void for_any(DType dtype, F&& f) {
  switch (dtype) {
    case DType::i64:
      return f.template operator()<std::int64_t>();
    case DType::i32:
      return f.template operator()<std::int32_t>();
    case DType::u8:
      return f.template operator()<std::uint8_t>();
    case DType::boolean:
      return f.template operator()<bool>();
    default:
      return for_floating(dtype, f);
  }
}

}  // namespace sherd::cuda
