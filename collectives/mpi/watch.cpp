#include "collectives/mpi/watch.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <deque>
#include <fstream>
#include <system_error>

namespace sherd::mpi {
namespace {

std::string system_text(int error) { return std::generic_category().message(error); }

void require(bool ok, std::string_view what) {
  const int error = errno;
  check<StateError>(ok, "mpi: the watch over the processes failed to {} ({})", what, system_text(error));
}

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

sockaddr_in address(std::uint32_t number, std::uint16_t port) {
  sockaddr_in a{};
  a.sin_family = AF_INET;
  a.sin_addr.s_addr = number;
  a.sin_port = port;
  return a;
}

/// The first bytes of every connection.
struct Hello {
  std::array<char, 16> token;
  std::int32_t process;
};

/// Turns on keep-alive: a machine that is switched off sends no end, while the kernel of a stopped process
/// still answers.
void keep_alive(int fd) {
  const auto set = [fd](int level, int name, int value) {
    ::setsockopt(fd, level, name, &value, sizeof value);
  };
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set(IPPROTO_TCP, TCP_KEEPCNT, 6);
  set(IPPROTO_TCP, TCP_NODELAY, 1);
}

void finish(int fd) {
  keep_alive(fd);
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
}

Descriptor reach(const Door& to, bool same_machine, int process) {
  std::vector<std::uint32_t> numbers;
  if (same_machine) numbers.push_back(htonl(INADDR_LOOPBACK));
  for (std::uint32_t number : to.addresses)
    if (number != 0) numbers.push_back(number);
  for (std::uint32_t number : numbers) {
    Descriptor fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    require(fd.open(), "make a socket");
    const sockaddr_in a = address(number, to.port);
    if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&a), sizeof a) == 0) return fd;
  }
  fail<StateError>(
      "mpi: process {} cannot be reached on its port {} for the watch; let the machines' processes connect",
      process, ntohs(to.port));
}

/// A connection that was accepted and has not sent its whole Hello.
struct Visitor {
  Descriptor socket;
  Hello hello{};
  std::size_t heard = 0;
  bool gone = false;

  /// Receives what has come; true when the Hello is complete.
  bool greets() {
    char* const to = reinterpret_cast<char*>(&hello) + heard;
    const auto got = ::recv(socket.get(), to, sizeof hello - heard, MSG_DONTWAIT);
    if (got > 0) heard += static_cast<std::size_t>(got);
    gone = got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
    return heard == sizeof hello;
  }
};

/// Connections without a Hello that are kept; beyond that the oldest is closed.
constexpr std::size_t most_visitors = 256;

void let_in(int listener, std::deque<Visitor>& visitors) {
  for (;;) {
    Descriptor fd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (fd.open()) {
      visitors.push_back({std::move(fd)});
    } else if ((errno == EMFILE || errno == ENFILE) && !visitors.empty()) {
      visitors.pop_front();
    } else if (errno != EINTR && errno != ECONNABORTED) {
      return;
    }
  }
}

}  // namespace

void Descriptor::close() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

Watch::Watch(int process, int size, Reach reach)
    : process_(process),
      owner_(::getpid()),
      listener_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)),
      bell_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      peers_(static_cast<std::size_t>(size)) {
  require(listener_.open() && bell_.open(), "make a socket");
  sockaddr_in own = address(htonl(reach == Reach::this_machine ? INADDR_LOOPBACK : INADDR_ANY), 0);
  socklen_t length = sizeof own;
  require(::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&own), sizeof own) == 0 &&
              ::listen(listener_.get(), SOMAXCONN) == 0 &&
              ::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&own), &length) == 0,
          "listen");
  door_.port = own.sin_port;
  if (reach == Reach::network) door_.addresses = own_addresses();
  const std::string machine = machine_name();
  std::memcpy(door_.machine.data(), machine.data(), std::min(machine.size(), door_.machine.size() - 1));
  require(::getrandom(door_.token.data(), door_.token.size(), 0) == static_cast<ssize_t>(door_.token.size()),
          "draw a token");
}

void Watch::connect(std::span<const Door> doors) {
  const std::array<char, 16> token = doors[0].token;
  for (int p = 0; p < process_; ++p) {
    const Door& to = doors[static_cast<std::size_t>(p)];
    Descriptor fd = reach(to, to.machine == door_.machine, p);
    const Hello hello{token, process_};
    require(::send(fd.get(), &hello, sizeof hello, MSG_NOSIGNAL) == sizeof hello, "greet a process");
    peers_[static_cast<std::size_t>(p)].socket = std::move(fd);
  }
  welcome_others(token);
  listener_.close();
  for (Peer& peer : peers_)
    if (peer.socket.open()) finish(peer.socket.get());
  // Signals go to the program's own threads.
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { run(); });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

/// Accepts the processes with higher numbers, in whatever order they connect.
void Watch::welcome_others(const std::array<char, 16>& token) {
  std::deque<Visitor> visitors;
  const auto settle = [&](Visitor& visitor) {
    const bool greeted = visitor.greets();
    if (!greeted) return visitor.gone;
    const int process = visitor.hello.process;
    if (visitor.hello.token != token || process <= process_ || process >= static_cast<int>(peers_.size()))
      return true;
    Peer& peer = peers_[static_cast<std::size_t>(process)];
    if (!peer.socket.open()) peer.socket = std::move(visitor.socket);
    return true;
  };
  const auto missing = [&] {
    return std::any_of(peers_.begin() + process_ + 1, peers_.end(),
                       [](const Peer& peer) { return !peer.socket.open(); });
  };
  while (missing()) {
    std::vector<pollfd> waiting = {{listener_.get(), POLLIN, 0}};
    for (const Visitor& visitor : visitors) waiting.push_back({visitor.socket.get(), POLLIN, 0});
    if (::poll(waiting.data(), waiting.size(), -1) < 0) continue;
    let_in(listener_.get(), visitors);
    std::erase_if(visitors, settle);
    while (visitors.size() > most_visitors) visitors.pop_front();
  }
}

