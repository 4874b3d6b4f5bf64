// What a `Group` points to: one rank's side of a group.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "collectives/group.h"
#include "collectives/transport_home.h"

namespace sherd {

/// `posted`: the call returns when it is posted; `queued`: not even then, while its channel is full;
/// `complete`: when outputs hold their values and inputs are free.
enum class Completion : std::uint8_t { posted, queued, complete };

/// The call as it was posted; an interception may have passed on another than it got.
struct PostedCall {
  CollectiveKind kind;
  int peer, channel;
  std::uint64_t sequence;
};

struct CollectiveState;

/// One rank's side of a group. Made and used on its rank's thread (StateError); destroyed on any.
class GroupEnd final : public std::enable_shared_from_this<GroupEnd> {
 public:
  GroupEnd(std::unique_ptr<Transport> transport, std::string name, std::vector<int> world_ranks);

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& name() const { return name_; }
  std::span<const int> world_ranks() const { return world_ranks_; }
  const std::shared_ptr<Transport>& transport() const { return transport_; }

  /// Gives the call to the rank's interceptions, newest first; validates, counts, logs and posts what they
  /// pass on.
  void enqueue(const Collective& collective, Completion completion);
  /// What the last `enqueue` posted; empty when an interception did not pass the call on.
  const std::optional<PostedCall>& posted() const { return posted_; }
  /// The line on which a call of this kind is posted: the channel's, or for send and recv that of the pair of
  /// ranks.
  Line& line_of(CollectiveKind kind, int channel, int peer);
  /// Throws StateError on any thread but the rank's.
  void check_thread() const;
  void renew();
  /// Whether something of this rank looks at each of its calls.
  bool observed() const;

 private:
  PostedCall post(const Collective& collective, Completion completion);

  std::shared_ptr<TransportHome> home_;
  std::shared_ptr<Transport> transport_;
  std::string name_;
  std::vector<int> world_ranks_;
  int rank_, size_;
  CollectiveState& state_;  // in the rank's Context; valid while `home_` is current
  std::optional<PostedCall> posted_;
};

}  // namespace sherd
