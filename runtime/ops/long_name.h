// Names of dtypes in messages that programs match on.
#pragma once

#include <string_view>

#include "runtime/dtype.h"

namespace sherd::ops {

/// The name of a dtype in PyTorch's messages.
constexpr std::string_view long_name(DType d) {
  constexpr std::string_view names[] = {"Double", "Float", "Half", "BFloat16", "Long", "Int", "Byte", "Bool"};
  return names[static_cast<int>(d)];
}

}  // namespace sherd::ops
