#include "runtime/log.h"

#include <spdlog/spdlog.h>

namespace sherd {
namespace {

spdlog::level::level_enum spdlog_level(LogLevel level) {
  switch (level) {
    case LogLevel::debug:
      return spdlog::level::debug;
    case LogLevel::info:
      return spdlog::level::info;
    case LogLevel::warning:
      return spdlog::level::warn;
  }
  return spdlog::level::off;
}

}  // namespace

void write_log_line(LogLevel level, std::string_view line) noexcept {
  try {
    if (const auto logger = spdlog::get("sherd"))
      logger->log(spdlog_level(level), spdlog::string_view_t(line.data(), line.size()));
  } catch (...) {  // the application's sink threw; logging never does
  }
}

}  // namespace sherd
