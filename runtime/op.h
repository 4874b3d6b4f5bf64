// What an op is. A value type in one file says what it computes, for which dtypes, and what its gradient is,
// and names no device: how a device computes it is its kernel (runtime/kernel.h). The concepts here turn a
// missing rule into a compile error, and `OpModel` erases the type, so that `apply` takes every op, an
// application's too.
#pragma once

#include <concepts>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <typeindex>

#include "runtime/call_among_ranks.h"
#include "runtime/forward.h"
#include "runtime/generator.h"
#include "runtime/kernel.h"
#include "runtime/number.h"
#include "runtime/peephole.h"
#include "runtime/tensor.h"
#include "runtime/upper_floor.h"

namespace sherd {

using Specs = InlineVec<Spec, 2>;
using SpecSpan = std::span<const Spec>;

/// What a gradient rule is given. Values that `reads` does not name are empty handles; `specs` has the shapes
/// of all inputs.
struct GradArgs {
  Inputs gy;                             ///< of each output; empty where the loss does not depend on it
  Inputs inputs, outputs;                ///< kept values, as `reads` declares
  SpecSpan specs;                        ///< of every input
  std::span<const std::uint64_t> needs;  ///< bit i % 64 of word i / 64: the gradient of input i is wanted
  bool create_graph;                     ///< the rule's own ops are recorded, for a second derivative
  PeepholeArgs beside{};                 ///< what lies beside the rule, as the op's `peephole` names it
  bool retain_graph = false;             ///< another backward may come to this node
  bool need(std::size_t i) const { return i / 64 < needs.size() && ((needs[i / 64] >> (i % 64)) & 1) != 0; }
};

/// A value type that is an op: `name` for messages and traces, and fields that say everything about it.
/// Further members that an op may have:
///  - `arity`: how many inputs it takes (1 if it does not say); `optional`: bits of inputs that may be empty
///  handles;
///  - `fields(on)`: names its fields; a field of type `Number` must fit the dtype that the op works in;
///  - `key`, a RandomKey, if it draws random numbers (or `rule.key`): kernels draw with `key_to_draw(key)`;
///  - `peephole`, what `grad` makes of what lies beside it in a pass;
///  - `among_ranks = true`, if it is a call among ranks or waits for one, and members of `CallAmongRanks`.
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

/// The op written in other ops, all its outputs. It serves as kernel on devices without one, as gradient
/// where there is no `grad`, as oracle in tests. For an op that writes inputs: their new values.
template <class O>
concept HasReference = requires(const O op, Inputs in) {
  { op.reference(in) } -> std::same_as<Tensors>;
};

/// An op whose `run` fills the outputs on every device, `meta` included: because it is made of ops that write
/// straight into the outputs, or because its work is not a device's (a call among ranks).
template <class O>
concept RunsItself = requires(const O op, Inputs in, Outputs out) { op.run(in, out); };

/// An op whose output is a view of input 0; `view` computes its layout.
template <class O>
concept ViewOp = OpValue<O> && requires(const O op, const Tensor& x) {
  { op.view(x) } -> std::same_as<Layout>;
} && HasGrad<O>;

/// An op whose `infer` checks the inputs (throws) and returns the specs of the outputs. An input that was not
/// given is `Spec::none()`. The op may have `dense`, a mask of inputs (or `bool dense(i)`): a kernel gets
/// those in row-major order without holes, copied if need be.
template <class O>
concept StructuralOp = OpValue<O> && requires(const O op, SpecSpan specs) {
  { op.infer(specs) } -> std::same_as<Specs>;
} && (HasGrad<O> || HasReference<O> || NotDifferentiable<O>);

/// A structural op that writes inputs (`mutates` names them, or `writes(i)` says so) and returns those, in
/// order; its `infer` only checks and returns nothing. A written input may share memory with another one only
/// if the op says `orders_overlap = true`, which promises that it reads before it writes; else that is a
/// StateError.
template <class O>
concept MutatingOp = StructuralOp<O> &&(
    requires {
      { O::mutates } -> std::convertible_to<Mask>;
    } ||
    requires(const O op, std::size_t i) {
      { op.writes(i) } -> std::same_as<bool>;
    });

/// An op value with its type erased. Lives on the caller's stack during a call; code that needs it longer
/// calls `keep`.
class SHERD_API AnyOp : public RefCounted {
 public:
  ~AnyOp() override;
  virtual std::string_view name() const = 0;
  /// The name and the fields, as the trace prints them.
  virtual std::string text() const = 0;
  /// A copy on the heap.
  virtual Ref<const AnyOp> keep() const = 0;
  /// The same that draws with `key`, of an op that has one.
  virtual Ref<const AnyOp> keep_drawing(RandomKey) const { return keep(); }
  /// Whether `other` has the same type and equal fields.
  virtual bool equals(const AnyOp& other) const = 0;

