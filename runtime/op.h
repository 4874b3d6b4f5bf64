// What an op is. A value type in one file says what it computes, for which dtypes, and what its gradient is;
// the concepts here turn a missing rule into a compile error, and `OpModel` erases the type so that one door
// serves every op, users' too.
#pragma once

#include <concepts>
#include <string>
#include <string_view>
#include <type_traits>
#include <typeindex>

#include "runtime/forward.h"
#include "runtime/tensor.h"

namespace sherd {

/// Tag types that pick an op's kernel.
struct Cpu {};
struct Cuda {};
/// An op with `run(Meta, ...)` acts even where there are no values; all others only infer there.
struct Meta {};

using Specs = InlineVec<Spec, 2>;
using SpecSpan = std::span<const Spec>;

/// What a gradient rule is given. Tensors that were not kept are empty handles; shapes are always there.
struct GradArgs {
  Inputs gy;               ///< gradient of each output; empty where nothing flows
  Inputs inputs, outputs;  ///< kept values, as `reads` declares
  SpecSpan specs;          ///< of every input
  Mask needs;              ///< inputs whose gradient is wanted
  bool create_graph;       ///< the rule's own ops are being recorded
  bool need(std::size_t i) const { return has(needs, i); }
};

template <class O>
concept OpValue = std::copyable<O> && std::equality_comparable<O> && requires {
  { O::name } -> std::convertible_to<std::string_view>;
};

/// `static constexpr bool differentiable = false` says that an op has no gradient on purpose.
template <class O>
concept NotDifferentiable = requires { requires O::differentiable == false; };

/// A gradient written in ops: one entry an input, empty where not needed.
template <class O>
concept HasGrad = requires(const O op, const GradArgs& g) {
  { op.grad(g) } -> std::same_as<Tensors>;
  requires requires {
    { O::reads } -> std::convertible_to<Reads>;
  } || requires(Mask m) {
    { op.reads(m) } -> std::same_as<Reads>;
  };
};

/// The same op written in other ops: fallback on devices without a kernel, gradient, oracle, decomposition.
template <class O>
concept HasReference = requires(const O op, Inputs in) {
  { op.reference(in) } -> std::same_as<Tensors>;
};

/// An op whose output is a view of input 0. `view` computes the layout.
template <class O>
concept ViewOp = OpValue<O> && requires(const O op, const Tensor& x) {
  { op.view(x) } -> std::same_as<Layout>;
} && HasGrad<O>;

/// An op with kernels: `infer` checks and names the outputs, `run` computes them. An input that was not given
/// is `Spec::none()`.
template <class O>
concept StructuralOp = OpValue<O> && requires(const O op, SpecSpan specs, Inputs in, Outputs out) {
  { op.infer(specs) } -> std::same_as<Specs>;
  op.run(Cpu{}, in, out);
} && (HasGrad<O> || HasReference<O> || NotDifferentiable<O>);

/// A structural op that writes some inputs (`mutates` names them, or `writes(i)` says so) and returns those,
/// in order; `infer` only checks and returns nothing.
template <class O>
concept MutatingOp = StructuralOp<O> && (requires { { O::mutates } -> std::convertible_to<Mask>; } ||
                                         requires(const O op, std::size_t i) { { op.writes(i) } -> std::same_as<bool>; });

/// An op value with its type erased. Lives on the caller's stack during a call; `keep` makes a copy that may
/// stay.
class SHERD_API AnyOp : public RefCounted {
 public:
  ~AnyOp() override;
  virtual std::string_view name() const = 0;
  /// The name and the fields, as the trace prints them.
  virtual std::string text() const = 0;
  virtual Ref<const AnyOp> keep() const = 0;
  virtual bool equals(const AnyOp& other) const = 0;

  /// Whether the op writes any of its inputs.
  virtual bool mutating() const { return false; }
  /// Whether it writes this input (and returns it as an output; written inputs are the outputs, in order).
  virtual bool writes(std::size_t) const { return false; }
  virtual bool is_view() const { return false; }
  virtual bool crosses_devices() const { return false; }
  /// Checks the inputs and makes the outputs: views, the written inputs, or uninitialised memory.
  virtual void prepare(Inputs in, Tensors& out) const = 0;
  /// Computes the outputs.
  virtual void run(Device device, Inputs in, Outputs out) const = 0;

