#include "collectives/processes/entrance.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <fstream>
#include <system_error>

#include "runtime/error.h"
#include "runtime/log.h"

namespace sherd::processes {
namespace {

using Clock = std::chrono::steady_clock;

/// For one address.
constexpr std::chrono::seconds connecting_time{5};

/// Differs between machines, also between two with one name.
std::string machine_name() {
  char name[40] = {};
  ::gethostname(name, sizeof name - 1);
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return boot.substr(0, 20) + name;
}

std::array<std::uint32_t, 4> own_addresses() {
  std::array<std::uint32_t, 4> found{};
  std::size_t count = 0;
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return found;
  for (const ifaddrs* i = list; i != nullptr && count < found.size(); i = i->ifa_next)
    if (i->ifa_addr != nullptr && i->ifa_addr->sa_family == AF_INET && (i->ifa_flags & IFF_UP) != 0 &&
        (i->ifa_flags & IFF_LOOPBACK) == 0)
      found[count++] = reinterpret_cast<const sockaddr_in*>(i->ifa_addr)->sin_addr.s_addr;
  ::freeifaddrs(list);
  return found;
}

sockaddr_in address_of(std::uint32_t number, std::uint16_t port) {
  sockaddr_in a{};
  a.sin_family = AF_INET;
  a.sin_addr.s_addr = number;
  a.sin_port = port;
  return a;
}

/// "10.0.0.3:40001", for logs.
std::string peer_of(int fd) {
  sockaddr_in from{};
  socklen_t length = sizeof from;
  char text[INET_ADDRSTRLEN] = "?";
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&from), &length) == 0)
    ::inet_ntop(AF_INET, &from.sin_addr, text, sizeof text);
  return fmt::format("{}:{}", text, ntohs(from.sin_port));
}

/// The first bytes of every connection between two entrances.
struct Hello {
  std::array<char, 16> token;
  std::int32_t process;
};

/// A connection that was accepted and has not sent its whole greeting.
struct Visitor {
  Descriptor socket;
  std::vector<std::byte> said;
  std::size_t heard = 0;
  bool gone = false;

  /// Receives what has come; true when the greeting is complete.
  bool greets() {
    const auto got = ::recv(socket.get(), said.data() + heard, said.size() - heard, MSG_DONTWAIT);
    if (got > 0) heard += static_cast<std::size_t>(got);
    gone = got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
    return heard == said.size();
  }
  void refuse(std::string_view why) const {
    write_log(LogLevel::warning, "processes: a connection from {} is refused, since it {}",
              peer_of(socket.get()), why);
  }
};

/// Connections without a greeting that are kept; beyond that the oldest is closed.
constexpr std::size_t most_visitors = 256;
constexpr std::string_view says_nothing = "says nothing while too many others come";

void let_in(int listener, std::size_t greeting, std::deque<Visitor>& visitors) {
  for (;;) {
    Descriptor fd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (fd.open()) {
      visitors.push_back({std::move(fd), std::vector<std::byte>(greeting)});
    } else if ((errno == EMFILE || errno == ENFILE) && !visitors.empty()) {
      visitors.front().refuse(says_nothing);
      visitors.pop_front();
    } else if (errno != EINTR && errno != ECONNABORTED) {
      return;
    }
  }
}

}  // namespace

std::string system_text(int error) { return std::generic_category().message(error); }

std::array<char, 16> draw_token() {
  std::array<char, 16> token;
  check<StateError>(::getrandom(token.data(), token.size(), 0) == static_cast<ssize_t>(token.size()),
                    "processes: the system gives no random bytes for a token ({})", system_text(errno));
  return token;
}

void Descriptor::close() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

Descriptor listen_on(Reach reach, std::uint16_t& port) {
  Descriptor fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.open()) return fd;
  // A port on which connections of a job before are still being forgotten.
  const int one = 1;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  sockaddr_in own =
      address_of(htonl(reach == Reach::this_machine ? INADDR_LOOPBACK : INADDR_ANY), htons(port));
  socklen_t length = sizeof own;
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&own), sizeof own) != 0 ||
      ::listen(fd.get(), SOMAXCONN) != 0 ||
      ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&own), &length) != 0) {
    const int error = errno;
    fd.close();
    errno = error;
    return fd;
  }
  port = ntohs(own.sin_port);
  return fd;
}

void prepare_socket(int fd) {
  const auto set = [fd](int level, int name, int value) {
    ::setsockopt(fd, level, name, &value, sizeof value);
  };
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set(IPPROTO_TCP, TCP_KEEPCNT, 6);
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
}

