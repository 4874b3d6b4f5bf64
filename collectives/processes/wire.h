// What moves bytes between the processes of a job: implemented over MPI and over sockets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "collectives/launch.h"
#include "collectives/processes/entrance.h"
#include "collectives/processes/frame.h"

namespace sherd::processes {

/// Why something could not be moved, in one line; empty when it could.
using Failure = std::string;

/// One process's end of the connections to all others. Nothing waits but what says so. Frames from one
/// process come in the order in which it sent them, and so do its messages of one tag. Memory that is passed
/// belongs to the wire until `test` says that it is over. Used on one thread.
class Wire {
 public:
  /// Something under way; the wire's own name for it.
  using Ticket = std::uint64_t;

  virtual ~Wire();
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Tags of messages are from 0 to this.
  virtual std::int32_t last_tag() const = 0;
  /// Gathers `bytes` bytes of every process in the order of their ranks; waits. Before all else. StateError.
  virtual void all_gather(const void* own, void* all, std::size_t bytes) = 0;
  /// Calls `connect`, in which all processes connect in another way too, and waits until all have. StateError
  /// when one ends meanwhile.
  virtual void meet(const std::function<void(const Vigil&)>& connect) { connect(Vigil::of(meeting_time)); }
  /// From here on frames come. `lost` is called when the connection to a process has ended by which its
  /// frames came, if that is not how its end is noticed anyway.
  virtual Failure open(std::function<void(int process)> lost) = 0;

  virtual Failure send(int to, const Frame& frame, Ticket& ticket) = 0;
  /// Moves what can be moved, and puts the next frame that came, if there is one, in place of `frame`.
  virtual Failure take(Frame& frame, bool& came) = 0;

  /// Bytes of each message into which a piece of `bytes` is cut, which sender and receiver compute alike.
  virtual std::int64_t message_bytes(std::int64_t bytes) const = 0;
  /// A message, of which the receiver knows the size. One that nobody receives may stay under way.
  virtual Failure send(int to, int tag, const std::byte* data, std::int64_t bytes, Ticket& ticket) = 0;
  virtual Failure receive(int from, int tag, std::byte* data, std::int64_t bytes, Ticket& ticket) = 0;
  /// Whether it is over; then the ticket is, too. After a failure nobody knows.
  virtual Failure test(Ticket& ticket, bool& over) = 0;
  /// Nobody needs what the ticket receives any more; it will be over soon.
  virtual Failure cancel(Ticket& ticket) = 0;
  /// Nothing more is sent to `to` by `tag`, and nobody needs there what was: what is not over of it, `sent`,
  /// will be soon, received or not. Receives there end only by `cancel`.
  virtual void withdraw(int to, int tag, std::span<const Ticket> sent) = 0;
  /// Nothing more is received from `from` by `tag`; what was to be is cancelled.
  virtual void decline(int from, int tag) = 0;

  /// Ends the connections, of which all processes have taken leave; whether they use no memory any more.
  virtual bool end() = 0;
};

/// How often to look before giving the core to another thread, where the machine runs the processes of
/// `launch`.
int spins_for(const Launch& launch);

/// Connects to all processes of `launch`, which all do so; waits for them. StateError when they do not come
/// together, NotImplementedError when this build has no way to reach them.
std::unique_ptr<Wire> connect_wire(const Launch& launch);

}  // namespace sherd::processes