  /// Whether the op writes any of its inputs.
  virtual bool mutating() const { return false; }
  /// Whether it writes input `i`. The written inputs, in order, are its outputs.
  virtual bool writes(std::size_t) const { return false; }
  virtual bool is_view() const { return false; }
  /// Whether inputs may be on several devices; otherwise `apply` throws DeviceError.
  virtual bool crosses_devices() const { return false; }
  /// Where it is a call among ranks, or waits for one; null for others.
  virtual const CallAmongRanks* call_among_ranks() const { return nullptr; }
  /// Checks the inputs (throws) and appends the outputs: views, the written inputs, or uninitialised memory.
  virtual void prepare(Inputs in, Tensors& out) const = 0;

  /// The row of kernels for this type of op.
  virtual const KernelRow& kernels() const = 0;
  /// The op value, to pass to a kernel of that row.
  virtual const void* value() const = 0;
  /// The key of the random numbers that the op draws, or null.
  virtual const RandomKey* random_key() const { return nullptr; }
  /// Whether a kernel gets this input dense.
  virtual bool dense(std::size_t) const { return false; }
  /// Computes the outputs by the op's own `run`, the same on every device; false where it has none.
  virtual bool run_itself(Inputs, Outputs) const { return false; }
  /// Computes the outputs by the op's reference; false where it has none.
  virtual bool run_reference(Inputs, Outputs) const { return false; }

  /// Whether the op has a gradient; `reads` and `grad` are called only then.
  virtual bool differentiable() const = 0;
  /// What `grad` will read when the gradients of the inputs in `needs` are wanted.
  virtual Reads reads(Mask needs) const = 0;
  /// What `grad` makes of what lies beside it in a pass; null for most.
  virtual const Peephole* peephole() const { return nullptr; }
  /// One gradient an input, empty where it is not needed.
  virtual Tensors grad(const GradArgs& args) const = 0;
};

namespace detail {

/// Fields print as name=value when the op names them: `void fields(auto&& on) const { on("axis", axis); }`.
template <class O>
std::string op_text(std::string_view name, const O& op) {
  std::string text(name);
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

/// ValueError for a wrong number of inputs, and for an empty handle that is not in `optional`.
SHERD_API void check_inputs(std::string_view op, Arity arity, Mask optional, Inputs in);
/// DTypeError for a number that `dtype` cannot hold (see `fits`).
SHERD_API void check_fits(std::string_view op, std::string_view field, Number value, DType dtype);
/// StateError when an input shares memory with one that the op writes, or when elements of a written one
/// share memory with each other.
SHERD_API void check_overlap(const AnyOp& op, Inputs in);
/// Copies a reference's results into the op's outputs; InternalError when their number or dtypes differ.
SHERD_API void adopt_reference(std::string_view op, Tensors results, Outputs out);
/// Appends a view of `base`'s storage, marked as a view for the tape; errors as `checked_layout`.
SHERD_API void make_view(std::string_view op, const Tensor& base, Layout layout, Tensors& out);

template <class O>
constexpr Arity arity_of() {
  if constexpr (requires { O::arity; })
    return O::arity;
  else
    return 1;
}
template <class O>
constexpr Mask optional_inputs() {
  if constexpr (requires { O::optional; })
    return O::optional;
  else
    return 0;
}

/// DTypeError unless `dtype` holds every field that is a `Number`.
template <class O>
void check_numbers(std::string_view name, const O& op, DType dtype) {
  if constexpr (requires { op.fields([](std::string_view, const auto&) {}); })
    op.fields([&]<class V>(std::string_view field, const V& value) {
      if constexpr (std::same_as<V, Number>) check_fits(name, field, value, dtype);
    });
}

}  // namespace detail

/// What is the same for every kind of op.
template <OpValue O>
class OpModelBase : public AnyOp {
 public:
  explicit OpModelBase(const O& op) : op_(op) {}
  std::string_view name() const override { return O::name; }
  std::string text() const override { return detail::op_text(O::name, op_); }
  bool equals(const AnyOp& other) const override {
    const auto* same = dynamic_cast<const OpModelBase*>(&other);
    return same != nullptr && same->op_ == op_;
  }

