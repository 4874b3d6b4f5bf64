#include "tools/last_words.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <new>
#include <optional>

#include "collectives/launch.h"
#include "collectives/launch_report.h"
#include "runtime/error.h"
#include "runtime/shown.h"
#include "shard/agree.h"

namespace sherd::tools {
namespace {

/// None where the launcher's variables are what the words are about.
std::optional<Launch> launched() {
  try {
    return read_launch([](const char* name) { return std::getenv(name); });
  } catch (const Error&) {
    return {};
  }
}

}  // namespace

LastWords last_words(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return {"out of memory"};
  const bool own = dynamic_cast<const CollectiveError*>(&error) == nullptr &&
                   dynamic_cast<const shard::OfAnotherRank*>(&error) == nullptr;
  return {one_line(error.what()), own};
}

std::string identity_of_stderr() {
  struct stat its{};
  return ::fstat(STDERR_FILENO, &its) == 0 ? fmt::format("{}:{}", its.st_dev, its.st_ino) : "none";
}

bool leave_to_launcher(const LastWords& words) {
  const std::optional<Launch> launch = launched();
  const char* errors = std::getenv(launch_errors_variable);
  LaunchReport report{.kind = LaunchReport::Kind::last_words, .value = words.own ? 1 : 0};
  if (launch) report.rank = launch->rank;
  return launch && tell_launcher(std::getenv(launch_socket_variable), report, words.text) &&
         errors != nullptr && errors == identity_of_stderr();
}

std::string own_line(const LastWords& words) {
  const std::optional<Launch> launch = words.own ? launched() : std::nullopt;
  return launch && launch->size > 1 ? fmt::format("rank {}: {}", launch->rank, words.text) : words.text;
}

}  // namespace sherd::tools
