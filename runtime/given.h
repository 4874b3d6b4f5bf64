// What functions made of other ops ask of their inputs first, so that messages name the call and not what it
// is made of. Ops themselves are asked by `apply`.
#pragma once

#include <concepts>
#include <span>

#include "runtime/error.h"
#include "runtime/tensor.h"

namespace sherd::detail {

/// ValueError, in the name of `call`, for an empty handle.
inline void check_given(std::string_view call, std::span<const Tensor> in) {
  for (std::size_t i = 0; i < in.size(); ++i)
    check<ValueError>(in[i].defined(), "{}: input {} is an empty handle; assign it a tensor first", call, i);
}
template <std::same_as<Tensor>... T>
void check_given(std::string_view call, const T&... in) {
  int i = 0;
  (check<ValueError>(in.defined(), "{}: input {} is an empty handle; assign it a tensor first", call, i++),
   ...);
}

}  // namespace sherd::detail
