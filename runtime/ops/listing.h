// The list of ops as values, for tests and docs.
#pragma once

#include <vector>

#include "runtime/elementwise.h"

namespace sherd {

/// One elementwise op of the list, with default fields, and where its inputs may lie in a test.
struct ElementwiseListing {
  Ref<const AnyOp> op;
  Ref<const AnyOp> in_place;  ///< null where the result has another dtype
  int arity;
  DTypeSet dtypes;
  double low, high;
  bool gives_bool;
};

template <class O>
ElementwiseListing list_elementwise() {
  ElementwiseListing entry{make_ref<const OpModel<O>>(O{}), {}, O::arity, O::dtypes, -2, 2,
                           detail::gives_bool<O>()};
  if constexpr (!detail::gives_bool<O>()) entry.in_place = make_ref<const OpModel<InPlace<O>>>(InPlace<O>{});
  if constexpr (requires { O::low; }) {
    entry.low = O::low;
    entry.high = O::high;
  }
  return entry;
}

/// All elementwise ops of the library.
SHERD_API std::vector<ElementwiseListing> elementwise_listing();
std::vector<ElementwiseListing> unary_listing();
std::vector<ElementwiseListing> binary_listing();

}  // namespace sherd
