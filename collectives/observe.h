// Seeing a rank's calls: interception for tests, and the order log.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "collectives/group.h"
#include "runtime/context.h"

namespace sherd {

/// A call as the rank makes it.
struct ObservedCall {
  const Group& group;
  const Collective& collective;
};

/// While it lives, `body` stands in for every call of the calling rank: it may look at the call, change what
/// is passed on, throw, keep the call to itself, or go on with `proceed` (the original, with its wait if the
/// call has one). Several nest, newest first. Making a group is a call too: a rank that keeps its all_gather
/// back gets a StateError. Destroyed on the thread that made it.
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

/// While it lives, it writes down every call of the calling rank, in order:
/// "world channel 1: all_gather(f32, 24 elements) of 'layers.3'".
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

/// Calls that the calling rank has enqueued so far, over all its groups.
SHERD_API std::uint64_t collective_calls();

}  // namespace sherd
