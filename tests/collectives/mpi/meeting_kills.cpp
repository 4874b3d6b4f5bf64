// A rank of a meeting over TCP that is killed at its Nth call of the network once the others have let it in,
// or not at all where it makes fewer until all have met. It waits for the others to have started, each of
// which leaves a file in FOLDER: rank 0 does not stay for ranks that come seconds after an end.
//
//   meeting_kills VICTIM N FOLDER      (mpi_test starts it as several processes)
//
// The victim prints "killed TIME", the others "verdict RANK TIME WORDS"; times are nanoseconds of the
// machine.
#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>

#include "sherd.h"

namespace {

int rank = 0, ranks = 1, victim = -1;
std::atomic<long> calls_left = 0, accepted = 0;
std::atomic<bool> let_in = false;
std::mutex
    ending;  // who dies holds it, so that no other thread of the rank goes on from the meeting meanwhile
bool met = false;
std::string folder;

std::string file_of(int of_rank) { return folder + "/" + std::to_string(of_rank); }

void wait_until_all_have_started() {
  for (int other = 0; other < ranks; ++other)
    while (::access(file_of(other).c_str(), F_OK) != 0) ::sched_yield();
}

long long now() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

void one_call() {
  if (rank != victim || !let_in || --calls_left > 0) return;
  const std::scoped_lock lock(ending);
  if (met) return;
  wait_until_all_have_started();
  char line[64];
  const int size = std::snprintf(line, sizeof line, "killed %lld\n", now());
  [[maybe_unused]] const auto written = ::write(STDOUT_FILENO, line, static_cast<std::size_t>(size));
  std::raise(SIGKILL);
}

template <class Function>
Function* real(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

int socket(int domain, int type, int protocol) {
  one_call();
  static const auto call = real<decltype(::socket)>("socket");
  return call(domain, type, protocol);
}
int connect(int fd, const sockaddr* address, socklen_t length) {
  one_call();
  static const auto call = real<decltype(::connect)>("connect");
  return call(fd, address, length);
}
int accept4(int fd, sockaddr* address, socklen_t* length, int flags) {
  one_call();
  static const auto call = real<decltype(::accept4)>("accept4");
  const int got = call(fd, address, length, flags);
  if (got >= 0 && ++accepted == ranks - 1 && rank == 0) let_in = true;
  return got;
}
ssize_t send(int fd, const void* data, std::size_t bytes, int flags) {
  one_call();
  static const auto call = real<decltype(::send)>("send");
  const ssize_t sent = call(fd, data, bytes, flags);
  if (sent > 0) let_in = true;  // of others than rank 0 the first is what they come with
  return sent;
}
ssize_t recv(int fd, void* data, std::size_t bytes, int flags) {
  one_call();
  static const auto call = real<decltype(::recv)>("recv");
  return call(fd, data, bytes, flags);
}
int poll(pollfd* fds, nfds_t count, int time) {
  one_call();
  static const auto call = real<decltype(::poll)>("poll");
  return call(fds, count, time);
}
int setsockopt(int fd, int level, int name, const void* value, socklen_t length) {
  one_call();
  static const auto call = real<decltype(::setsockopt)>("setsockopt");
  return call(fd, level, name, value, length);
}
int getsockopt(int fd, int level, int name, void* value, socklen_t* length) noexcept {
  one_call();
  static const auto call = real<decltype(::getsockopt)>("getsockopt");
  return call(fd, level, name, value, length);
}
int listen(int fd, int backlog) {
  one_call();
  static const auto call = real<decltype(::listen)>("listen");
  return call(fd, backlog);
}
int eventfd(unsigned int value, int flags) {
  one_call();
  static const auto call = real<decltype(::eventfd)>("eventfd");
  return call(value, flags);
}
int epoll_ctl(int epoll, int what, int fd, epoll_event* event) {
  one_call();
  static const auto call = real<decltype(::epoll_ctl)>("epoll_ctl");
  return call(epoll, what, fd, event);
}

}  // extern "C"

int main(int argc, char** argv) {
  if (argc != 4 || std::getenv("RANK") == nullptr) {
    std::puts("usage: meeting_kills VICTIM N FOLDER, under start_processes");
    return 2;
  }
  rank = std::atoi(std::getenv("RANK"));
  ranks = std::atoi(std::getenv("WORLD_SIZE"));
  victim = std::atoi(argv[1]);
  calls_left = std::atol(argv[2]);
  folder = argv[3];
  ::close(::open(file_of(rank).c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
  std::string words = "met";
  try {
    sherd::run_ranks(0, [](sherd::World& world) {
      {
        const std::scoped_lock lock(ending);
        met = true;
      }
      world.group().barrier();
    });
  } catch (const std::exception& error) {
    words = error.what();
  }
  std::printf("verdict %d %lld %s\n", rank, now(), words.c_str());
  std::fflush(stdout);
  return 0;
}
