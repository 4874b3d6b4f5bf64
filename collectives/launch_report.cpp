#include "collectives/launch_report.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace sherd {

bool tell_launcher(const char* socket, const LaunchReport& report) noexcept {
  sockaddr_un to{};
  to.sun_family = AF_UNIX;
  if (socket == nullptr || std::strlen(socket) >= sizeof to.sun_path) return false;
  std::strcpy(to.sun_path, socket);
  const int fd = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return false;
  ssize_t sent = 0;
  do {
    sent =
        ::sendto(fd, &report, sizeof report, MSG_NOSIGNAL, reinterpret_cast<const sockaddr*>(&to), sizeof to);
  } while (sent < 0 && errno == EINTR);
  ::close(fd);
  return sent == static_cast<ssize_t>(sizeof report);
}

}  // namespace sherd
