// Where a runtime dtype becomes a C++ type in device code.
#pragma once

#include "runtime/element.h"

namespace sherd::cuda {

/// Calls `f.operator()<T>()` with the element type of a floating dtype; others were refused before.
template <class F>
void for_floating(DType dtype, F&& f) {
  with_element<floating_dtypes>(dtype, f);
}

/// The same for any dtype.
template <class F>
void for_any(DType dtype, F&& f) {
  with_element(dtype, f);
}

}  // namespace sherd::cuda
