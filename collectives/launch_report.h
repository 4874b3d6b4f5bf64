// What `sherd launch` hears of the ranks that it started on its machine.
#pragma once

#include <cstdint>

#include "runtime/export.h"

namespace sherd {

/// One message, as it travels.
struct LaunchReport {
  enum class Kind : std::uint8_t {
    started,      ///< `value`: process id of the rank's keeper, which is to get the rank's signals;
                  ///< `program`: that of the program, which is its process group's too
    unstartable,  ///< there is no such program; `value`: errno
    joining,      ///< the rank now waits for all others
    joined,       ///< all ranks have met: from here on they see each other's end themselves
    ended,        ///< `value`: as from `waitpid`
  };
  Kind kind = Kind::started;
  std::int32_t rank = 0, value = 0, program = 0;
};

/// Names the launcher's socket in a rank's environment.
inline constexpr const char* launch_socket_variable = "SHERD_LAUNCH";

/// False when nobody listens at `socket`, which may be null: another launcher's rank, or one on another
/// machine.
SHERD_API bool tell_launcher(const char* socket, const LaunchReport& report) noexcept;

}  // namespace sherd
