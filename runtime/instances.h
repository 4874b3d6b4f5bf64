// Functions over an element type that other files call: made to exist for every type of a set.
#pragma once

#include <tuple>

#include "runtime/element.h"

namespace sherd {

/// What `functions.operator()<T>()` gives for each type of the set, a tuple of addresses; the compiler keeps
/// what they point to: `[[gnu::used]] const auto instances = instances_for<floating_dtypes>(...);`.
template <DTypeSet set, class F>
constexpr auto instances_for(F functions) {
  return [&]<int... i>(std::integer_sequence<int, i...>) {
    return std::tuple_cat([&] {
      constexpr auto d = static_cast<DType>(i);
      if constexpr (set.contains(d))
        return functions.template operator()<typename Element<d>::type>();
      else
        return std::tuple<>();
    }()...);
  }(std::make_integer_sequence<int, dtype_count>{});
}

}  // namespace sherd
