// Leaves, and where their gradients go.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "runtime/subscription.h"
#include "runtime/tensor.h"

namespace sherd {

class GradSink;

/// A gradient hook: sees a gradient, may return another in its place (an empty tensor leaves it).
using GradHook = std::function<Tensor(const Tensor&)>;

/// What belongs to a leaf and its gradient. Graphs own it, so it may outlive the tensor.
class SHERD_API Leaf final : public RefCounted {
 public:
  explicit Leaf(Spec spec) : spec(std::move(spec)) {}
  Spec spec;                       ///< of the tensor when it became a leaf
  std::uint64_t place = 0;         ///< in the rank's order of recording, at which it became one
  std::string name;                ///< for messages; may be empty
  bool frozen = false;             ///< by `requires_grad_(false)`: gradients that still arrive are dropped
  Tensor grad;                     ///< any shape, dtype and device; empty is none
  std::shared_ptr<GradSink> sink;  ///< null: gradients are added to `grad`
  /// Times that `grad` was clipped or unscaled in place, and the version of its storage after the last.
  std::int64_t scalings = 0, scaled_at = 0;
  Subscribers<GradHook> hooks;
  std::string no_hooks;  ///< why `register_hook` refuses this leaf; empty: it does not
  Subscribers<std::function<void(Leaf&)>> after_accumulate;

  // The BackwardPass that is collecting this leaf's gradient, or null, and the leaf's place in it.
  const void* pass = nullptr;
  std::uint32_t slot = 0;
};

/// One backward, as sinks see it.
struct PassInfo {
  std::uint64_t number;  ///< different for every backward of the rank
};

/// Takes the complete gradients of leaves; a sharded group has one sink for all its parameters. In every
/// backward: `begin` for each of its leaves that the graph reaches, `begun` once when all sinks' leaves have,
/// `accept` at most once for each, then `finish` once, or `abort` if the backward threw. What one of the
/// first four throws, the backward throws.
class SHERD_API GradSink {
 public:
  virtual ~GradSink();
  virtual void begin(PassInfo pass, Leaf& leaf);
  /// Nothing of the backward is computed yet.
  virtual void begun(PassInfo pass);
  /// The complete gradient of `leaf`; never empty. Its memory may be shared: clone it before writing.
  virtual void accept(PassInfo pass, Leaf& leaf, Tensor gradient) = 0;
  virtual void finish(PassInfo pass);
  /// Whether the sink runs the leaves' `after_accumulate` hooks itself, when their gradients are there.
  virtual bool accumulates_later() const;
  /// Drop what this backward gave so far; the next one must work.
  virtual void abort(PassInfo pass) noexcept;
};

}  // namespace sherd