  virtual bool differentiable() const = 0;
  virtual Reads reads(Mask needs) const = 0;
  virtual Tensors grad(const GradArgs& args) const = 0;
};

namespace detail {

/// Fields print as name=value when the op names them: `void fields(auto&& on) const { on("axis", axis); }`.
template <class O>
std::string op_text(const O& op) {
  std::string text(O::name);
  if constexpr (requires { op.fields([](std::string_view, const auto&) {}); }) {
    std::string inside;
    op.fields([&](std::string_view name, const auto& value) {
      if (!inside.empty()) inside += ", ";
      inside += fmt::format("{}={}", name, value);
    });
    text += "[" + inside + "]";
  }
  return text;
}

/// Runs the backend's kernel for an op type, or says that there is none.
SHERD_API bool run_backend_kernel(std::type_index type, const void* op, Device device, Inputs in,
                                  Outputs out);
[[noreturn]] SHERD_API void refuse_device(std::string_view op, Device device);
/// Copies the reference's results into the outputs that were allocated.
SHERD_API void adopt_reference(std::string_view op, Tensors results, Outputs out);
/// Gradient of `reference` by running it again with grad mode on.
SHERD_API Tensors reference_gradient(const GradArgs& args, const std::function<Tensors(Inputs)>& reference);
SHERD_API void make_view(const Tensor& base, Layout layout, Tensors& out);

}  // namespace detail

/// Everything about an op that does not depend on which kind it is.
template <OpValue O>
class OpModelBase : public AnyOp {
 public:
  explicit OpModelBase(const O& op) : op_(op) {}
  std::string_view name() const override { return O::name; }
  std::string text() const override { return detail::op_text(op_); }
  bool equals(const AnyOp& other) const override {
    const auto* same = dynamic_cast<const OpModelBase*>(&other);
    return same != nullptr && same->op_ == op_;
  }

  bool differentiable() const override { return !NotDifferentiable<O>; }
  Reads reads(Mask needs) const override {
    if constexpr (requires {
                    { op_.reads(needs) } -> std::same_as<Reads>;
                  })
      return op_.reads(needs);
    else if constexpr (requires { O::reads; })
      return O::reads;
    else
      return {all_of_them, 0};
  }
  Tensors grad(const GradArgs& args) const override {
    if constexpr (HasGrad<O>)
      return op_.grad(args);
    else if constexpr (HasReference<O>)
      return detail::reference_gradient(args, [this](Inputs in) { return op_.reference(in); });
    else
      fail<InternalError>("{}: has no gradient", O::name);
  }

 protected:
  O op_;
};

template <class O>
class OpModel;

/// Structural, mutating and fused ops.
template <StructuralOp O>
class OpModel<O> final : public OpModelBase<O> {
 public:
  using OpModelBase<O>::OpModelBase;
  Ref<const AnyOp> keep() const override { return make_ref<const OpModel>(this->op_); }
  bool mutating() const override { return MutatingOp<O>; }
  bool writes([[maybe_unused]] std::size_t i) const override {
    if constexpr (requires { O::mutates; })
      return has(O::mutates, i);
    else if constexpr (MutatingOp<O>)
      return this->op_.writes(i);
    else
      return false;
  }
  bool crosses_devices() const override {
    return requires { requires O::crosses_devices; };
  }

  void prepare(Inputs in, Tensors& out) const override {
    Specs specs;
    for (const Tensor& t : in) specs.push_back(t.defined() ? t.spec() : Spec::none());
    const Specs outputs = this->op_.infer(specs);
    if constexpr (MutatingOp<O>) {
      for (std::size_t i = 0; i < in.size(); ++i)
        if (writes(i)) out.push_back(in[i]);
    }
    for (const Spec& spec : outputs) out.push_back(empty(spec));
  }
  void run(Device device, Inputs in, Outputs out) const override {
    if (device.is_cpu()) return this->op_.run(Cpu{}, in, out);
    if (device.type == DeviceType::meta) {
      if constexpr (requires { this->op_.run(Meta{}, in, out); }) this->op_.run(Meta{}, in, out);
      return;
    }
    if (detail::run_backend_kernel(typeid(O), &this->op_, device, in, out)) return;
    if constexpr (HasReference<O>)
      detail::adopt_reference(O::name, this->op_.reference(in), out);
    else
      detail::refuse_device(O::name, device);
  }
};

template <ViewOp O>
class OpModel<O> final : public OpModelBase<O> {
 public:
  using OpModelBase<O>::OpModelBase;
  Ref<const AnyOp> keep() const override { return make_ref<const OpModel>(this->op_); }
  bool is_view() const override { return true; }
  void prepare(Inputs in, Tensors& out) const override {
    detail::make_view(in[0], this->op_.view(in[0]), out);
  }
  void run(Device, Inputs, Outputs) const override {}
};

}  // namespace sherd
