// What the tape keeps: a node an op, edges to where its inputs came from.
#pragma once

#include "autograd/sink.h"
#include "runtime/op.h"

namespace sherd {

class Node;

/// Where an input's gradient flows: to output `index` of a node, or to a leaf. Neither means nowhere.
struct Edge {
  Ref<Node> node;
  std::uint32_t index = 0;
  Ref<Leaf> leaf;
  explicit operator bool() const { return node || leaf; }
};

/// What the tape hangs on a tensor that takes part in a graph.
class AutogradRecord final : public TensorExtension {
 public:
  ~AutogradRecord() override;
  /// Output `index` of `node`. `computed_in`: the memory that a write past this tensor would make its history
  /// wrong in, which counts it; null for a view of a leaf, whose values are the leaf's whoever writes them.
  void set_history(Ref<Node> node, std::uint32_t index, Storage* computed_in);
  /// Whether the history says how the values in memory were computed.
  bool computed() const { return counted_in_ != nullptr; }

  Edge edge;       ///< where this tensor's gradient goes: the node that made it, or its leaf
  Ref<Leaf> leaf;  ///< for leaves, also while requires_grad is off: grad and sink live on
  bool requires_grad = false;

 private:
  Storage* counted_in_ = nullptr;  // the tensor's own, which outlives what hangs on the tensor
};

/// A value kept for the gradient, with the storage's version when it was kept.
struct SavedTensor {
  Tensor value;  ///< an alias without history, so that a node never owns itself
  std::uint32_t version = 0;
};

class Node final : public RefCounted {
 public:
  Ref<const AnyOp> op;
  std::uint64_t sequence = 0;  ///< later nodes have larger numbers; edges always point to smaller ones
  bool freed = false;
  InlineVec<Edge, 2> edges;                ///< one an input; empty where no gradient is wanted
  InlineVec<SavedTensor, 2> saved_inputs;  ///< empty handles where not kept
  InlineVec<SavedTensor, 1> saved_outputs;
  Specs specs;                                ///< of the inputs
  Specs outputs;                              ///< of the outputs
  InlineVec<Subscribers<GradHook>, 1> hooks;  ///< by output; may be shorter

  // The backward that is under way over this node, and its place there.
  const void* pass = nullptr;
  std::uint32_t slot = 0;

  /// Lets go of kept values and edges.
  void free();
  /// In place of `RefCounted::drop`: nodes that die of another node's death do so after it, not inside, so
  /// that a graph of any shape and length goes without recursion.
  void drop() const noexcept;

 private:
  mutable const Node* next_dead_ = nullptr;
};

/// The record of a tensor, or null.
inline AutogradRecord* record_of(const Tensor& t) {
  return t.defined() ? static_cast<AutogradRecord*>(t.impl()->extension.get()) : nullptr;
}
/// The record of a tensor, made on first use.
AutogradRecord& ensure_record(const Tensor& t);
/// Whether gradients flow to `t`.
inline bool wants_grad(const Tensor& t) {
  const AutogradRecord* record = record_of(t);
  return record != nullptr && record->requires_grad;
}

}  // namespace sherd
