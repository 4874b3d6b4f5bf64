// Where a runtime dtype becomes a C++ type.
#pragma once

#include "runtime/element.h"
#include "runtime/error.h"

namespace sherd {

template <class T>
struct TypeTag {
  using type = T;
};

/// Calls `f(TypeTag<T>{})` with the element type of `d`.
template <class F>
decltype(auto) dispatch(DType d, F&& f) {
  check<InternalError>(any_dtype.contains(d), "dispatch: dtype {} is not in the list", static_cast<int>(d));
  return with_element(d, [&]<class T>() -> decltype(auto) { return f(TypeTag<T>{}); });
}

/// The same over floating dtypes; `op` opens the error for others.
template <class F>
decltype(auto) dispatch_floating(std::string_view op, DType d, F&& f) {
  check<DTypeError>(is_floating(d), "{}: takes floating dtypes, got {}; cast the input first", op,
                    name_of(d));
  return with_element<floating_dtypes>(d, [&]<class T>() -> decltype(auto) { return f(TypeTag<T>{}); });
}

}  // namespace sherd
