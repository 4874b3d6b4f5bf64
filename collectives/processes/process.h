// This process as a rank: sending and receiving frames, the state of the other processes, and the lines with
// calls under way.
#pragma once

#include <unistd.h>

#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives/launch.h"
#include "collectives/offer.h"
#include "collectives/processes/circles.h"
#include "collectives/processes/device_route.h"
#include "collectives/processes/watch.h"
#include "collectives/processes/wire.h"
#include "runtime/storage.h"
#include "runtime/waiting.h"

namespace sherd::processes {

class ProcessLine;

/// What the members of a group share, as this process sees it.
struct GroupCore {
  GroupId id;
  std::vector<int> members;  ///< processes
  int rank = 0;              ///< of this process among them
  std::string name;
  std::optional<Fault> fault{};
  std::optional<Notice> reported{};  ///< a fault that was found here and awaits the decision
  std::chrono::steady_clock::time_point reported_at{};
  GroupKey key{};
  std::map<int, Offer> renewals{};       ///< of processes that asked, with their first free number
  std::optional<Fault> renewal_fault{};  ///< the renewal failed: ranks renew groups in different orders
};

/// How a process left a run, in which it posts nothing more.
struct Gone {
  Departure how;
  std::string parting;
  std::vector<int> blames;  ///< ranks of the world at fault in what it had heard
};

/// What is under way though its line is gone, and the memory that it uses until it is over.
struct Abandoned {
  struct Sent {
    int to, tag;
    std::vector<Wire::Ticket> tickets;
    bool withdrawn = false;
  };
  std::shared_ptr<GroupCore> core;
  std::vector<Wire::Ticket> receives;
  std::vector<Sent> sends;
  std::vector<Ref<Storage>> keep;
};

/// A frame on its way.
struct Sending {
  Wire::Ticket ticket;
  Frame frame;
};

/// All memory that the wire may read or write though no line owns it. It goes back when what uses it is over.
/// After a failed test nobody knows whether that will ever be, so `lost` stays as long as the process.
struct Lent {
  std::map<int, std::deque<Sending>> sending;  ///< by process: what one never takes holds up no other's
  std::vector<Abandoned> abandoned;
  std::vector<Ref<Storage>> lost;
  std::vector<Frame> lost_frames;
};
/// Leaves it to the wire, which may use it while the process ends.
struct LeaveToWire {
  void operator()(Lent* lent) const noexcept;
};

/// One a thread; everything here is called on that thread.
class Process : public std::enable_shared_from_this<Process> {
 public:
  /// The calling thread's; connects to the others on the first call.
  static std::shared_ptr<Process> current(const Launch& launch);
  explicit Process(const Launch& launch);
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  /// True in a child of `fork`: the connections belong to the parent, so nothing may be sent.
  bool forked() const { return ::getpid() != owner_; }

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(peers_.size()); }
  Wire& wire() { return *wire_; }
  int spins() const { return spins_; }

  // ---- runs ----
  std::uint32_t begin_run();
  void leave(std::uint32_t run, Departure how, const std::string& reason);

  // ---- groups ----
  std::shared_ptr<GroupCore> make_group(GroupId id, std::vector<int> members, std::string name,
                                        const GroupKey& key);
  /// The group of all processes in this run.
  std::shared_ptr<GroupCore> make_world();
  std::uint32_t next_number() const { return next_number_; }
  void number_used(std::uint32_t number) { next_number_ = std::max(next_number_, number + 1); }
  /// Ends the group with a fault, which all members then throw; if another fault came first, that one.
  void fail(GroupCore& core, Fault fault);
  /// Ends the group of a call with a fault, because it could not be moved to or from `peer`.
  void fail(const LineId& line, std::uint64_t sequence, const Signature& signature, int peer,
            const std::string& failure);
  /// Throws a fault of the group, and remembers what this rank has heard.
  [[noreturn]] void raise(const Fault& fault, const GroupCore& core);
  const Fault* heard() const { return heard_ ? &*heard_ : nullptr; }
  /// This rank uses a group that was renewed: what it heard no longer counts.
  void forget() { heard_.reset(); }
  /// Called while a fault that was found here is not decided: after a while takes the decision over from the
  /// process that should decide, in case that one is stopped.
  void press(GroupCore& core);
  /// The group has failed, if it had not: no call of it goes on.
  void begin_renewal(GroupCore& core);
  void ask_renewal(GroupCore& core);
  /// How `process` left this run, once it died or all frames that it sent have arrived; else empty.
  std::optional<Gone> gone(int process, std::uint32_t run) const;
  /// Whether `process` will take no more of what is sent to it in this run.
  bool deaf(int process, std::uint32_t run) const;

