// What was read outside all forwards, over all models of a rank: backwards through any forward before or
// after it may come to it, on some ranks and not on others.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "shard/record.h"

namespace sherd::shard {

class Root;

class Outside {
 public:
  /// A forward of `root` begins: a backward through it may come to what was read before it, in any model, and
  /// to what its own kept.
  void add_to(const std::shared_ptr<Record>& record, const Root& root);
  /// Nobody notices reads of `gathered` from now on: forwards before have them, and those to come.
  void read(Gathered& gathered);
  /// Those of the root may have read it without notice since their last backward.
  void found_kept(const Record::Use& use) { keep(use); }
  /// One through forwards of all roots that has ended. What it could come to is of no later forward.
  void backward_over(std::span<Record* const> records);
  /// After a fault in it nothing that was guessed counts.
  void forget(const Root& root);

 private:
  /// Of uses of a group that begin nothing and end nowhere the first says all.
  void keep(const Record::Use& use);

  std::vector<std::weak_ptr<Record>> records_;  ///< of forwards whose graphs may be there
  std::vector<Record::Use> uses_;               ///< that no backward was over yet
};

}  // namespace sherd::shard
