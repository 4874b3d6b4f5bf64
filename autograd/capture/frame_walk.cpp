#include "autograd/capture/frame_walk.h"

#include "autograd/capture/effects.h"

namespace sherd {
namespace {

/// While it lives a tracer hears neither hooks nor what sinks do.
class Deaf {
 public:
  explicit Deaf(bool* deaf) : deaf_(deaf) {
    if (deaf_ != nullptr) *deaf_ = true;
  }
  ~Deaf() {
    if (deaf_ != nullptr) *deaf_ = false;
  }
  Deaf(const Deaf&) = delete;
  Deaf& operator=(const Deaf&) = delete;

 private:
  bool* deaf_;
};

}  // namespace

/// By mark, the place of the first node behind it.
std::vector<std::uint64_t> Frame::Walk::first_behind_marks(std::span<const Ref<Node>> nodes) const {
  std::vector<std::uint64_t> first(frame_.marks_.size(), std::uint64_t(-1));
  for (std::size_t n = 0, mark = 0; n < nodes.size(); ++n)
    while (mark < frame_.recipes_[n].marks) first[mark++] = nodes[n]->sequence;
  return first;
}

/// Whether the gradient along an edge is whole at the mark, and somebody waits for it there.
bool Frame::Walk::leaves_at(std::size_t mark, std::size_t edge) const {
  const std::uint32_t target = frame_.edges_[edge];
  const Ref<Leaf>& leaf = frame_.targets_[target].leaf;
  return frame_.leave_at_[target] == mark && leaf && leaf->sink;
}

void Frame::Walk::come_to(std::size_t mark) {
  left_ = mark;
  outer_->come_to(call_.marks[mark]);
}

void Frame::Walk::hand_and_come_to(std::size_t mark, std::span<const Handed> handed) {
  for (const Handed& h : handed) outer_->hand(h.edge, h.result ? program_->take_result(*h.result) : Tensor());
  come_to(mark);
}

/// What leaves there in a program that is traced now, to be filled.
std::shared_ptr<std::vector<Frame::Walk::Handed>> Frame::Walk::repeat_in_program(std::size_t mark) const {
  auto handed = std::make_shared<std::vector<Handed>>();
  repeat_in_frames("back to " + frame_.marks_[mark],
                   [frame = &frame_, mark, handed] { frame->walk_->hand_and_come_to(mark, *handed); });
  return handed;
}

void Frame::Walk::back_to(std::size_t mark, BackwardPass& pass, std::span<const std::size_t> edges,
                          Tracer* tracer) {
  const auto handed = tracer != nullptr ? repeat_in_program(mark) : nullptr;
  const Deaf deaf(tracer != nullptr ? &tracer->deaf : nullptr);
  for (std::size_t k = 0; k < edges.size(); ++k) {
    if (!leaves_at(mark, edges[k])) continue;
    Tensor gradient = pass.take_target(k);
    if (!gradient.defined()) continue;
    if (tracer != nullptr) {
      handed->push_back(
          {static_cast<std::uint32_t>(edges[k]), static_cast<std::uint32_t>(tracer->handed.size())});
      tracer->handed.push_back(tracer->hand(gradient));
    }
    outer_->hand(edges[k], std::move(gradient));
    for (std::uint32_t other = 0; other < frame_.edges_.size(); ++other) {
      if (frame_.edges_[other] != frame_.edges_[edges[k]] || other == edges[k]) continue;  // came along
      if (tracer != nullptr) handed->push_back({other, std::nullopt});
      outer_->hand(other, {});
    }
  }
  come_to(mark);
}

void Frame::Walk::watch(BackwardPass& pass, std::span<const Ref<Node>> nodes,
                        std::span<const std::size_t> edges, Tracer* tracer) {
  if (outer_ == nullptr) return;
  pass.watch(std::uint64_t(-1),
             [this, &pass, edges, tracer, behind = first_behind_marks(nodes)](std::uint64_t place) {
               while (left_ > 0 && place < behind[left_ - 1]) back_to(left_ - 1, pass, edges, tracer);
               return left_ > 0 ? behind[left_ - 1] : 0;
             });
}

}  // namespace sherd
