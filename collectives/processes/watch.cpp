#include "collectives/processes/watch.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>

#include "runtime/error.h"
#include "runtime/held_signals.h"

namespace sherd::processes {
namespace {

/// Of groups whose members may still report the fault that they have not heard of.
constexpr std::size_t most_decided = 256;

}  // namespace

Watch::Watch(int process, int size, Reach reach)
    : process_(process),
      owner_(::getpid()),
      entrance_(reach, "the watch over the processes"),
      bell_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      peers_(static_cast<std::size_t>(size)) {
  check<StateError>(bell_.open(),
                    "processes: the watch over the processes gets no event from the system ({})",
                    system_text(errno));
}

void Watch::connect(std::span<const Door> doors, const Vigil& vigil) {
  std::vector<Descriptor> sockets = entrance_.connect(process_, doors, vigil);
  for (std::size_t p = 0; p < peers_.size(); ++p) peers_[p].socket = std::move(sockets[p]);
  const detail::SignalsHeld held;  // they go to the program's own threads
  thread_ = std::thread([this] { run(); });
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

void Watch::cut(int process) {
  const std::scoped_lock lock(mutex_);
  const Descriptor& socket = peers_[static_cast<std::size_t>(process)].socket;
  if (socket.open()) ::shutdown(socket.get(), SHUT_WR);
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
  // Who reports so late that it is decided again has heard the first decision before the second.
  if (decided_.size() > most_decided) decided_.erase(decided_.begin());
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

}  // namespace sherd::processes
