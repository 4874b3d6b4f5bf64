// Connections between devices of several processes, through which data moves without the host: what a
// transport needs of a back end whose devices reach those of other processes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "runtime/export.h"
#include "runtime/peer_queue.h"

namespace sherd {

/// What a rank tells the others of its device before they connect. Its bytes travel.
struct NetworkCard {
  std::array<char, 128> key{};  ///< the first rank's names the connections, and no others
  std::uint64_t device = 0;     ///< equal for ranks that share one
  bool reaches = false;         ///< it can be connected with the devices of other processes
  bool shares = false;          ///< also with itself, where ranks share it
  bool sums = false;            ///< its user asks for the connections' own sums, in an order of their own
};

/// A card, and the room that a device has for one connection more, for as long as it is held: what waits
/// there for other ranks runs beside whatever else waits, or ranks could wait for each other for ever.
struct NetworkOffer {
  NetworkCard card{};
  std::shared_ptr<const void> room{};
};

/// Bytes that go to or come from another rank.
struct NetworkMessage {
  enum class Way : std::uint8_t { send, receive };
  Way way;
  int rank;
  std::byte* data;  ///< on this rank's device; read only in a send
  std::size_t bytes;
};

/// `bytes` of every rank become `size` times as many on all of them, in rank order.
struct NetworkGather {
  const std::byte* in;  ///< may be this rank's place within `out`
  std::byte* out;
  std::size_t bytes;
};

/// `count` elements of the sum over all ranks.
struct NetworkSum {
  const std::byte* in;  ///< as many, or, where each rank gets its slice, `size` times as many
  std::byte* out;       ///< may be `in`, or this rank's slice of it
  std::int64_t count;
};
/// What every rank gets of a sum.
enum class NetworkShare : std::uint8_t { whole, slice };

/// One rank's end of the connections among the devices of some ranks, one each. What it is given runs in the
/// order of `queue` and waits there for the other ranks' parts, the host never. Messages from one rank to
/// another arrive in the order in which they were given. Used on the rank's thread. Its end breaks off what
/// is under way, and waits for the device.
class SHERD_API DeviceNetwork {
 public:
  virtual ~DeviceNetwork();
  /// Whether all that was asked for so far is in the queue, the connecting first; nothing else may be given
  /// before. DeviceError when it failed.
  virtual bool ready() = 0;
  /// In whose order it moves: it is this network's alone.
  virtual PeerQueue& queue() = 0;
  /// All of them move together, so their order on different ranks need not fit.
  virtual void exchange(std::span<const NetworkMessage> messages) = 0;
  virtual void gather(std::span<const NetworkGather> gathers) = 0;
  /// Whether `sum` serves: where it exists, and all ranks' cards ask for it.
  virtual bool sums(DType, ReduceOp) const { return false; }
  virtual void sum(DType, ReduceOp, NetworkShare, std::span<const NetworkSum>) {}
  /// Ends what waits for other ranks on the device; what it was to receive is undefined. Any number of times.
  virtual void abort() noexcept = 0;
  /// Whether all that was given is done, and leave is taken of the other ranks, who do so too, unless it was
  /// aborted. Begins with that and never waits: called again until then, when the network may be destroyed
  /// without a wait.
  virtual bool close() = 0;
};

}  // namespace sherd
