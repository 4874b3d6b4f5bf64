// A port for the processes of a test to meet at.
#pragma once

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <random>

namespace sherd::test {

/// One on which nobody listens, below those that the system gives to connections and to whoever asks for any.
inline int free_port() {
  std::random_device random;
  for (;;) {
    const int port = 10000 + static_cast<int>(random() % 20000);
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in own{};
    own.sin_family = AF_INET;
    own.sin_addr.s_addr = htonl(INADDR_ANY);
    own.sin_port = htons(static_cast<std::uint16_t>(port));
    const bool free = ::bind(fd, reinterpret_cast<const sockaddr*>(&own), sizeof own) == 0;
    ::close(fd);
    if (free) return port;
  }
}

}  // namespace sherd::test
