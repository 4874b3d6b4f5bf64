// The graph that the tape records: a node an op, with edges to where its inputs came from.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "autograd/sink.h"
#include "runtime/op.h"

namespace sherd {

class Node;

/// Where an input's gradient goes: to output `index` of `node`, or to `leaf`. With neither, nowhere.
struct Edge {
  Ref<Node> node;
  std::uint32_t index = 0;
  Ref<Leaf> leaf;
  explicit operator bool() const { return node || leaf; }
};

/// What the tape attaches to a tensor that takes part in a graph.
class AutogradRecord final : public TensorExtension {
 public:
  ~AutogradRecord() override;
  /// The tensor is output `index` of `node` now. `computed_in` is the tensor's storage: its count of
  /// histories goes up by one until this record is destroyed, so that the tape refuses unrecorded writes
  /// there. Null for a view of a leaf, because writing a leaf unrecorded leaves its gradient right.
  void set_history(Ref<Node> node, std::uint32_t index, Storage* computed_in);
  /// Whether the history computes the values, as opposed to viewing a leaf.
  bool computed() const { return counted_in_ != nullptr; }

  Edge edge;       ///< where this tensor's gradient goes: the node that made it, or its leaf
  Ref<Leaf> leaf;  ///< for leaves, also while requires_grad is off: grad and sink live on
  bool requires_grad = false;

 private:
  Storage* counted_in_ = nullptr;  // the tensor's storage; TensorImpl destroys it after this record
};

/// A value kept for the gradient, with the storage's version when it was kept.
struct SavedTensor {
  Tensor value;  ///< without history: with it a node that keeps its output would own itself
  std::uint32_t version = 0;
};

/// What a node stands for that is many: the graph that eager ops would have recorded in its place. A backward
/// that is recorded itself goes through that graph, and so do all after it.
class Folded {
 public:
  virtual ~Folded();
  /// By output of the node, where its history leads to; empty while the node stands for it.
  std::span<const Edge> ends() const { return ends_; }
  /// Whether another output was computed of this one, so that its gradient is more than what came to the
  /// node.
  virtual bool depends(std::uint32_t output) const = 0;
  /// Makes that graph; the node is left without edges and values.
  void unfold(Node& node);

 private:
  virtual std::vector<Edge> make() = 0;
  std::vector<Edge> ends_;
};

/// One recorded op. Owned by the records of its outputs and by edges of later nodes.
class Node final : public RefCounted {
 public:
  Ref<const AnyOp> op;
  std::uint64_t sequence = 0;  ///< larger than that of every node an edge points to: the topological order
  bool freed = false;          ///< a backward has let go of edges and values; another one throws
  InlineVec<Edge, 2> edges;    ///< one an input; empty where no gradient is wanted
  InlineVec<SavedTensor, 2> saved_inputs;  ///< empty handles where not kept
  InlineVec<SavedTensor, 1> saved_outputs;
  Specs specs;                                ///< of the inputs
  Specs outputs;                              ///< of the outputs
  InlineVec<Subscribers<GradHook>, 1> hooks;  ///< by output; may be shorter
  std::shared_ptr<Folded> folded{};           ///< of a node that stands for many, or null

  // The BackwardPass that is walking this node, or null, and the node's place in it.
  const void* pass = nullptr;
  std::uint32_t slot = 0;

  /// Drops kept values and edges, after a backward without `retain_graph`.
  void free();
  /// In place of `RefCounted::drop`: a node whose last owner is a dying node is deleted after that one, in a
  /// loop, so that a graph of any length goes without recursion.
  void drop() const noexcept;

 private:
  mutable const Node* next_dead_ = nullptr;
};

/// The edge to where the history behind `edge` leads now.
inline Edge followed(Edge edge) {
  while (edge.node && edge.node->folded && !edge.node->folded->ends().empty())
    edge = Edge(edge.node->folded->ends()[edge.index]);
  return edge;
}

/// The edge at which the whole gradient comes: past a node that stands for many, where others of its outputs
/// were computed of this one, so that the node sees a part.
Edge where_whole(const Edge& edge);

/// The record of a tensor, or null.
inline AutogradRecord* record_of(const Tensor& t) {
  return t.defined() ? static_cast<AutogradRecord*>(t.impl()->extension.get()) : nullptr;
}
/// The record of a tensor, made on first use.
AutogradRecord& ensure_record(const Tensor& t);
/// What takes the gradients of `leaf` in place of its `.grad`, or null.
inline GradSink* sink_of(const Tensor& leaf) {
  const AutogradRecord* record = record_of(leaf);
  return record != nullptr && record->leaf ? record->leaf->sink.get() : nullptr;
}
/// The gradients of `leaves`, where they have one, were clipped or unscaled in place: all of them, since they
/// may share a storage.
void note_scaled_gradients(std::span<const Tensor> leaves);
/// Whether `t` requires grad, or was computed from what does.
inline bool wants_grad(const Tensor& t) {
  const AutogradRecord* record = record_of(t);
  return record != nullptr && record->requires_grad;
}

}  // namespace sherd