Watch::~Watch() {
  if (::getpid() != owner_) {
    if (thread_.joinable()) thread_.detach();
    return;
  }
  stop_.store(true);
  wake();
  if (thread_.joinable()) thread_.join();
}

void Watch::wake() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(bell_.get(), &one, sizeof one);
}

// ---- the rank's side ----

void Watch::queue(int process, const Notice& notice) {
  Peer& peer = peers_[static_cast<std::size_t>(process)];
  notice.write(peer.out);
}

void Watch::send(int process, const Notice& notice) {
  {
    const std::scoped_lock lock(mutex_);
    queue(process, notice);
  }
  wake();
}

void Watch::decide(const Notice& report) {
  {
    const std::scoped_lock lock(mutex_);
    decide_locked(report);
  }
  wake();
}

void Watch::forget(std::uint32_t run) {
  const std::scoped_lock lock(mutex_);
  std::erase_if(decided_, [&](GroupId id) { return id.run <= run; });
}

void Watch::decide_locked(const Notice& report) {
  if (!decided_.insert(report.group).second) return;
  Notice fault = report;
  fault.kind = Notice::Kind::fault;
  for (int member : report.members) {
    if (member == process_) {
      news_.push_back({process_, fault});
      any_news_.store(true, std::memory_order_release);
    } else {
      queue(member, fault);
    }
  }
}

std::vector<Watch::News> Watch::take_news() {
  const std::scoped_lock lock(mutex_);
  any_news_.store(false, std::memory_order_release);
  return std::exchange(news_, {});
}

// ---- the thread ----

void Watch::run() {
  std::vector<pollfd> waiting(peers_.size() + 1);
  for (bool last = false; !last;) {
    last = stop_.load();  // then one more look, which sends what is queued
    waiting[peers_.size()] = {bell_.get(), POLLIN, 0};
    {
      const std::scoped_lock lock(mutex_);
      for (std::size_t p = 0; p < peers_.size(); ++p) {
        const short events = static_cast<short>(peers_[p].out.empty() ? POLLIN : POLLIN | POLLOUT);
        waiting[p] = {peers_[p].socket.get(), events, 0};  // negative ones are skipped
      }
    }
    if (::poll(waiting.data(), waiting.size(), last ? 0 : -1) < 0) continue;
    std::uint64_t rings = 0;
    [[maybe_unused]] const auto got = ::read(bell_.get(), &rings, sizeof rings);
    for (std::size_t p = 0; p < peers_.size(); ++p) {
      const int process = static_cast<int>(p);
      if ((waiting[p].revents & POLLOUT) != 0) write_to(process);
      if ((waiting[p].revents & (POLLIN | POLLHUP | POLLERR)) != 0) {
        while (read_from(process)) {
        }
      }
    }
  }
}

void Watch::write_to(int process) {
  const std::scoped_lock lock(mutex_);
  Peer& peer = peers_[static_cast<std::size_t>(process)];
  const auto sent = ::send(peer.socket.get(), peer.out.data(), peer.out.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent > 0) peer.out.erase(0, static_cast<std::size_t>(sent));
  if (sent < 0 && errno != EAGAIN && errno != EINTR) peer.out.clear();  // `read_from` will find the reason
}

/// Reads once; false when nothing more is there.
bool Watch::read_from(int process) {
  Peer& peer = peers_[static_cast<std::size_t>(process)];
  if (!peer.socket.open()) return false;
  char buffer[4096];
  const auto got = ::recv(peer.socket.get(), buffer, sizeof buffer, MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (got <= 0) {
    lose(process, got == 0 || errno == ECONNRESET
                      ? "its process ended without a word"
                      : fmt::format("the connection to it was lost: {}", system_text(errno)));
    return false;
  }
  peer.in.append(buffer, static_cast<std::size_t>(got));
  std::size_t at = 0;
  try {
    for (Notice notice; Notice::read(peer.in, at, notice);) hear(process, std::move(notice));
  } catch (const StateError& error) {
    lose(process, error.what());
    return false;
  }
  peer.in.erase(0, at);
  return true;
}

void Watch::hear(int process, Notice notice) {
  if (notice.kind == Notice::Kind::report) {
    const std::scoped_lock lock(mutex_);
    decide_locked(notice);
    return wake();
  }
  if (notice.kind == Notice::Kind::goodbye) peers_[static_cast<std::size_t>(process)].said_goodbye = true;
  tell(process, std::move(notice));
}

void Watch::lose(int process, std::string why) {
  Peer& peer = peers_[static_cast<std::size_t>(process)];
  {
    const std::scoped_lock lock(mutex_);
    peer.socket.close();
    peer.out.clear();
  }
  if (peer.said_goodbye) return;
  Notice notice;
  notice.kind = Notice::Kind::died;
  notice.text = std::move(why);
  tell(process, std::move(notice));
}

void Watch::tell(int process, Notice notice) {
  const std::scoped_lock lock(mutex_);
  news_.push_back({process, std::move(notice)});
  any_news_.store(true, std::memory_order_release);
}

}  // namespace sherd::mpi
