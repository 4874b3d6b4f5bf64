// Inputs of an op that may come in two parts, which its kernel adds up as it reads them.
#pragma once

#include <optional>

#include "runtime/op.h"
#include "runtime/tensor.h"

namespace sherd::ops {

/// Input `second`, where it is given, is a part of input `first`: their sum, rounded, is what the op takes.
struct InParts {
  std::size_t first, second;
};

/// The whole of such an input, for what has no kernel that reads both.
SHERD_API Tensor in_one(InParts parts, Inputs in);

/// Whether a device's kernel of this op reads parts, and which.
using ReadsParts = std::optional<InParts> (*)(const AnyOp& op);
SHERD_API std::optional<InParts> in_parts(const AnyOp& op, DeviceType device);
/// A back end that has such kernels says so.
SHERD_API void set_reads_parts(DeviceType device, ReadsParts reads);

}  // namespace sherd::ops
