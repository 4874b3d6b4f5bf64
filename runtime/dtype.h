// Where a runtime dtype becomes a C++ type.
#pragma once

#include <utility>

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
  switch (d) {
    case DType::f64:
      return f(TypeTag<double>{});
    case DType::f32:
      return f(TypeTag<float>{});
    case DType::f16:
      return f(TypeTag<Half>{});
    case DType::bf16:
      return f(TypeTag<BFloat16>{});
    case DType::i64:
      return f(TypeTag<std::int64_t>{});
    case DType::i32:
      return f(TypeTag<std::int32_t>{});
    case DType::u8:
      return f(TypeTag<std::uint8_t>{});
    case DType::boolean:
      return f(TypeTag<bool>{});
  }
  fail<InternalError>("dispatch: dtype {} is not in the list", static_cast<int>(d));
}

/// The same over floating dtypes; `op` opens the error for others.
template <class F>
decltype(auto) dispatch_floating(std::string_view op, DType d, F&& f) {
  switch (d) {
    case DType::f64:
      return f(TypeTag<double>{});
    case DType::f32:
      return f(TypeTag<float>{});
    case DType::f16:
      return f(TypeTag<Half>{});
    case DType::bf16:
      return f(TypeTag<BFloat16>{});
    default:
      fail<DTypeError>("{}: takes floating dtypes, got {}; cast the input first", op, name_of(d));
  }
}

}  // namespace sherd
