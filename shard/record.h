// What one forward of a root used, in order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "autograd/recompute.h"
#include "shard/gradients.h"

namespace sherd::shard {

class Gathered;
class Root;

/// The list of a forward: the next one gathers ahead by it, and a backward's plan is made of it. The graph
/// behind the forward's outputs keeps it, as the sink of a mark in it.
class Record final : public EngineSink {
 public:
  enum class Moment : std::uint8_t {
    begin,  ///< of a module
    end,
    read,     ///< outside its module, or the program asked for it
    tied,     ///< to a parameter below the root, so that an op in it may read it
    kept,     ///< by forwards of the root before it, or by policy
    outside,  ///< read outside all forwards, in any model
  };
  struct Use {
    std::weak_ptr<Gathered> gathered;
    Moment moment;
    std::uint64_t place;  ///< in the rank's order of recording
    bool planned;         ///< a backward will ask for it: for gradients, or to run a region again
    std::shared_ptr<const RecordedRegion> region{};  ///< that it is in, or null
    std::uint64_t freed_at = std::uint64_t(-1);      ///< place; the last: not by the end of the forward
    std::uint64_t since = std::uint64_t(-1);  ///< place from which on it was kept before, without notice

    /// The first place at which a backward that comes to it may read the group.
    std::uint64_t first_read() const { return std::min(place, since); }
    /// The last place at which a backward that comes to it may read the group. In a region all is read again
    /// from its end on, and until it was freed it could be read without anybody noticing.
    std::uint64_t last_read() const { return std::max({place, region ? region->end : 0, freed_at}); }
  };
  /// `number`: larger for later ones, over all models of the rank.
  explicit Record(std::uint64_t number) : number_(number) {}
  std::uint64_t number() const { return number_; }
  const std::vector<Use>& uses() const { return uses_; }
  /// Those of the forward itself, which the next one is compared with: not those that it found.
  std::span<const Use> listed() const { return std::span(uses_).subspan(found_); }
  void begin_list() { found_ = uses_.size(); }
  /// At this moment.
  static Use use_of(Gathered& gathered, Moment moment);
  static std::uint64_t next_place();
  void add(Use use) { uses_.push_back(std::move(use)); }
  void add(Gathered& gathered, Moment moment) { add(use_of(gathered, moment)); }
  bool has(const Use& use) const {
    return std::ranges::any_of(uses_, [&](const Use& u) {
      return u.place == use.place && u.gathered.lock() == use.gathered.lock();
    });
  }
  /// After the forward: graphs that keep the groups of its record keep this one too.
  void add_unless_used(const Use& use);
  /// Its last use ends; or, where it is read after the forward, has no end.
  void freed(const Gathered& gathered);
  void read_later(const Gathered& gathered) { set_freed_at(gathered, std::uint64_t(-1)); }
  /// Whether a backward has anything to do in `root`, whose forward it is, and whether anything there is
  /// trained: not for what was read of other models, which gives the outputs no history.
  bool planned(const Root& root) const;
  bool trainable(const Root& root) const;

  void begin(PassInfo pass, Leaf&) override;
  void accept(PassInfo, Leaf&, Tensor) override {}

 private:
  /// What a graph holds.
  struct Kept {
    std::shared_ptr<Record> record;
    std::vector<std::shared_ptr<Gathered>> gathered{};
  };
  friend std::shared_ptr<GradSink> with_groups(const std::shared_ptr<Record>& record);
  void set_freed_at(const Gathered& gathered, std::uint64_t place);
  template <class F>
  bool any_of(const Root& root, F&& holds) const;

  std::uint64_t number_;
  std::vector<Use> uses_;
  std::size_t found_ = 0;
  std::weak_ptr<Kept> kept_;  ///< by graphs
};

/// The record with the groups that it names, for a graph: a rank whose own reads none of a group reduces it
/// with the others, also when the module is gone. A root has the record alone, since groups have their root.
std::shared_ptr<GradSink> with_groups(const std::shared_ptr<Record>& record);

}  // namespace sherd::shard
