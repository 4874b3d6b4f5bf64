// Threads and processes may end in any way, and tensors, modules and optimizers after them.
#include <sys/wait.h>

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "tests/catch.h"

namespace {

struct Ended {
  int status;
  std::vector<std::string> lines;
};

Ended run(const std::string& arguments) {
  FILE* pipe = popen((std::string(SHERD_LIFETIMES) + " " + arguments + " 2>&1").c_str(), "r");
  Ended ended{-1, {}};
  char line[1024];
  while (std::fgets(line, sizeof line, pipe) != nullptr)
    ended.lines.push_back(std::string(line).substr(0, std::string(line).find('\n')));
  ended.status = pclose(pipe);
  return ended;
}

}  // namespace

TEST_CASE("programs end well however they end") {
  const std::vector<std::string> ways = run("").lines;
  REQUIRE(ways.size() >= 10);
  for (const std::string& way : ways) {
    const Ended ended = run("'" + way + "'");
    INFO(way);
    for (const std::string& line : ended.lines) UNSCOPED_INFO(line);
    CHECK(ended.status == 0);
    CHECK(ended.lines.empty());
  }
}
