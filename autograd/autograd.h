// Reverse mode: what `backward` is made of, and the calls around it.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "autograd/sink.h"
#include "runtime/context.h"
#include "runtime/subscription.h"

namespace sherd {

struct BackwardOptions {
  bool retain_graph = false;  ///< keep values and edges for another backward
  /// Record the gradients' own ops; implies retain_graph. A gradient that cannot be differentiated again,
  /// because it uses an op without a gradient or a value on the host, is a NotImplementedError.
  bool create_graph = false;
};

/// Adds the gradient of `outputs`, weighted by `upstream` (empty: one, for single elements), to every leaf
/// they depend on.
SHERD_API void backward(std::span<const Tensor> outputs, std::span<const Tensor> upstream = {},
                        BackwardOptions options = {});

/// The gradients of `outputs` with respect to `inputs`, which may be leaves or not, each in memory of its
/// own. Computes only what lies between them, keeps nothing of it, and feeds no sink and no `.grad`. An input
/// that the outputs do not depend on gets an empty tensor.
SHERD_API std::vector<Tensor> grad(std::span<const Tensor> outputs, std::span<const Tensor> inputs,
                                   std::span<const Tensor> upstream = {}, BackwardOptions options = {});
inline std::vector<Tensor> grad(const Tensor& output, std::span<const Tensor> inputs,
                                const Tensor& upstream = {}, BackwardOptions options = {}) {
  return grad(std::span(&output, 1), inputs, std::span(&upstream, 1), options);
}

/// `hook` sees the complete gradient of `tensor` in every backward and may return another in its place, of
/// the same shape, dtype and device (else the backward throws ShapeError, DTypeError or DeviceError). It must
/// not write the one it is given while others use it (StateError).
[[nodiscard]] SHERD_API Subscription register_hook(const Tensor& tensor, GradHook hook);
/// `hook` runs after a leaf's gradient of a backward was added to `.grad`.
[[nodiscard]] SHERD_API Subscription register_post_accumulate_hook(const Tensor& leaf,
                                                                   std::function<void(Leaf&)> hook);
/// Runs once at the end of the backward (or `grad`) that is under way, before it returns; StateError when
/// none is.
SHERD_API void queue_backward_callback(std::function<void()> callback);
/// Whether a backward is under way on this rank.
SHERD_API bool in_backward();

/// Sends the leaf's gradients to `sink` instead of its `.grad`; null restores that.
SHERD_API void set_sink(const Tensor& leaf, std::shared_ptr<GradSink> sink);
/// Makes `to` go on as the leaf that `from` is: with its gradient, sink, hooks and name. For parameters whose
/// memory is replaced.
SHERD_API void continue_leaf(const Tensor& from, const Tensor& to);
/// A name for messages about this leaf ("layers.0.weight").
SHERD_API void set_leaf_name(const Tensor& leaf, std::string name);

/// Largest difference between the gradient of `fn` (one output, summed with fixed weights) and central finite
/// differences, over all elements of `inputs` (f64 with values, on any device: DTypeError, DeviceError),
/// relative to max(1, |value|).
SHERD_API double gradcheck(const std::function<Tensor(std::span<const Tensor>)>& fn,
                           std::span<const Tensor> inputs, double step = 1e-6);

}  // namespace sherd
