// What one backward does, made before it computes anything.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "shard/group.h"
#include "shard/record.h"

namespace sherd::shard {

/// The list of a backward: "gather c, gather b, reduce c, ...", over all roots that it reaches. Every step
/// has a place in the order of recording, and is due when the walk passes it: so every rank posts the gathers
/// in this order, at the same places of its program, and the reductions in this order, whatever its own graph
/// reads.
class Plan {
 public:
  struct Step {
    enum class Kind : std::uint8_t { gather, reduce } kind;
    std::shared_ptr<Gathered> gathered;    ///< whose gradients the group's are, of a reduction
    std::uint64_t place;                   ///< due before what was recorded earlier
    std::shared_ptr<const CallName> name;  ///< the group's, which a forward in a hook may change
    bool early = false;                    ///< a gather that follows a reduction
    ParameterGroup& group() const { return gathered->group(); }
  };
  /// What a backward holds, to the place where its first use began: nothing before that reads it.
  struct Held {
    std::shared_ptr<Gathered> gathered;
    std::uint64_t until;
  };

  Plan() = default;
  /// `begun`: groups whose leaves the graph reaches. Sorts `records`.
  Plan(std::vector<Record*>& records, std::span<const std::shared_ptr<ParameterGroup>> begun);

  const std::vector<Step>& steps() const { return steps_; }
  /// All that it concerns, each once, in the order in which the walk lets go of them.
  const std::vector<Held>& held() const { return held_; }
  /// The groups of the reductions, in their order.
  std::vector<std::shared_ptr<ParameterGroup>> groups() const;
  bool concerns(const Gathered& gathered) const { return turn_of_.contains(&gathered); }
  /// Steps up to which are done once `gathered`, which it concerns, is; 0: it has no step.
  std::size_t turn_of(const Gathered& gathered) const { return turn_of_.at(&gathered); }
  std::string text() const;

 private:
  std::vector<Step> steps_;
  std::vector<Held> held_;
  std::unordered_map<const Gathered*, std::size_t> turn_of_;
};

}  // namespace sherd::shard
