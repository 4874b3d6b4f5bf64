// Why a process of a job ends: said once, by the rank whose fault it is if there is one.
#pragma once

#include <exception>
#include <string>
#include <string_view>

namespace sherd::tools {

/// What a process says at its end.
struct LastWords {
  std::string text;
  bool own = true;  ///< false where it tells of another rank's fault
};

LastWords last_words(const std::exception& error);

/// The environment variable in which a keeper tells its rank where its own errors go.
inline constexpr const char* launch_errors_variable = "SHERD_LAUNCH_ERRORS";
/// Which file, pipe or terminal stderr is.
std::string identity_of_stderr();

/// Leaves the words to `sherd launch`, which says them once for all ranks. False where this process has to
/// say them itself: nobody launched it so, or its stderr is not the launcher's.
bool leave_to_launcher(const LastWords& words);

/// The words as this process says them; of one among several ranks with its rank.
std::string own_line(const LastWords& words);

}  // namespace sherd::tools
