// Messages to `sherd launch` from the ranks that it started on its machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "runtime/export.h"

namespace sherd {

/// One message; sent as these bytes.
struct LaunchReport {
  enum class Kind : std::uint8_t {
    started,      ///< `value`: process id of the rank's keeper process, to which signals go;
                  ///< `program`: that of the program once it runs, else 0
    born,         ///< `program`: process id of what becomes the program, and of its process group
    unstartable,  ///< there is no such program; `value`: errno
    joining,      ///< the rank now waits for all others
    joined,       ///< all ranks have met: from here on they see each other's end themselves
    ended,        ///< `value`: as from `waitpid`
    followed,     ///< the same, of a rank that its keeper ended because mpirun or the job did
    last_words,   ///< why the rank ends, in the text that follows; `value`: 1 where that is its own fault, 0
                  ///< where another rank's
  };
  Kind kind = Kind::started;
  std::int32_t rank = 0, value = 0, program = 0;
};

/// The environment variable of a rank that holds the path of the launcher's socket.
inline constexpr const char* launch_socket_variable = "SHERD_LAUNCH";

/// What of a text goes with a report, and room for it.
inline constexpr std::size_t most_report_text = 4096;

/// Sends a report, and `text` behind it; false when nothing listens at `socket` (null: none), as for ranks of
/// another launcher or on another machine.
SHERD_API bool tell_launcher(const char* socket, const LaunchReport& report,
                             std::string_view text = {}) noexcept;

}  // namespace sherd
