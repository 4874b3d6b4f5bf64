// One backward pass: a list of nodes in reverse order of recording, the gradients that have arrived at each,
// and for each leaf how many are still to come.
#pragma once

#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "autograd/autograd.h"
#include "autograd/node.h"

namespace sherd {

class BackwardPass;

/// What a rank knows of its backward passes.
struct PassState {
  BackwardPass* innermost = nullptr;  ///< of the passes under way; null without one
  std::uint64_t next_number = 1;
  std::optional<std::uint64_t> place{};  ///< in the order of recording, where a backward that feeds leaves is
  const AnyOp* rule = nullptr;           ///< the op whose gradient rule is running, or null
  bool rule_differentiated = false;  ///< the ops that this rule applies are recorded, to be differentiated
};
PassState& pass_state();

/// A scope in which the gradient rule of `rule` runs.
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
  /// `call`, the user's call ("backward", "grad"), opens the messages.
  BackwardPass(std::string_view call, BackwardOptions options);
  ~BackwardPass();
  BackwardPass(const BackwardPass&) = delete;
  BackwardPass& operator=(const BackwardPass&) = delete;

  /// Adds an output and its upstream gradient; an empty one is 1, for a single element. Errors as `backward`.
  void seed(const Tensor& output, Tensor gradient);
  /// The same of what `edge` leads to; the gradient fits it.
  void seed(const Edge& edge, Tensor gradient);
  /// Runs the pass and gives the gradients of leaves to their sinks or `.grad`.
  void backward();
  /// Runs the pass and returns the gradients of `inputs`; sinks and `.grad` get nothing.
  std::vector<Tensor> grad(std::span<const Tensor> inputs);
  /// As `grad`, but only through nodes with sequence numbers from `since` on; older ones count as constants.
  /// For gradient rules that differentiate the ops they have just applied.
  std::vector<Tensor> partial(std::span<const Tensor> inputs, std::uint64_t since);
  /// What is asked for at an edge: the sum of what came from elsewhere `so_far` (or an empty handle) and of
  /// what comes along it, which of several in 16 bits is kept in f32 where the pass around it keeps it so.
  struct Asked {
    Edge edge;
    Tensor so_far{};
    bool in_f32 = false;
  };
  std::vector<Tensor> partial(std::span<const Asked> asked, std::uint64_t since);
  void queue(std::function<void()> callback) { callbacks_.push_back(std::move(callback)); }
  /// `passing` is told the place of the first node that was recorded before `below`, ahead of its hooks and
  /// its rule, and says before which place it is to be told next; 0: no more. Hooks of leaves without a sink
  /// run at the place where they became leaves, in place of the moment at which this graph has their
  /// gradients.
  using Passing = std::function<std::uint64_t(std::uint64_t place)>;
  void watch(std::uint64_t below, Passing passing) {
    watched_below_ = below;
    passing_ = std::move(passing);
  }

  // ---- for the rule of the node that the walk is at, whose op is many ----
  /// Gives leaves their gradients.
  bool feeds() const { return feeding_; }
  /// Input `i` has its gradient (empty: none comes), ahead of what the rule returns, which leaves it empty.
  void hand(std::size_t input, Tensor gradient);
  /// The rule has come to what was recorded at `place`.
  void come_to(std::uint64_t place) {
    if (feeding_) state_.place = place;
    pass_place(place);
  }

  /// What arrived so far for a target of `partial`, which no longer has it. Within the walk.
  Tensor take_target(std::size_t input) { return std::exchange(targets_[target_of_[input]].gradient, {}); }

 private:
  static constexpr std::size_t none = ~std::size_t{0};
  struct Place {  // a node in this pass
    Ref<Node> node;
    InlineVec<Tensor, 1> gradients;  // by output
    Tensor sums{};                   // of the first one over all axes but the last, if its maker gave them
    const Peephole* peephole = nullptr;  // of the node's op
    std::size_t summed = none;           // the input of whose gradient somebody takes sums
    bool useful = true;                  // a gradient that is asked for depends on its rule
    bool asked_for = false;              // the gradient of one of its outputs is asked for
  };
  /// What arrived for a leaf in one dtype; in f32 until all is there, where 16 bits would stop growing.
  struct LeafSum {
    DType dtype{};
    Tensor value{};
  };
  struct LeafPlace {
    Ref<Leaf> leaf;
    LeafSum sum{}, in_other_dtype{};  // the second of a leaf that is read in two
    int due = 0;                      // edges that have not delivered yet
    int uses_in_16_bits = 0;          // of all edges
    bool asked_for = true;
  };
  /// An input of `grad` or `partial`, and what arrived there.
  struct Target {
    Edge edge;
    Tensor gradient{};
    bool in_f32 = false;
  };

  void differentiate();
  void collect();
  void prune();
  void check_frame();
  void announce();
  void walk();
  void visit(Place& place);
  void pass_hooks(Place& place);
  void look_beside(Place& place);
  Tensors sums_so_far(const Place& place);
  bool takes_sums(const Edge& edge);
  Tensors gradients_of(Place& place, Inputs so_far, Tensor* sums);
  Tensor* sum_at(const Edge& edge, DType dtype);
  bool summed_in_f32(const Edge& edge, DType dtype);
  void add(const Edge& edge, DType dtype, Tensor& sum, Tensor gradient);
  Tensor whole(LeafPlace& place);
  void deliver(const Edge& edge, Tensor gradient, const Node& from, std::size_t input, bool whole,
               Tensor sums);
  void settle(const Edge& edge);
  void hand_over(LeafPlace& place);
  void pass_place(std::uint64_t place);
  void call_back();
  std::vector<Tensor> take_results();
  void reads_over(const Node& node);
  void abort() noexcept;

  Edge looked_through(const Edge& edge) const;
  void add_target(const Edge& input);
  Target* target_at(const Edge& edge);
  bool stops_at(const Edge& edge) { return stopping_ && target_at(edge) != nullptr; }
  /// Whether an edge leads out of the part that `partial` differentiates.
  bool leaves(const Edge& edge) const {
    return stopping_ && (edge.leaf || (edge.node && edge.node->sequence < since_));
  }
  void check_alive() const;
  bool wanted(const Edge& edge);

  std::string_view call_;
  BackwardOptions options_;
  PassInfo info_;
  PassState& state_;
  BackwardPass* outer_;
  std::optional<std::uint64_t> outer_place_;
  bool feeding_ = true;    // gives gradients to sinks and `.grad`
  bool stopping_ = false;  // `partial`: goes no further than targets and nodes older than `since_`
  std::uint64_t since_ = 0;
  bool announced_ = false;  // owners of storage expect reads
  std::vector<std::pair<Edge, Tensor>> seeds_;
  std::vector<Place> places_;
  std::size_t next_ = 0;      // places before this one are done
  Inputs so_far_{};           // for the inputs of that node
  std::vector<bool> handed_;  // its inputs that have their gradients already
  std::vector<LeafPlace> leaves_;
  std::vector<LeafPlace*> hooked_;      // of a watched pass: complete, to be handed over; the next one last
  std::vector<Target> targets_;         // each edge once
  std::vector<std::size_t> target_of_;  // by input: its place in targets_
  std::vector<std::shared_ptr<GradSink>> sinks_;
  std::vector<std::function<void()>> callbacks_;
  std::uint64_t watched_below_ = 0;
  Passing passing_;
};

}  // namespace sherd