namespace {

/// Milliseconds until `end`, as poll takes them; 0 when it has come, -1 where there is none.
int milliseconds_until(Vigil::Deadline end) {
  if (!end) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(*end - Clock::now());
  return static_cast<int>(std::max(left.count(), std::chrono::milliseconds::rep{0}));
}

}  // namespace

bool wait_for(std::vector<pollfd>& own, const Vigil& vigil) {
  const std::size_t count = own.size();
  if (vigil.watch) vigil.watch(own);
  const int patience = milliseconds_until(vigil.end);
  const int found = ::poll(own.data(), own.size(), patience);
  const auto has_news = [](const pollfd& socket) { return socket.revents != 0; };
  if (found > 0 && std::any_of(own.begin() + static_cast<std::ptrdiff_t>(count), own.end(), has_news))
    vigil.look();
  own.resize(count);
  return found > 0 || patience != 0;
}

namespace {

/// Waits for events on a socket; false at the end.
bool wait_for(int fd, short events, const Vigil& vigil) {
  for (std::vector<pollfd> own(1); wait_for(own = {{fd, events, 0}}, vigil);)
    if (own[0].revents != 0) return true;
  return false;
}

/// Calls `move(at, left)`, which returns what `send` does, until all is moved.
template <class Move>
bool move_all(int fd, std::size_t bytes, short events, const Vigil& vigil, const Move& move) {
  for (std::size_t done = 0; done < bytes;) {
    if (!wait_for(fd, events, vigil)) return false;
    const auto moved = move(done, bytes - done);
    if (moved > 0) done += static_cast<std::size_t>(moved);
    if (moved == 0 || (moved < 0 && errno != EAGAIN && errno != EINTR)) return false;
  }
  return true;
}

/// Where nobody listens on a port of this machine that the system gives to connections too, a socket may get
/// that very port and be connected with itself.
bool meets_itself(int fd) {
  sockaddr_in own{}, other{};
  socklen_t own_length = sizeof own, other_length = sizeof other;
  return ::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &own_length) == 0 &&
         ::getpeername(fd, reinterpret_cast<sockaddr*>(&other), &other_length) == 0 &&
         own.sin_port == other.sin_port && own.sin_addr.s_addr == other.sin_addr.s_addr;
}

}  // namespace

Vigil Vigil::at_most(std::chrono::steady_clock::duration time) const {
  Vigil shorter = *this;
  const auto then = Clock::now() + time;
  if (!end || then < *end) shorter.end = then;
  return shorter;
}

Descriptor connect_to(std::uint32_t address, std::uint16_t port, const Vigil& vigil) {
  Descriptor fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.open()) return fd;
  // So that who is to listen there can, also while this socket has the port.
  const int one = 1;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  const sockaddr_in a = address_of(address, port);
  int error = 0;
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&a), sizeof a) != 0) error = errno;
  if (error == EINPROGRESS || error == EINTR) {  // also after a signal it goes on
    socklen_t length = sizeof error;
    if (!wait_for(fd.get(), POLLOUT, vigil.at_most(connecting_time)))
      error = ETIMEDOUT;
    else if (::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0)
      error = errno;
  }
  if (error == 0 && meets_itself(fd.get())) error = ECONNREFUSED;
  if (error != 0) fd.close();
  errno = error;
  return fd;
}

bool send_all(int fd, const void* data, std::size_t bytes, const Vigil& vigil) {
  return move_all(fd, bytes, POLLOUT, vigil, [&](std::size_t at, std::size_t left) {
    return ::send(fd, static_cast<const char*>(data) + at, left, MSG_NOSIGNAL | MSG_DONTWAIT);
  });
}
bool receive_all(int fd, void* data, std::size_t bytes, const Vigil& vigil) {
  return move_all(fd, bytes, POLLIN, vigil, [&](std::size_t at, std::size_t left) {
    return ::recv(fd, static_cast<char*>(data) + at, left, MSG_DONTWAIT);
  });
}

