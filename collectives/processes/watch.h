// Notices when a process of the job ends, and carries notices between processes, on a thread of its own, so
// whatever the rank's thread is doing.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "collectives/processes/entrance.h"
#include "collectives/processes/notice.h"

namespace sherd::processes {

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

  const Door& door() const { return entrance_.door(); }
  /// Connects to all others; every process calls it with the doors of all, in order. Strangers who connect
  /// and send nothing, or a wrong token, delay nobody.
  void connect(std::span<const Door> doors, const Vigil& vigil = Vigil::of(meeting_time));

  void send(int process, const Notice& notice);
  /// Says nothing more to a process, which then counts as dead here, and this one there.
  void cut(int process);
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
  Entrance entrance_;
  Descriptor bell_;
  std::vector<Peer> peers_;
  std::mutex mutex_;  // guards peers_[i].out, news_ and decided_
  std::vector<News> news_;
  std::set<GroupId> decided_;
  std::atomic<bool> any_news_{false}, stop_{false};
  std::thread thread_;
};

}  // namespace sherd::processes
