// One backward: a list of nodes in reverse order of recording, gradients on their way, leaves with what they
// still wait for.
#pragma once

#include <functional>
#include <unordered_map>
#include <vector>

#include "autograd/autograd.h"
#include "autograd/node.h"

namespace sherd {

class Run {
 public:
  explicit Run(BackwardOptions options);
  ~Run();
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  /// Starts `gradient` at `output`.
  void seed(const Tensor& output, Tensor gradient);
  /// Feeds sinks and `.grad`.
  void backward();
  /// Returns the gradients of `inputs` and feeds nothing.
  std::vector<Tensor> grad(std::span<const Tensor> inputs);
  /// The same, but does not look behind the inputs: a rule of an outer backward differentiates only what it
  /// just built.
  std::vector<Tensor> partial(std::span<const Tensor> inputs);
  void queue(std::function<void()> callback) { callbacks_.push_back(std::move(callback)); }

 private:
  struct Place {  // of a node
    Ref<Node> node;
    InlineVec<Tensor, 1> gradients;  // by output
    bool useful = true;
  };
  struct LeafPlace {
    Ref<Leaf> leaf;
    Tensor gradient;
    int due = 0;  // edges that have not delivered yet
  };

  void collect();
  void announce();
  void prune(std::span<const Tensor> inputs);
  void walk();
  void visit(Place& place);
  Tensors gradients_of(Place& place);
  void deliver(const Edge& edge, Tensor gradient, const Node& from, std::size_t input);
  void settle(const Edge& edge);
  void hand_over(LeafPlace& place);
  void run_leaf_hooks(std::span<const Tensor> inputs);
  void reads_over(const Node& node);
  void abort() noexcept;

  BackwardOptions options_;
  RunInfo info_;
  bool feeding_ = true;
  std::vector<std::pair<Edge, Tensor>> seeds_;
  std::vector<Place> places_;
  std::size_t next_ = 0;  // places before this one are done
  std::vector<LeafPlace> leaves_;
  std::vector<std::shared_ptr<GradSink>> sinks_;
  std::vector<std::function<void()>> callbacks_;
  // partial(): where to stop, and what arrived there.
  struct Stop {
    Edge edge;
    Tensor gradient;
  };
  std::vector<Stop> stops_;
  Stop* stop_at(const Edge& edge);
  // grad(): what to catch on the way, by node and output, or by leaf.
  std::vector<std::vector<Tensor>> caught_;
  Run* outer_ = nullptr;
};

/// The innermost backward under way on this rank, or null.
Run*& current_run();

}  // namespace sherd
