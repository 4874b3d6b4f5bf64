// Observing a rank's calls: interceptions, for tests, and logs of their order.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "collectives/group.h"
#include "runtime/context.h"
#include "runtime/subscription.h"

namespace sherd {

/// A call as the rank made it, before it is checked.
struct ObservedCall {
  const Group& group;
  const Collective& collective;
};

/// While this exists, `body` runs in place of every call of the rank that made it: it may look at the call,
/// change it, throw, drop it, or pass it on with `proceed`, which waits if the call waits. Of several the
/// newest runs first, and its `proceed` runs the next. Making a group is a call too (an all_gather); dropping
/// that is a StateError. Destroy it on the thread that made it.
class SHERD_API Interception {
 public:
  using Proceed = std::function<void(const Collective&)>;
  using Body = std::function<void(const ObservedCall&, const Proceed&)>;
  explicit Interception(Body body);
  ~Interception();
  Interception(const Interception&) = delete;
  Interception& operator=(const Interception&) = delete;

 private:
  friend struct CollectiveState;
  Body body_;
};

/// While this exists, it writes down every call that the rank posts, in order: "world channel 1:
/// all_gather(f32, 24 elements) of 'layers.3'". Calls that an interception dropped are not posted.
class SHERD_API OrderLog {
 public:
  OrderLog();
  ~OrderLog();
  OrderLog(const OrderLog&) = delete;
  OrderLog& operator=(const OrderLog&) = delete;
  const std::vector<std::string>& lines() const { return lines_; }

 private:
  friend struct CollectiveState;
  std::vector<std::string> lines_;
};

/// `act` runs before each call of the calling rank, calls that it makes itself left out.
[[nodiscard]] SHERD_API Subscription before_calls(std::function<void()> act);
/// `act` runs when the calling rank has renewed a group.
[[nodiscard]] SHERD_API Subscription after_renewals(std::function<void(const Group&)> act);
/// Number of renewals of groups by the calling rank, of those with other ranks.
SHERD_API std::uint64_t renewals();

/// Number of calls that the calling rank has posted so far, over all its groups.
SHERD_API std::uint64_t collective_calls();

}  // namespace sherd
