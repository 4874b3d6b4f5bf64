#include "collectives/launch_report.h"

#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <iterator>

namespace sherd {

bool tell_launcher(const char* socket, const LaunchReport& report, std::string_view text) noexcept {
  sockaddr_un to{};
  to.sun_family = AF_UNIX;
  if (socket == nullptr || std::strlen(socket) >= sizeof to.sun_path) return false;
  std::strcpy(to.sun_path, socket);
  const int fd = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return false;
  text = text.substr(0, most_report_text);
  iovec parts[] = {{const_cast<LaunchReport*>(&report), sizeof report},
                   {const_cast<char*>(text.data()), text.size()}};
  msghdr message{};
  message.msg_name = &to;
  message.msg_namelen = sizeof to;
  message.msg_iov = parts;
  message.msg_iovlen = std::size(parts);
  ssize_t sent = 0;
  do {
    sent = ::sendmsg(fd, &message, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  ::close(fd);
  return sent == static_cast<ssize_t>(sizeof report + text.size());
}

}  // namespace sherd
