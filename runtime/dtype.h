// Where a runtime dtype becomes a C++ type.
#pragma once

#include "runtime/element.h"
#include "runtime/error.h"

namespace sherd {

/// `with_element` over floating dtypes; `op` opens the DTypeError for others.
template <class F>
decltype(auto) with_floating(std::string_view op, DType d, F&& f) {
  check<DTypeError>(is_floating(d), "{}: takes floating dtypes, got {}; cast the input first", op,
                    name_of(d));
  return with_element<floating_dtypes>(d, f);
}

}  // namespace sherd
