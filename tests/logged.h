// What the library logs in a scope.
#pragma once

#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include <memory>
#include <sstream>
#include <string>

namespace sherd::test {

/// An application's logger for the time of a scope.
class Logged {
 public:
  explicit Logged(spdlog::level::level_enum level = spdlog::level::info) {
    const auto logger =
        std::make_shared<spdlog::logger>("sherd", std::make_shared<spdlog::sinks::ostream_sink_mt>(text_));
    logger->set_level(level);
    logger->set_pattern("%l: %v");
    spdlog::register_logger(logger);
  }
  ~Logged() { spdlog::drop("sherd"); }
  Logged(const Logged&) = delete;
  Logged& operator=(const Logged&) = delete;
  std::string text() const { return text_.str(); }

 private:
  std::ostringstream text_;
};

}  // namespace sherd::test