  // ---- lines ----
  void add(const LineId& id, ProcessLine& line);
  void remove(const LineId& id);
  /// Takes over a line without a handle whose calls are under way, until they are done or never can be.
  void adopt(std::unique_ptr<ProcessLine> line);
  /// Takes over what a line leaves that is gone; its memory lives until the wire is done with it. What peers
  /// need no more, since the group has failed or their bodies are over, is withdrawn.
  void abandon(Abandoned left);
  /// Keeps memory for as long as the process: the wire does not say whether it still uses it.
  void lose(std::vector<Ref<Storage>> memory);
  /// Closes connections among devices, whose other ends are closed too.
  void retire(Retired retired);
  /// From now on this rank goes on with its calls while its host waits for a device, for which peers' devices
  /// may wait.
  void go_on_while_waiting();
  /// The line has calls that are over and whose memory the wire still reads.
  void hold(ProcessLine& line) { holding_.push_back(&line); }
  /// Frees the memory of calls that are over, on any line, as far as the wire has read it, and lines without
  /// a handle that are done. Every call of the rank does, so that what is held does not grow with their
  /// number.
  void let_go();

  // ---- moving ----
  Frame take_frame();
  void give_back(Frame frame) { spare_.push_back(std::move(frame)); }
  void send(int to, Frame frame);
  /// The first of two message tags for a long payload to `to`, one a round.
  int next_tags(int to);
  /// Receives frames and notices; says whether there were any. Never waits.
  bool progress();
  bool step_others(const ProcessLine* line);
  /// Throws StateError once nothing can be received for this process.
  void throw_if_deaf() const;

  // ---- waiting ----
  Circles& circles() { return circles_; }
  /// Whether this rank has queued what `waiter` waits for, or has sent it anything that had not come when it
  /// began to wait: that may be what it waits for.
  bool has_done(const Waiter& waiter) const;
  /// Frames and renewals of `process` that have come.
  std::uint64_t received_from(int process) const {
    return peer(process).received + peer(process).renewals_received;
  }
  /// Ends the renewal of a group, on all its members.
  void fail_renewal(GroupCore& core, Fault fault);
  /// Null for a group that has no handle here.
  std::shared_ptr<GroupCore> group(GroupId id) const;
  void tell(int process, const Notice& notice) { watch_->send(process, notice); }

 private:
  struct Peer {
    std::uint64_t sent = 0, received = 0;                    ///< frames
    std::uint64_t renewals_sent = 0, renewals_received = 0;  ///< asked for
    std::uint32_t tags = 0;
    std::optional<Notice> goodbye, died;
    std::map<std::uint32_t, Notice> departed;
  };
  Peer& peer(int process) { return peers_[static_cast<std::size_t>(process)]; }
  const Peer& peer(int process) const { return peers_[static_cast<std::size_t>(process)]; }
  void start(const Launch& launch);
  void settle(std::uint32_t run);
  void go_deaf(std::string why);
  bool receive();
  void deliver(Frame frame);
  void reap();
  void reap(int to, std::deque<Sending>& frames);
  void look_at_abandoned();
  void withdraw(Abandoned& left);
  bool over(std::vector<Wire::Ticket>& tickets, Abandoned& left);
  bool over(Abandoned& left);
  bool to_come(GroupId id) const;
  void forget_dropped();
  void take_news();
  void apply(int process, Notice notice);
  Notice notice(Notice::Kind kind) const;
  void announce(Notice notice);
  bool settled(std::uint32_t run);
  bool all_said_goodbye();
  void close_retired();
  bool close(Retired& retired);

  class Going;

  pid_t owner_ = ::getpid();
  std::unique_ptr<Wire> wire_;  ///< outlives the watch: it ends when all has been said
  bool clean_ = true, in_run_ = false;
  int rank_ = 0, spins_ = 0;
  std::vector<Peer> peers_;
  GroupKey key_;  ///< of process 0; the world of a run has it with the run's number
  std::uint32_t run_ = 0, next_number_ = 0;
  std::optional<Fault> heard_;  ///< the last fault that this rank was told of, see `forget`

  std::unique_ptr<Lent, LeaveToWire> lent_{std::make_unique<Lent>().release()};
  Frame incoming_ = Frame::make();
  std::string deafness_;  ///< why nothing more is received here; empty while it does
  std::vector<Frame> spare_;

  std::map<LineId, ProcessLine*> lines_;
  std::vector<ProcessLine*> holding_;
  std::map<LineId, std::deque<Frame>> mail_;  ///< for lines that this rank has not used yet
  std::vector<std::unique_ptr<ProcessLine>> orphans_;
  std::map<GroupId, std::weak_ptr<GroupCore>> groups_;
  std::map<GroupId, std::vector<Watch::News>> early_;  ///< about groups that are not made here yet
  Circles circles_{*this};
  std::unique_ptr<Watch> watch_;
  std::vector<Retired> retired_;
  std::unique_ptr<Going> going_;
};

/// What to do between two looks for progress: spin, then yield the core, then sleep for microseconds.
class Patience {
 public:
  explicit Patience(int spins) : spins_(spins) {}
  void reset() { looks_ = 0; }
  void pause();
  bool spinning() const { return looks_ < spins_; }
  int looks() const { return looks_; }

 private:
  int spins_, looks_ = 0;
};

}  // namespace sherd::processes