void welcome(int listener, const Guests& guests, const Vigil& vigil) {
  std::deque<Visitor> visitors;
  const auto settle = [&](Visitor& visitor) {
    if (!visitor.greets()) {
      if (visitor.gone) visitor.refuse("ends without the greeting of this job's processes");
      return visitor.gone;
    }
    const std::string why_not = guests.admit(visitor.socket, visitor.said.data());
    if (!why_not.empty()) visitor.refuse(why_not);
    return true;
  };
  const auto start = Clock::now();
  const auto to_name = start + (vigil.end ? std::min<Clock::duration>(before_naming, (*vigil.end - start) / 2)
                                          : before_naming);
  bool named = false;
  while (!guests.enough()) {
    std::vector<pollfd> waiting = {{listener, POLLIN, 0}};
    for (const Visitor& visitor : visitors) waiting.push_back({visitor.socket.get(), POLLIN, 0});
    if (!wait_for(waiting, named ? vigil : vigil.at_most(to_name - Clock::now()))) {
      if (vigil.end && Clock::now() >= *vigil.end) return;
      if (!std::exchange(named, true) && guests.missing)
        write_log(LogLevel::warning, "processes: after {:.2g} s {}",
                  std::chrono::duration<double>(Clock::now() - start).count(), guests.missing());
    }
    let_in(listener, guests.greeting, visitors);
    std::erase_if(visitors, settle);
    for (; visitors.size() > most_visitors; visitors.pop_front()) visitors.front().refuse(says_nothing);
  }
  for (const Visitor& visitor : visitors) visitor.refuse("has not greeted when all had come");
}

Entrance::Entrance(Reach reach, std::string_view whose) : whose_(whose) {
  std::uint16_t port = 0;
  listener_ = listen_on(reach, port);
  check<StateError>(listener_.open(), "processes: {} cannot listen ({})", whose_, system_text(errno));
  door_.port = htons(port);
  if (reach == Reach::network) door_.addresses = own_addresses();
  const std::string machine = machine_name();
  std::memcpy(door_.machine.data(), machine.data(), std::min(machine.size(), door_.machine.size() - 1));
  door_.token = draw_token();
}

Descriptor Entrance::reach(const Door& to, int process, const Vigil& vigil) const {
  std::vector<std::uint32_t> numbers;
  if (to.machine == door_.machine) numbers.push_back(htonl(INADDR_LOOPBACK));
  for (std::uint32_t number : to.addresses)
    if (number != 0) numbers.push_back(number);
  for (std::uint32_t number : numbers)
    if (Descriptor fd = connect_to(number, to.port, vigil); fd.open()) return fd;
  fail<StateError>(
      "processes: {} cannot reach process {} on its port {}; let the machines' processes connect", whose_,
      process, ntohs(to.port));
}

std::vector<Descriptor> Entrance::connect(int process, std::span<const Door> doors, const Vigil& vigil) {
  const auto start = Clock::now();
  const std::array<char, 16> token = doors[0].token;
  std::vector<Descriptor> sockets(doors.size());
  for (int p = 0; p < process; ++p) {
    Descriptor fd = reach(doors[static_cast<std::size_t>(p)], p, vigil);
    const Hello hello{token, process};
    check<StateError>(send_all(fd.get(), &hello, sizeof hello, vigil),
                      "processes: {} cannot greet process {} ({})", whose_, p, system_text(errno));
    sockets[static_cast<std::size_t>(p)] = std::move(fd);
  }
  const auto admit = [&](Descriptor& socket, const std::byte* said) -> std::string {
    Hello hello;  // of those with higher numbers, in any order
    std::memcpy(&hello, said, sizeof hello);
    if (hello.token != token) return "does not know the word of this job's processes";
    if (hello.process <= process || hello.process >= static_cast<int>(doors.size()))
      return fmt::format("greets as process {}, for which nobody waits", hello.process);
    Descriptor& place = sockets[static_cast<std::size_t>(hello.process)];
    if (place.open()) return fmt::format("greets as process {}, which has come", hello.process);
    place = std::move(socket);
    return {};
  };
  const auto first_missing = [&] {
    return std::find_if_not(sockets.begin() + process + 1, sockets.end(),
                            [](const Descriptor& socket) { return socket.open(); });
  };
  const auto missing = [&] {
    return fmt::format("process {} has not connected to {}", first_missing() - sockets.begin(), whose_);
  };
  welcome(listener_.get(), {sizeof(Hello), admit, [&] { return first_missing() == sockets.end(); }, missing},
          vigil);
  listener_.close();
  if (first_missing() != sockets.end())
    fail<StateError>("processes: {} within {:.2g} s; look whether it has ended", missing(),
                     std::chrono::duration<double>(Clock::now() - start).count());
  for (const Descriptor& socket : sockets)
    if (socket.open()) prepare_socket(socket.get());
  return sockets;
}

}  // namespace sherd::processes