  const KernelRow& kernels() const override { return kernel_row<O>(); }
  const void* value() const override { return &op_; }
  const RandomKey* random_key() const override {
    if constexpr (requires { op_.key.offset; })
      return &op_.key;
    else if constexpr (requires { op_.rule.key.offset; })
      return &op_.rule.key;
    else
      return nullptr;
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
  const Peephole* peephole() const override {
    if constexpr (requires { O::peephole; })
      return &O::peephole;
    else
      return nullptr;
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
  Ref<const AnyOp> keep_drawing([[maybe_unused]] RandomKey key) const override {
    O op = this->op_;
    if constexpr (requires { op.key.offset; })
      op.key = key;
    else if constexpr (requires { op.rule.key.offset; })
      op.rule.key = key;
    return make_ref<const OpModel>(op);
  }
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
  const CallAmongRanks* call_among_ranks() const override {
    if constexpr (is_call)
      return &call_;
    else
      return nullptr;
  }
  bool dense([[maybe_unused]] std::size_t i) const override {
    if constexpr (requires {
                    { O::dense } -> std::convertible_to<Mask>;
                  })
      return has(O::dense, i);
    else if constexpr (requires { this->op_.dense(i); })
      return this->op_.dense(i);
    else
      return false;
  }

  void prepare(Inputs in, Tensors& out) const override {
    detail::check_inputs(O::name, detail::arity_of<O>(), detail::optional_inputs<O>(), in);
    Specs specs;
    for (const Tensor& t : in) specs.push_back(t.defined() ? t.spec() : Spec::none());
    const Specs outputs = this->op_.infer(specs);
    if constexpr (MutatingOp<O>) {
      if (!in.empty()) detail::check_numbers(O::name, this->op_, specs[0].dtype);
      if constexpr (!requires { requires O::orders_overlap; }) detail::check_overlap(*this, in);
      for (std::size_t i = 0; i < in.size(); ++i)
        if (writes(i)) out.push_back(in[i]);
    } else if (!outputs.empty()) {
      detail::check_numbers(O::name, this->op_, outputs[0].dtype);
    }
    for (const Spec& spec : outputs) out.push_back(empty(spec));
  }
  bool run_itself([[maybe_unused]] Inputs in, [[maybe_unused]] Outputs out) const override {
    if constexpr (RunsItself<O>) this->op_.run(in, out);
    return RunsItself<O>;
  }
  bool run_reference([[maybe_unused]] Inputs in, [[maybe_unused]] Outputs out) const override {
    if constexpr (HasReference<O>) detail::adopt_reference(O::name, this->op_.reference(in), out);
    return HasReference<O>;
  }

 private:
  static constexpr bool is_call = requires { requires O::among_ranks; };
  [[no_unique_address]] std::conditional_t<is_call, detail::CallAmongRanksOf<O>, detail::NoCallAmongRanks<O>>
      call_{this->op_};
};

template <ViewOp O>
class OpModel<O> final : public OpModelBase<O> {
 public:
  using OpModelBase<O>::OpModelBase;
  Ref<const AnyOp> keep() const override { return make_ref<const OpModel>(this->op_); }
  bool is_view() const override { return true; }
  void prepare(Inputs in, Tensors& out) const override {
    detail::check_inputs(O::name, detail::arity_of<O>(), detail::optional_inputs<O>(), in);
    detail::make_view(O::name, in[0], this->op_.view(in[0]), out);
  }
};

}  // namespace sherd

template <>
struct SHERD_API fmt::formatter<sherd::Number> : fmt::formatter<std::string_view> {
  fmt::format_context::iterator format(sherd::Number n, fmt::format_context& ctx) const;
};
