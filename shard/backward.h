// What a backward gathers and reduces, over all models of the rank that its graph reaches, since they share
// the channels. It depends on the program and the frozen policy alone: gathers follow the reverse of the
// forwards' record, whatever this rank's graph reads, and so do reductions.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "autograd/sink.h"
#include "shard/group.h"

namespace sherd::shard {

/// One forward of a root module that was recorded. The graph behind its outputs keeps it.
class RootCall final : public GradSink {
 public:
  RootCall();
  /// Larger for later ones, over all models of the rank.
  std::uint64_t number() const { return number_; }
  /// Groups by their first use.
  const std::vector<std::weak_ptr<ParameterGroup>>& order() const { return order_; }
  void add(ParameterGroup& group);
  /// Whether any of them is trained.
  bool trainable() const;

  void begin(PassInfo pass, Leaf&) override;
  void accept(PassInfo, Leaf&, Tensor) override {}
  void finish(PassInfo pass) override;
  void abort(PassInfo pass) noexcept override;

 private:
  std::uint64_t number_;
  std::vector<std::weak_ptr<ParameterGroup>> order_;
};

/// The backward that is under way on this rank, as far as it concerns sharded groups.
class Backward {
 public:
  static Backward& current();

  bool under_way() const { return agenda_.run != 0; }
  /// Its graph was counted, and it is being walked.
  bool walking() const { return agenda_.made; }

  // ---- from sinks ----
  void begin(std::uint64_t run, ParameterGroup& group);
  void begin(std::uint64_t run, RootCall& call);
  void arrived(std::uint64_t run);
  void finish(std::uint64_t run);
  void abort(std::uint64_t run) noexcept;

  /// A group is needed: gathers those whose turn is before it, it, and ahead.
  void gather_before(ParameterGroup& group);

 private:
  using Groups = std::vector<std::shared_ptr<ParameterGroup>>;
  struct Agenda {
    std::uint64_t run = 0;
    std::vector<RootCall*> calls;
    Groups begun;
    bool made = false;
    Groups order;                           ///< the reverse of the record: reductions
    Groups to_gather;                       ///< those of `order` that forward did not keep
    std::size_t reduced = 0, gathered = 0;  ///< how many of either had their turn
    Groups reducing;                        ///< posted, in order
    std::size_t over = 0;                   ///< how many of those are known to be through
  };
  void begin_run(std::uint64_t run);
  void make_agenda();
  void add(const std::shared_ptr<ParameterGroup>& group);
  void gather_in_turn(std::size_t index);
  enum class Turn { when_complete, now };
  bool may_reduce(const ParameterGroup& group);
  void reduce_in_turn(Turn turn);

  Agenda agenda_;
};

}  // namespace sherd::shard
