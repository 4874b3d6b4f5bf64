// Where a tensor lives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <string>
#include <string_view>

#include "runtime/export.h"

namespace sherd {

/// What kind of device; an application's own kinds follow these (`register_backend`).
enum class DeviceType : std::uint8_t { cpu, cuda, meta };
/// How many kinds there can be in all; so an application can register five.
inline constexpr std::size_t device_type_limit = 8;

/// `cpu:0`, `cpu:1` (a second CPU device with an identity of its own), `cuda:i`, or `meta` (shapes and bytes
/// only).
struct Device {
  DeviceType type = DeviceType::cpu;
  std::int8_t index = 0;

  /// Throw ValueError for an index outside [0, 127].
  static constexpr Device cpu(int i = 0) { return {DeviceType::cpu, checked_index(i)}; }
  static constexpr Device cuda(int i = 0) { return {DeviceType::cuda, checked_index(i)}; }
  static constexpr Device meta() { return {DeviceType::meta, 0}; }
  /// Parses "cpu", "cpu:1", "cuda:0", "meta", or the name of an application's back end with or without an
  /// index; ValueError otherwise.
  SHERD_API static Device parse(std::string_view text);
  bool is_cpu() const { return type == DeviceType::cpu; }
  friend bool operator==(const Device&, const Device&) = default;

  static constexpr std::int8_t checked_index(int i) {
    if (i < 0 || i > INT8_MAX) refuse_index(i);
    return static_cast<std::int8_t>(i);
  }
  [[noreturn]] SHERD_API static void refuse_index(int i);
};

/// "cpu:0", "cuda:1", "meta", "name:0" of an application's back end.
SHERD_API std::string to_string(Device device);
/// Writes `to_string(device)`.
SHERD_API std::ostream& operator<<(std::ostream& out, Device device);

}  // namespace sherd
