// What the library logs goes to the logger that the application names, and nowhere else.
#include "runtime/log.h"

#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>

#include "tests/catch.h"
#include "tests/logged.h"

using namespace sherd;
using namespace sherd::test;

TEST_CASE("log: lines go to the application's logger at its level, and are dropped without one") {
  CHECK_NOTHROW(write_log(LogLevel::warning, "{} sheep", 0));
  {
    const Logged logger(spdlog::level::info);
    write_log(LogLevel::debug, "{} sheep", 1);
    write_log(LogLevel::info, "{} sheep", 2);
    write_log(LogLevel::warning, "{} sheep, {{}}", 3);
    CHECK(logger.text() == "info: 2 sheep\nwarning: 3 sheep, {}\n");
  }
  CHECK_NOTHROW(write_log(LogLevel::warning, "{} sheep", 4));
}

TEST_CASE("log: a sink that throws is the application's affair") {
  struct Broken final : spdlog::sinks::base_sink<std::mutex> {
    void sink_it_(const spdlog::details::log_msg&) override { throw std::runtime_error("full"); }
    void flush_() override {}
  };
  const auto logger = std::make_shared<spdlog::logger>("sherd", std::make_shared<Broken>());
  int heard = 0;
  logger->set_error_handler([&](const std::string&) { ++heard; });
  spdlog::register_logger(logger);
  CHECK_NOTHROW(write_log(LogLevel::warning, "a line"));
  spdlog::drop("sherd");
  CHECK(heard == 1);
}
