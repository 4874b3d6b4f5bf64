// One compiled call: a program for its forward, one for each backward that was asked for, and between them
// what a backward keeps, from which also the graph that eager ops would have recorded can be made.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "autograd/capture/partition.h"
#include "autograd/capture/passes/pass.h"
#include "autograd/capture/program.h"
#include "autograd/capture/words.h"
#include "autograd/compile.h"

namespace sherd {

/// What a call leaves for its backward.
class FrameCall final : public Folded {
 public:
  explicit FrameCall(std::shared_ptr<class Frame> frame) : frame(std::move(frame)) {}

  std::shared_ptr<class Frame> frame;
  std::vector<Edge> edges{};                  // of its node
  std::vector<Program::Impl::Handed> kept{};  // by number
  std::vector<std::uint32_t> versions{};      // of what is kept, when the forward was over
  bool twins = false;                         // two edges lead to one place
  bool as_eager = false;                      // keeps all that eager code does, whatever later ones do
  std::vector<std::uint64_t> marks{};         // places in the order of recording, of the frame's marks
  std::vector<std::uint64_t> segments{};      // before, between and behind them: the first node's place
  std::vector<std::uint64_t> places{};        // of a traced call: each node's own
  RandomKey start{};                          // of the forward's random numbers

 private:
  std::vector<Edge> make() override;
  bool depends(std::uint32_t output) const override;
};

/// What a call keeps for its backward: what eager code would, or of that the cheapest part from which the
/// rest is made again (`partition`).
enum class Keeps : std::uint8_t { as_eager, cheapest };
/// The same, or less where the budget asks for it.
struct Keeping {
  Keeps keeps = Keeps::as_eager;
  MemoryBudget budget{};
  OpCosts costs{};
};

class Frame : public std::enable_shared_from_this<Frame> {
 public:
  /// Its programs go through `passes`, which must outlive it.
  Frame(std::span<const Pass> passes, Keeping keeping) : passes_(passes), keeping_(std::move(keeping)) {}
  /// Runs `body`, whose result stands in any case, and keeps its ops. With `strict` StateError, at its place,
  /// for what cannot be captured; without it `unfit()` says it.
  std::vector<Tensor> trace(const std::vector<Tensor>& inputs,
                            const std::function<std::vector<Tensor>()>& body, bool strict);
  /// Whether what the program found outside is trained as it was, and lies where it lay.
  bool holds() const;
  /// Whether its writes are right now: what it writes is not what it reads as something else.
  bool can_write(const std::vector<Tensor>& inputs) const { return forward_->can_write(inputs); }
  /// The same results by the program.
  std::vector<Tensor> replay(const std::vector<Tensor>& inputs);

  /// Why calls run eagerly; empty where the program does.
  const std::string& unfit() const { return unfit_; }
  void give_up(std::string why) { unfit_ = std::move(why); }
  std::string text() const;
  /// Appends a drawing of each program, the forward's first.
  void draw(std::vector<std::string>& drawings) const;
  /// Adds what its programs are and have.
  void count(CompileStats& stats) const;

  /// What came of the call's results goes to its inputs and to what is trained.
  Tensors backward(FrameCall& call, const GradArgs& args);
  /// The graph that eager ops would have recorded in the call, at their places, with what it kept; ends by
  /// output of the call's node.
  std::vector<Edge> unfold(FrameCall& call);
  /// Whether another output of the call's node was computed of `output`.
  bool depends(std::uint32_t output) const { return depended_on_[output]; }

  Words key;
  std::shared_ptr<const void> form;  ///< of the caller's result

 private:
  class Tracer;
  class Walk;
  struct Graph;
  /// What was heard, after the passes.
  std::unique_ptr<Program::Impl> program_of(Recorded recorded) const;
  /// Bytes that a call and its backward take at most: the workspace that both use in turn, and beside it what
  /// crosses, what the one returns, and what the other has made when.
  static std::int64_t peak_of(const Program::Impl& forward, const Program::Impl& backward,
                              std::span<const Program::Impl::Rounding> roundings);
  /// Where a gradient goes in the frame.
  struct Way {
    enum class To { nowhere, node, target } to = To::nowhere;
    std::uint32_t index = 0, output = 0;  // of a target: the edge of the call's node that it counts for
  };
  struct KeptTensor {
    std::uint32_t number;
    Layout layout;
    DType dtype;
  };
  /// A node that eager ops would record.
  struct Recipe {
    Ref<const AnyOp> op;
    std::vector<Way> ways;
    std::vector<std::optional<KeptTensor>> inputs, outputs;
    Specs specs, results;
    std::size_t marks = 0;  // that came before it
  };
  struct Target {
    std::optional<std::uint32_t> input;  // whose history it is; else a leaf
    Ref<Leaf> leaf{};                    // also of an input
    Spec spec{};
    std::uint32_t edge = 0;  // of the call's node, its first
  };
  struct KeptFrom {
    std::uint32_t storage;                  // of the forward's trace; none: it has no part in it
    Ref<Storage> outside{};                 // neither made by the forward nor given to it
    std::optional<std::uint32_t> region{};  // or a region's, which does not keep it but makes it again
    std::uint32_t index = 0;                // in the region's trace
  };
  /// A region of `recompute`.
  struct Again {
    Trace trace;                                                     // without what was outside
    std::vector<std::pair<std::uint32_t, std::uint32_t>> outside{};  // storage, number of what is kept
  };
  /// A tensor from outside.
  struct Found {
    Tensor tensor;
    bool wanted;  // its gradient
    std::uint64_t storage;
    Layout layout;
  };
  struct Output {
    bool defined = false;
    std::optional<std::uint32_t> input{};     // it is that very tensor
    std::optional<std::uint32_t> twin{};      // or that very output
    Tensor outside{};                         // or this one
    std::optional<std::uint32_t> result{};    // of the program
    std::optional<std::uint32_t> gradient{};  // of the node
    bool computed = false, view = false, alias = false;
  };
  struct Backward {
    Words key;
    std::unique_ptr<Program::Impl> program;             // null: what it does cannot be a program
    std::vector<std::optional<std::uint32_t>> results;  // by edge of the call's node
    std::vector<std::uint32_t> reads;                   // numbers of what is kept
    std::vector<Program::Impl::Rounding> roundings{};   // by the pass around it, of results in their order
  };

