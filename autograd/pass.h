// One backward: a list of nodes in reverse order of recording, gradients on their way, leaves with what they
// still wait for.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "autograd/autograd.h"
#include "autograd/node.h"

namespace sherd {

class BackwardPass;

/// The rank's backwards.
struct PassState {
  BackwardPass* innermost = nullptr;  ///< of those under way
  std::uint64_t next_number = 1;
  const AnyOp* rule = nullptr;       ///< the op whose gradient is being computed
  bool rule_differentiated = false;  ///< and the ops that it is made of will be differentiated in turn
};
PassState& pass_state();

/// The time of a gradient rule.
class RuleScope {
 public:
  RuleScope(PassState& state, const AnyOp* rule, bool differentiated)
      : state_(state),
        outer_rule_(std::exchange(state.rule, rule)),
        outer_differentiated_(std::exchange(state.rule_differentiated, differentiated)) {}
  ~RuleScope() {
    state_.rule = outer_rule_;
    state_.rule_differentiated = outer_differentiated_;
  }
  RuleScope(const RuleScope&) = delete;
  RuleScope& operator=(const RuleScope&) = delete;

 private:
  PassState& state_;
  const AnyOp* outer_rule_;
  bool outer_differentiated_;
};

class BackwardPass {
 public:
  explicit BackwardPass(BackwardOptions options);
  ~BackwardPass();
  BackwardPass(const BackwardPass&) = delete;
  BackwardPass& operator=(const BackwardPass&) = delete;

  /// Starts `gradient` at `output`.
  void seed(const Tensor& output, Tensor gradient);
  /// Feeds sinks and `.grad`.
  void backward();
  /// Returns the gradients of `inputs` and feeds nothing.
  std::vector<Tensor> grad(std::span<const Tensor> inputs);
  /// The same within what was recorded from sequence number `since` on: a rule of an outer backward
  /// differentiates only what it just built. What is older is constant, whether or not it has a history.
  std::vector<Tensor> partial(std::span<const Tensor> inputs, std::uint64_t since);
  void queue(std::function<void()> callback) { callbacks_.push_back(std::move(callback)); }

 private:
  struct Place {  // of a node
    Ref<Node> node;
    InlineVec<Tensor, 1> gradients;  // by output
    bool useful = true;              // its rule leads to something that is asked for
    bool asked_for = false;          // the gradient of an output is
  };
  struct LeafPlace {
    Ref<Leaf> leaf;
    Tensor gradient;
    int due = 0;  // edges that have not delivered yet
    bool asked_for = true;
  };
  /// An input of `grad` or `partial`, and what arrived there.
  struct Target {
    Edge edge;
    Tensor gradient;
  };

  void differentiate(std::span<const Tensor> inputs);
  void collect();
  void prune();
  void announce();
  void walk();
  void visit(Place& place);
  void pass_hooks(Place& place);
  Tensors gradients_of(Place& place);
  Tensor* sum_at(const Edge& edge);
  void deliver(const Edge& edge, Tensor gradient, const Node& from, std::size_t input);
  void settle(const Edge& edge);
  void hand_over(LeafPlace& place);
  void call_back();
  std::vector<Tensor> take_results();
  void reads_over(const Node& node);
  void abort() noexcept;

  void add_targets(std::span<const Tensor> inputs);
  Target* target_at(const Edge& edge);
  bool stops_at(const Edge& edge) { return stopping_ && target_at(edge) != nullptr; }
  /// Whether an edge leaves what `partial` differentiates.
  bool leaves(const Edge& edge) const {
    return stopping_ && (edge.leaf || (edge.node && edge.node->sequence < since_));
  }
  void check_alive() const;
  bool wanted(const Edge& edge);

  BackwardOptions options_;
  PassInfo info_;
  PassState& state_;
  BackwardPass* outer_;
  bool feeding_ = true;    // sinks and `.grad`
  bool stopping_ = false;  // at the targets, and where the graph is older than `since_`
  std::uint64_t since_ = 0;
  bool announced_ = false;
  std::vector<std::pair<Edge, Tensor>> seeds_;
  std::vector<Place> places_;
  std::size_t next_ = 0;  // places before this one are done
  std::vector<LeafPlace> leaves_;
  std::vector<Target> targets_;         // each edge once
  std::vector<std::size_t> target_of_;  // by input
  std::vector<std::shared_ptr<GradSink>> sinks_;
  std::vector<std::function<void()>> callbacks_;
};

}  // namespace sherd
