// Reverse-mode differentiation: backward passes, gradients of some inputs, hooks, sinks.
#pragma once

#include <functional>
#include <initializer_list>
#include <ranges>
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
  /// because it uses an op without a gradient or a value on the host, is a NotImplementedError. What
  /// `backward` leaves in a leaf's `.grad` then holds the graph that holds the leaf, until `.grad` is
  /// cleared: `grad` does not.
  bool create_graph = false;
};

/// Adds the gradient of `outputs`, weighted by `upstream` (one tensor an output, of its shape, dtype and
/// device; empty handles or an empty list: 1, for outputs of one element), to `.grad` of every leaf they
/// depend on, or gives it to the leaf's sink. ValueError, ShapeError, DTypeError or DeviceError for an output
/// or upstream that does not fit; StateError for an output that depends on nothing that requires grad, a
/// graph that was freed, a kept value that was changed in place, or a node that another backward under way is
/// using.
SHERD_API void backward(std::span<const Tensor> outputs, std::span<const Tensor> upstream = {},
                        BackwardOptions options = {});

/// Lets `tensor`, in all of its handles, show the memory of `data`, with its shape, strides and offset;
/// values are written by `copy_`. Views of `tensor` keep the memory from before. Returns `tensor`. DTypeError
/// and DeviceError unless they have one dtype and device; StateError where one of them requires grad or has a
/// history, or an owner keeps its memory (a sharded parameter), and inside `capture` and `recompute`. In a
/// compiled call (`compile`) an input that was given memory of the call's is given new memory by each.
SHERD_API Tensor set_(const Tensor& tensor, const Tensor& data);

/// The gradients of `outputs` with respect to `inputs`, which may be leaves or not, each in memory of its
/// own. Computes only what lies between, frees that unless `retain_graph`, and leaves sinks and `.grad`
/// alone. An input that the outputs do not depend on gets an empty handle. Errors as `backward`; StateError
/// also for an input that does not require grad.
SHERD_API std::vector<Tensor> grad(std::span<const Tensor> outputs, std::span<const Tensor> inputs,
                                   std::span<const Tensor> upstream = {}, BackwardOptions options = {});
inline std::vector<Tensor> grad(const Tensor& output, std::span<const Tensor> inputs,
                                const Tensor& upstream = {}, BackwardOptions options = {}) {
  return grad(std::span(&output, 1), inputs, std::span(&upstream, 1), options);
}
inline std::vector<Tensor> grad(const Tensor& output, std::initializer_list<Tensor> inputs,
                                const Tensor& upstream = {}, BackwardOptions options = {}) {
  return grad(output, std::span(inputs.begin(), inputs.size()), upstream, options);
}
/// Of a range of what is a tensor, such as parameters.
template <std::ranges::input_range R>
  requires(!std::convertible_to<R, std::span<const Tensor>> && TensorLike<std::ranges::range_value_t<R>>)
std::vector<Tensor> grad(const Tensor& output, R&& inputs, const Tensor& upstream = {},
                         BackwardOptions options = {}) {
  std::vector<Tensor> tensors;
  for (const auto& input : inputs) tensors.push_back(input);
  return grad(output, std::span<const Tensor>(tensors), upstream, options);
}

/// `hook` is called with the complete gradient of `tensor` in every backward and may return another to use in
/// its place, of the same shape, dtype and device (else the backward throws ShapeError, DTypeError or
/// DeviceError). Writing the given gradient is a StateError where something else uses it. StateError for a
/// tensor that does not require grad, and for a leaf of which `refuse_hooks` was said.
[[nodiscard]] SHERD_API Subscription register_hook(const Tensor& tensor, GradHook hook);
/// `hook` runs in every backward after the leaf's gradient was added to `.grad`, or was given to its sink.
/// StateError for a tensor that is no leaf.
[[nodiscard]] SHERD_API Subscription register_post_accumulate_hook(const Tensor& leaf,
                                                                   std::function<void(Leaf&)> hook);
/// `callback` runs once, at the end of the backward (or `grad`) that is under way, before that returns; not
/// when it throws. StateError when none is under way.
SHERD_API void queue_backward_callback(std::function<void()> callback);
/// Whether a backward is under way on this rank.
SHERD_API bool in_backward();

/// Gives the leaf's gradients to `sink` in place of its `.grad`; null restores that. `leaf` need not require
/// grad yet. StateError for a tensor that was computed from others.
SHERD_API void set_sink(const Tensor& leaf, std::shared_ptr<GradSink> sink);
/// Gives `to` the gradient, sink, hooks and name of the leaf `from`; nothing where `from` was never a leaf
/// that required grad. For parameters whose memory is replaced; mark `to` with `requires_grad_` too.
SHERD_API void continue_leaf(const Tensor& from, const Tensor& to);
/// From now on leaf `to` has the hooks of leaf `from`, one list for both, in place of its own: for a
/// parameter whose gradient comes by another leaf than the one that shows it. StateError for a tensor that
/// was computed from others.
SHERD_API void share_hooks(const Tensor& from, const Tensor& to);
/// The same of hooks after accumulation.
SHERD_API void share_post_accumulate_hooks(const Tensor& from, const Tensor& to);
/// `register_hook` of `leaf` throws a StateError that gives `why`. StateError for a tensor that was computed
/// from others.
SHERD_API void refuse_hooks(const Tensor& leaf, std::string why);
/// A name for messages about this leaf ("layers.0.weight"). StateError for a tensor that was computed from
/// others.
SHERD_API void set_leaf_name(const Tensor& leaf, std::string name);

/// Largest difference between the gradient of `fn` (one output, summed with fixed weights) and central finite
/// differences, over all elements of `inputs`, relative to max(1, |difference quotient|); NaN where one is
/// NaN. Inputs and output are f64 (DTypeError), on any device with values (DeviceError on `meta`); `inputs`
/// stay as they are. `fn` may take a leaf of `inputs` from elsewhere, as a module takes its parameters.
SHERD_API double gradcheck(const std::function<Tensor(std::span<const Tensor>)>& fn,
                           std::span<const Tensor> inputs, double step = 1e-6);
inline double gradcheck(const std::function<Tensor(std::span<const Tensor>)>& fn,
                        std::initializer_list<Tensor> inputs, double step = 1e-6) {
  return gradcheck(fn, std::span(inputs.begin(), inputs.size()), step);
}

}  // namespace sherd
