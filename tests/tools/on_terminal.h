// The program with a terminal as its output.
#pragma once

#include <fcntl.h>
#include <pty.h>
#include <sys/wait.h>
#include <unistd.h>
#include <utmp.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/tools/command.h"

namespace sherd::test {

/// Whose terminal the output is: the session's own, as a user's is, or one that was made to be read from.
enum class Terminal { own, nobodys };

/// What `words` write to it in `folder`, until they end well.
inline std::string output_on(Terminal whose, const TempDirectory& folder, Arguments words) {
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  int reader = -1, writer = -1;
  REQUIRE(::openpty(&reader, &writer, nullptr, nullptr, nullptr) == 0);
  const pid_t process = ::fork();
  REQUIRE(process >= 0);
  if (process == 0) {
    ::close(reader);
    const bool ready = whose == Terminal::own ? ::login_tty(writer) == 0 : ::dup2(writer, 1) == 1;
    if (ready && ::chdir(folder.path().c_str()) == 0) ::execv(argv[0], argv.data());
    ::_exit(127);
  }
  ::close(writer);
  std::string text;
  char bytes[4096];
  for (ssize_t count = 0; (count = ::read(reader, bytes, sizeof bytes)) > 0;)
    text.append(bytes, static_cast<std::size_t>(count));
  ::close(reader);
  int status = 0;
  ::waitpid(process, &status, 0);
  INFO(text);
  CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 0));
  return text;
}

/// Its first control character that is no end of a line, or -1.
inline int control_in(const std::string& text) {
  const auto found = std::ranges::find_if(
      text, [](unsigned char c) { return (c < 0x20 && c != '\n' && c != '\t') || c == 0x7f; });
  return found == text.end() ? -1 : static_cast<unsigned char>(*found);
}

}  // namespace sherd::test
