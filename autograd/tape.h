// The tape: the listener that records ops whose inputs want gradients.
#pragma once

#include <span>
#include <string_view>
#include <utility>

#include "autograd/node.h"
#include "runtime/context.h"

namespace sherd {

/// Records a node for every op with an input that wants a gradient, while grad mode is on; refuses writes
/// that would make gradients wrong (StateError), before anything is written, and keeps a copy of what a write
/// overwrites and its own gradient needs.
class Tape final : public Listener {
 public:
  void before_write(const AnyOp& op, Inputs in) override;
  void after(const AnyOp& op, Inputs in, Outputs out) override;
  void host_read(const Tensor& tensor) override;

  /// The number of the next node that this rank records; larger if a node that it has an edge to (recorded on
  /// another thread) has a number as large.
  std::uint64_t next_sequence() const { return next_sequence_; }
  /// The number of the last node, or of a moment since.
  std::uint64_t last_sequence() const { return next_sequence_ - 1; }
  /// A number for a moment between two nodes, which no node and no other moment has: of two moments the later
  /// one's is larger, whatever the rank records between them.
  std::uint64_t take_sequence() { return moment_ != 0 ? moment_ : next_sequence_++; }
  /// A scope whose moments are at a place that was taken before: a program runs what was recorded there.
  class Moment {
   public:
    Moment(Tape& tape, std::uint64_t place) : tape_(tape), before_(std::exchange(tape.moment_, place)) {}
    ~Moment() { tape_.moment_ = before_; }
    Moment(const Moment&) = delete;
    Moment& operator=(const Moment&) = delete;

   private:
    Tape& tape_;
    std::uint64_t before_;
  };
  /// The first of `count` numbers for nodes that are recorded now.
  std::uint64_t take_sequences(std::uint64_t count) {
    return std::exchange(next_sequence_, next_sequence_ + count);
  }
  /// The number of a node that is recorded now and has `edges`: larger than those of the nodes behind them,
  /// also when these were recorded on another thread.
  std::uint64_t sequence_behind(std::span<const Edge> edges);

 private:
  /// Copies of inputs of the write under way, empty handles for those that it leaves.
  struct Overwritten {
    const AnyOp* by = nullptr;
    Tensors inputs;
  };
  void keep_overwritten(const AnyOp& op, Inputs in, Reads reads);
  /// Input `i` with the value that the op read.
  const Tensor& read_by(const AnyOp& op, Inputs in, std::size_t i) const;

  std::uint64_t next_sequence_ = 1, moment_ = 0;
  Overwritten overwritten_;
};

/// StateError for a view that was taken before a recorded write of its memory, since its history is that of
/// the values before. `user` opens the message.
void check_fresh_view(std::string_view user, const Tensor& t);

}  // namespace sherd
