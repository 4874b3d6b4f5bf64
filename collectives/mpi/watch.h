// Notices when a process of the job ends, and carries notices between processes, on a thread of its own, so
// whatever the rank's thread is doing.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "collectives/mpi/notice.h"

namespace sherd::mpi {

/// The address of a process's listening socket; sent as these bytes.
struct Door {
  std::array<char, 64> machine;
  std::array<std::uint32_t, 4> addresses;  ///< IPv4, network order; 0: none
  std::uint16_t port;                      ///< network order
  std::array<char, 16> token;              ///< random; that of process 0 opens every connection
};

/// Owns a file descriptor; -1 is none.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() { close(); }
  int get() const { return fd_; }
  bool open() const { return fd_ >= 0; }
  void close();

 private:
  int fd_;
};

/// Whether the socket listens on loopback only, or on all addresses.
enum class Reach : std::uint8_t { this_machine, network };

/// A connection to every other process, and a thread that reads them. Only a connection that ends without a
/// goodbye counts as a death: a process that is stopped or busy keeps its connections. StateError where a
/// socket cannot be made or reached.
class Watch {
 public:
  Watch(int process, int size, Reach reach);
  /// Sends what is queued, as far as the peers' buffers take it, and closes the connections. In a child of
  /// `fork` frees memory only: thread and connections are the parent's.
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  const Door& door() const { return door_; }
  /// Connects to all others; every process calls it with the doors of all, in order. Strangers who connect
  /// and send nothing, or a wrong token, delay nobody.
  void connect(std::span<const Door> doors);

  void send(int process, const Notice& notice);
  /// Decides on a group's fault: the first report of a group that comes here is the fault its members throw.
  void decide(const Notice& report);
  /// Forgets what was decided on groups of this run and before, to which nobody listens any more.
  void forget(std::uint32_t run);

  struct News {
    int process;
    Notice notice;
  };
  bool any_news() const { return any_news_.load(std::memory_order_acquire); }
  std::vector<News> take_news();

 private:
  struct Peer {
    Descriptor socket;
    std::string in, out;
    bool said_goodbye = false;
  };

  void welcome_others(const std::array<char, 16>& token);
  void run();
  bool read_from(int process);
  void write_to(int process);
  void hear(int process, Notice notice);
  void lose(int process, std::string why);
  void tell(int process, Notice notice);
  void queue(int process, const Notice& notice);
  void decide_locked(const Notice& report);
  void wake();

  int process_;
  pid_t owner_;
  Door door_{};
  Descriptor listener_, bell_;
  std::vector<Peer> peers_;
  std::mutex mutex_;  // guards peers_[i].out, news_ and decided_
  std::vector<News> news_;
  std::set<GroupId> decided_;
  std::atomic<bool> any_news_{false}, stop_{false};
  std::thread thread_;
};

}  // namespace sherd::mpi
