// Leaves, and where their gradients go.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "runtime/subscription.h"
#include "runtime/tensor.h"

namespace sherd {

class GradSink;

/// A gradient hook: sees a gradient, may return another in its place (an empty tensor leaves it).
using GradHook = std::function<Tensor(const Tensor&)>;

/// What a leaf's gradient needs and what outlives the tensor while a graph refers to it.
class SHERD_API Leaf final : public RefCounted {
 public:
  explicit Leaf(Spec spec) : spec(std::move(spec)) {}
  Spec spec;                       ///< of the tensor when it became a leaf
  std::string name;                ///< for messages; may be empty
  bool frozen = false;             ///< `requires_grad_(false)` since: what still arrives is dropped
  Tensor grad;                     ///< a free slot: any shape, dtype and device; empty is none
  std::shared_ptr<GradSink> sink;  ///< null: gradients are added to `grad`
  Subscribers<GradHook> hooks;
  Subscribers<std::function<void(Leaf&)>> after_accumulate;

  // The backward that is under way, and this leaf's place in it.
  const void* pass = nullptr;
  std::uint32_t slot = 0;
};

/// One backward, as sinks see it.
struct PassInfo {
  std::uint64_t number;  ///< different for every backward of the rank
};

/// Takes the complete gradients of leaves. A sharded group has one for all its parameters. Per backward:
/// `begin` for each of its leaves that the graph reaches, `accept` at most once for each, then `finish` once,
/// or `abort` if the backward threw.
class SHERD_API GradSink {
 public:
  virtual ~GradSink();
  virtual void begin(PassInfo pass, Leaf& leaf);
  /// The complete sum for `leaf`; never empty. Others may see its memory: to write it, clone it.
  virtual void accept(PassInfo pass, Leaf& leaf, Tensor gradient) = 0;
  virtual void finish(PassInfo pass);
  /// Drop what is partial; the next backward must work.
  virtual void abort(PassInfo pass) noexcept;
};

}  // namespace sherd