  void learn(Tracer& tracer, const std::vector<Tensor>& inputs, const std::vector<Tensor>& outputs,
             std::uint64_t since, FrameCall& call);
  static Graph graph_of(Tracer& tracer, const std::vector<Tensor>& outputs, std::uint64_t since);
  Way way_of(const Edge& edge, const Spec& spec, const Graph& graph, const std::vector<Tensor>& inputs);
  std::uint32_t keep(Tracer& tracer, const Ref<Storage>& storage, FrameCall& call);
  std::uint32_t keep_region(Tracer& tracer, const Storage& storage, FrameCall& call,
                            std::vector<const StorageOwner*>& met);
  void learn_marks(Recorded& recorded);
  std::vector<KeptValue> values_kept(const Tracer& tracer) const;
  void keep_less(std::vector<MadeAgain> parts);
  static Cut cut_of_forward(const std::vector<KeptFrom>& kept);
  void set_forward(std::unique_ptr<Program::Impl> program);
  struct Fitting;
  void fit(const FrameCall& call, const Recorded& backward, Backward& made);
  void check_keeps(const FrameCall& call) const;
  void begin_segment(FrameCall& call) const;
  /// Where in the order of recording the running call has what its trace had there.
  std::uint64_t place_in_call(std::uint64_t traced) const;
  /// A place in the order of recording behind what the inputs were computed by.
  static std::uint64_t sequence_behind(const std::vector<Tensor>& inputs);
  template <class EdgeOf, class PlaceOf>
  std::vector<Ref<Node>> nodes_of(const FrameCall& call, const EdgeOf& edge_of,
                                  const PlaceOf& place_of) const;
  Ref<const AnyOp> op_of(const FrameCall& call, const Ref<const AnyOp>& op) const;
  std::vector<Ref<Storage>> storages_of(const FrameCall& call) const;
  void find_dependences();
  void number_edges();
  void order_edges();
  void learn_nodes(Tracer& tracer, const Graph& graph, const std::vector<Tensor>& inputs, FrameCall& call);
  std::vector<Tensor> learn_outputs(Tracer& tracer, const Graph& graph, const std::vector<Tensor>& inputs,
                                    const std::vector<Tensor>& outputs);
  std::vector<Tensor> run_forward(const std::vector<Tensor>& inputs, FrameCall& call);
  void find_edges(FrameCall& call, const std::vector<Tensor>& inputs) const;
  void attach(const std::shared_ptr<FrameCall>& call, const std::vector<Tensor>& outputs);
  Tensors differentiate(const FrameCall& call, const GradArgs& args, Tracer* tracer = nullptr);
  Backward* find(const Words& words);
  static bool unchanged(const FrameCall& call, const std::vector<std::uint32_t>& numbers);
  Tensors run(Backward& backward, FrameCall& call, const GradArgs& args, const std::vector<Tensor>& given);
  Tensors trace_backward(const FrameCall& call, const GradArgs& args, const std::vector<Tensor>& given,
                         Words words);
  Recorded learn_backward(Tracer& tracer, const FrameCall& call, const std::vector<Tensor>& given,
                          const Tensors& gradients, Backward& made) const;

  std::span<const Pass> passes_;
  Keeping keeping_;
  /// What a choice is made from, until the first backward is known.
  struct ToFit {
    Recorded forward;
    std::vector<KeptValue> values;
  };
  std::unique_ptr<ToFit> to_fit_;
  std::int64_t eager_peak_ = 0;
  std::string unfit_;
  std::size_t hooks_ = 0;
  std::unique_ptr<Program::Impl> forward_;
  std::vector<Recipe> recipes_;        // oldest first
  std::vector<std::size_t> begins_;    // by segment: the number of its first, and behind all the end
  std::vector<std::uint64_t> places_;  // of each, when it was traced
  std::vector<Way> result_ways_;       // by output of the node
  Specs result_specs_;
  std::vector<bool> depended_on_;  // by output of the node: another was computed of it
  std::vector<Target> targets_;
  std::vector<std::uint32_t> edges_;  // of the call's node: each one's target
  std::vector<KeptFrom> kept_;
  std::size_t kept_as_eager_ = 0, regions_as_eager_ = 0;  // the first of them, which eager code has
  std::vector<Again> regions_;
  std::vector<Output> outputs_;            // of the call, then what inputs were set to
  std::vector<std::uint32_t> set_inputs_;  // that show other memory after the call
  std::vector<Found> found_;
  // Marks: where owners of memory do something, whose own the calls that they make are.
  std::vector<std::string> marks_;  // their names
  static constexpr std::size_t none = ~std::size_t{0};
  std::vector<std::size_t>
      leave_at_;                  // by target: the mark at which a backward has its gradient whole, or none
  FrameCall* running_ = nullptr;  // the call whose forward is under way
  std::vector<const std::function<void()>*> begun_;  // in it: how to undo what has not ended
  Walk* walk_ = nullptr;                             // the innermost that is under way
  RandomKey begin_{}, end_{};
  std::list<Backward> backwards_;  // the last used first
};

}  // namespace sherd
