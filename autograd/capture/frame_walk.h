// A backward of a compiled call that is under way, and what it does at the frame's marks.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "autograd/capture/frame_tracer.h"
#include "autograd/pass.h"

namespace sherd {

/// The backward that a frame runs while this lives. Coming back to a mark it is over all that was recorded
/// behind: gradients that are whole leave for their sinks, and the pass around it hears how far it is.
class Frame::Walk {
 public:
  /// `outer`: the pass whose node the call is; null where nobody hears of marks.
  Walk(Frame& frame, const FrameCall& call, BackwardPass* outer)
      : frame_(frame),
        call_(call),
        outer_(outer),
        left_(frame.marks_.size()),
        before_(std::exchange(frame.walk_, this)) {}
  ~Walk() { frame_.walk_ = before_; }
  Walk(const Walk&) = delete;
  Walk& operator=(const Walk&) = delete;

  /// A program does it, whose effects come to the marks.
  void goes_by(Program::Impl& program) { program_ = &program; }
  /// `pass` does it, through `nodes` by recipe; it wants gradients along `edges` of the call's node, with
  /// which those of their targets' other edges come along. `tracer` hears it, or is null.
  void watch(BackwardPass& pass, std::span<const Ref<Node>> nodes, std::span<const std::size_t> edges,
             Tracer* tracer);

 private:
  /// A result of the program that leaves at a mark; none along an edge whose gradient has left by another.
  struct Handed {
    std::uint32_t edge;
    std::optional<std::uint32_t> result;
  };
  std::vector<std::uint64_t> first_behind_marks(std::span<const Ref<Node>> nodes) const;
  bool leaves_at(std::size_t mark, std::size_t edge) const;
  void back_to(std::size_t mark, BackwardPass& pass, std::span<const std::size_t> edges, Tracer* tracer);
  std::shared_ptr<std::vector<Handed>> repeat_in_program(std::size_t mark) const;
  void hand_and_come_to(std::size_t mark, std::span<const Handed> handed);
  void come_to(std::size_t mark);

  Frame& frame_;
  const FrameCall& call_;
  BackwardPass* outer_;
  std::size_t left_;  // marks to which it still comes
  Program::Impl* program_ = nullptr;
  Walk* before_;
};

}  // namespace sherd
