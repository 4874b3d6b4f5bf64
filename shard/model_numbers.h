// Which of the models that ranks share a model is, by the order in which they were made.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "collectives/group.h"
#include "shard/call_name.h"

namespace sherd::shard {

/// A model among ranks since their last renewal.
struct ModelAmong {
  std::weak_ptr<const void> ranks;
  GroupKey key;  ///< theirs, another one since each renewal
  ModelNumber number;
};

/// Whether a `Group::watch` is of `group`.
inline bool watches(const std::weak_ptr<const void>& watch, const Group& group) {
  const std::shared_ptr<const void> its = watch.lock();
  return its && its == group.watch().lock();
}

/// Of one model among the groups of ranks that it has.
class ModelNumbers {
 public:
  /// Which of the models among `ranks` it is. Counts it if it is new to them: when it is made, or first runs
  /// after a renewal.
  ModelNumber among(const Group& ranks);
  /// Those of `parts` are parts of it: they were counted before.
  void take(std::span<ModelNumbers* const> parts);
  /// Of ranks to which it is new.
  void take_over(const ModelNumbers& part);

 private:
  ModelAmong* find(const GroupKey& key);
  std::vector<ModelAmong> known_;
};

}  // namespace sherd::shard
