// One rank's end of a group: what stands behind the handle.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "collectives/group.h"
#include "collectives/transport_home.h"

namespace sherd {

/// How a call waits.
enum class Completion : std::uint8_t { posted, complete };

/// Where a call was posted, which an interception may have changed.
struct PostedCall {
  CollectiveKind kind;
  int peer, channel;
  std::uint64_t sequence;
};

struct CollectiveState;

/// Made and used on its rank's thread; dropped on any.
class GroupEnd final : public std::enable_shared_from_this<GroupEnd> {
 public:
  GroupEnd(std::unique_ptr<Transport> transport, std::string name, std::vector<int> world_ranks);

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& name() const { return name_; }
  std::span<const int> world_ranks() const { return world_ranks_; }
  const std::shared_ptr<Transport>& transport() const { return transport_; }

  /// Checks, shows the call to the rank's interceptors, logs it, and posts it.
  void enqueue(const Collective& collective, Completion completion);
  /// By the last `enqueue`; empty when an interception kept the call to itself.
  const std::optional<PostedCall>& posted() const { return posted_; }
  /// Where a call's order is kept.
  Line& line_of(CollectiveKind kind, int channel, int peer);
  /// Throws StateError on any thread but the rank's.
  void check_thread() const;
  void renew();

 private:
  void post(const Collective& collective, Completion completion);

  std::shared_ptr<TransportHome> home_;
  std::shared_ptr<Transport> transport_;
  std::string name_;
  std::vector<int> world_ranks_;
  int rank_, size_;
  CollectiveState& state_;  // the rank's; lives as long as `home_` is current
  std::optional<PostedCall> posted_;
};

}  // namespace sherd
