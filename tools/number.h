// Numbers on the command line.
#pragma once

#include <charconv>
#include <concepts>
#include <string_view>

#include "runtime/error.h"
#include "runtime/shown.h"

namespace sherd::tools {

/// The number that all of `text` is. ValueError that names the flag for anything else, and for what T cannot
/// hold.
template <class T>
T number_from(std::string_view flag, std::string_view text) {
  T value{};
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  constexpr std::string_view kind = std::floating_point<T>      ? "a number"
                                    : std::unsigned_integral<T> ? "a whole number from 0"
                                                                : "a whole number";
  check<ValueError>(error != std::errc::result_out_of_range, "{} '{}': is out of range", flag, shown(text));
  check<ValueError>(error == std::errc() && stop == end, "{} '{}': takes {}", flag, shown(text), kind);
  return value;
}

}  // namespace sherd::tools
