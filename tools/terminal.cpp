#include "tools/terminal.h"

#include <unistd.h>

#include <cstdlib>

namespace sherd::tools {
namespace {

constexpr const char* terminal_variable = "SHERD_TERMINAL";

}  // namespace

bool is_terminal(int fd) {
  if (::isatty(fd) != 1) return false;
  // Who sits at a terminal has it as the session's own; one that was made to read from is nobody's.
  return ::tcgetpgrp(fd) >= 0 || std::getenv(terminal_variable) != nullptr;
}

void announce_terminal(int fd) {
  if (is_terminal(fd))
    ::setenv(terminal_variable, "1", 1);
  else
    ::unsetenv(terminal_variable);
}

}  // namespace sherd::tools
