// In which dtype and on which device tensors are made.
#pragma once

#include <type_traits>

#include "runtime/device.h"
#include "runtime/dtype.h"
#include "runtime/export.h"

namespace sherd {

/// What a creation call takes where it is not told: f32 and the CPU, or what the rank's innermost
/// `DefaultOptions` says.
SHERD_API DType default_dtype();
SHERD_API Device default_device();

namespace detail {
// For members alone: `const DType d = dtype_now();` would be a constant.
constexpr DType dtype_now() { return std::is_constant_evaluated() ? DType::f32 : default_dtype(); }
constexpr Device device_now() { return std::is_constant_evaluated() ? Device::cpu() : default_device(); }
}  // namespace detail

/// Element type and device of a creation call, and of a layer's parameters. What is not named is the default
/// of the moment at which the options are made; of options that are constants, f32 and the CPU.
struct TensorOptions {
  DType dtype = detail::dtype_now();
  Device device = detail::device_now();
};

/// A scope with other defaults, for the calling thread's rank and for ranks that it starts:
/// `const DefaultOptions scope({.dtype = DType::bf16, .device = Device::cuda(0)});`. What the options do not
/// name stays as it was around the scope. Integers, dtypes of values of the host's, and what is made like
/// another tensor do not follow the dtype. DTypeError for a dtype that is not floating. Must end on its
/// thread.
class SHERD_API DefaultOptions {
 public:
  [[nodiscard]] explicit DefaultOptions(TensorOptions options);
  ~DefaultOptions();
  DefaultOptions(const DefaultOptions&) = delete;
  DefaultOptions& operator=(const DefaultOptions&) = delete;

 private:
  TensorOptions before_;
};

}  // namespace sherd

template <>
struct fmt::formatter<sherd::DType> : fmt::formatter<std::string_view> {
  auto format(sherd::DType dtype, fmt::format_context& ctx) const {
    return fmt::formatter<std::string_view>::format(sherd::name_of(dtype), ctx);
  }
};
template <>
struct fmt::formatter<sherd::Device> : fmt::formatter<std::string> {
  auto format(sherd::Device device, fmt::format_context& ctx) const {
    return fmt::formatter<std::string>::format(sherd::to_string(device), ctx);
  }
};
