// Lines for whoever operates the program: what the library worked around. Whatever an exception says is not
// logged.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string_view>

#include "runtime/export.h"

namespace sherd {

enum class LogLevel : std::uint8_t { debug, info, warning };

/// One line to the application's spdlog logger named "sherd"; nowhere while the application has registered
/// none. Never throws.
SHERD_API void write_log_line(LogLevel level, std::string_view line) noexcept;

/// Formats a line and writes it; dropped when there is no memory for it.
template <class... Args>
void write_log(LogLevel level, fmt::format_string<Args...> text, Args&&... args) noexcept {
  try {
    write_log_line(level, fmt::format(text, std::forward<Args>(args)...));
  } catch (...) {  // no memory for a line about no memory
  }
}

}  // namespace sherd
