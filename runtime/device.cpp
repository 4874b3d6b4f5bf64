#include "runtime/device.h"

#include <charconv>
#include <ostream>

#include "runtime/backend.h"
#include "runtime/element.h"
#include "runtime/error.h"

namespace sherd {

Device Device::parse(std::string_view text) {
  const std::size_t colon = text.find(':');
  const std::string_view kind = text.substr(0, colon);
  int index = 0;
  if (colon != std::string_view::npos) {
    const std::string_view digits = text.substr(colon + 1);
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), index);
    check<ValueError>(
        error == std::errc{} && end == digits.data() + digits.size() && index >= 0 && index <= INT8_MAX,
        "device: '{}' has no valid index after the colon; write e.g. cpu:1 or cuda:0", text);
  }
  if (kind == "cpu") return {DeviceType::cpu, static_cast<std::int8_t>(index)};
  if (kind == "cuda") return Device::cuda(index);
  if (text == "meta") return Device::meta();
  if (const std::optional<DeviceType> type = backend_type(kind))
    return {*type, static_cast<std::int8_t>(index)};
  fail<ValueError>(
      "device: '{}' is not one of cpu, cpu:N, cuda:N, meta, and no back end is registered as '{}'", text,
      kind);
}

void Device::refuse_index(int i) {
  fail<ValueError>("device: index {} is outside [0, {}]; devices count from 0", i, INT8_MAX);
}

std::string to_string(Device device) {
  switch (device.type) {
    case DeviceType::cpu:
      return fmt::format("cpu:{}", device.index);
    case DeviceType::cuda:
      return fmt::format("cuda:{}", device.index);
    case DeviceType::meta:
      return "meta";
  }
  return fmt::format("{}:{}", backend_name(device.type), device.index);
}

std::ostream& operator<<(std::ostream& out, Device device) { return out << to_string(device); }

std::ostream& operator<<(std::ostream& out, DType dtype) { return out << name_of(dtype); }

}  // namespace sherd
