#include "tools/log_lines.h"

#include <spdlog/logger.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <memory>

namespace sherd::tools {

void show_log() {
  const auto logger =
      std::make_shared<spdlog::logger>("sherd", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_level(spdlog::level::warn);
  logger->set_pattern("sherd: %v");
  spdlog::register_logger(logger);
}

}  // namespace sherd::tools
