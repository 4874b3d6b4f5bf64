// What turns an elementwise functor (runtime/functor.h) into an op that `apply` takes: broadcasting, dtypes,
// gradients and in-place forms, written once for all of them.
#pragma once

#include <algorithm>
#include <functional>
#include <limits>

#include "runtime/apply.h"
#include "runtime/expr.h"
#include "runtime/functor.h"
#include "runtime/op.h"

namespace sherd {
namespace detail {

/// Checks dtypes (all equal and in `dtypes`: DTypeError) and broadcasts shapes (ShapeError).
/// `first_condition`: input 0 is bool and is left out of the comparison.
SHERD_API Spec infer_elementwise(std::string_view op, DTypeSet dtypes, Inputs in, bool first_condition);
/// ShapeError unless the written input, number 0, has the result's shape. (`infer_elementwise` has compared
/// the dtypes.)
SHERD_API void check_in_place(std::string_view op, const Spec& result, Inputs in);
/// Sums `g` over the axes that broadcasting added, back to `shape`.
SHERD_API Tensor sum_to(const Tensor& g, const Shape& shape);

template <class O>
constexpr bool first_is_condition() {
  return requires { requires O::first_is_condition; };
}

template <class O>
inline constexpr bool is_gradient = false;
template <class O, int I>
inline constexpr bool is_gradient<ElementwiseGrad<O, I>> = true;

template <class O>
concept HasScalarGrad =
    !NotDifferentiable<O> && !is_gradient<O> && !requires(const O op, const GradArgs& g) { op.grad(g); };

/// The gradient of input I as an expression. `in` holds what an `ElementwiseGrad` takes, in its order: gy,
/// then the inputs that the rule reads, then the output if it reads that.
template <int I, class O>
Expr gradient_expression(const O& op, Inputs in) {
  constexpr Reads kept = reads_of<O, I>();
  std::size_t next = 1;
  Expr values[O::arity + 1];
  std::ranges::fill(values, Expr(std::numeric_limits<double>::quiet_NaN()));  // what the rule did not name
  for (int i = 0; i < O::arity; ++i)
    if ((kept.inputs >> i) & 1) values[i] = Expr(in[next++]);
  if (kept.outputs & 1) values[O::arity] = Expr(in[next]);
  const Expr gy(in[0]);
  if constexpr (O::arity == 1)
    return grad_of<I>(op, gy, values[0], values[1]);
  else if constexpr (O::arity == 2)
    return grad_of<I>(op, gy, values[0], values[1], values[2]);
  else
    return grad_of<I>(op, gy, values[0], values[1], values[2], values[3]);
}

/// `t` in the dtype in which kernels compute and sum it; an empty handle stays one.
SHERD_API Tensor to_compute_dtype(const Tensor& t);
/// `f` of the inputs as a kernel computes it: halves become f32, and the result is rounded once.
SHERD_API Tensor in_compute_dtype(Inputs in, const std::function<Tensor(Inputs)>& f);

template <int I, class O>
Tensor gradient_in_other_ops(const O& op, Inputs in) {
  return in_compute_dtype(
      in, [&](Inputs wide) { return gradient_expression<I>(op, wide).materialize(wide[0].spec()); });
}

template <class O, int I>
Tensor grad_of_input(const O& op, const GradArgs& args) {
  const Tensor& gy = args.gy[0];
  if constexpr ((identity_grads<O>() >> I) & 1)
    return sum_to(gy, args.specs[I].shape);
  else {
    constexpr Reads kept = reads_of<O, I>();
    Tensors in{gy};
    for (int i = 0; i < O::arity; ++i)
      if ((kept.inputs >> i) & 1) in.push_back(args.inputs[static_cast<std::size_t>(i)]);
    if (kept.outputs & 1) in.push_back(args.outputs[0]);
    const Tensor g = apply_many(ElementwiseGrad<O, I>{op}, Inputs(in.begin(), in.size()))[0];
    return sum_to(g, args.specs[I].shape);
  }
}

template <class O>
Tensors elementwise_grad(const O& op, const GradArgs& args) {
  Tensors grads(static_cast<std::size_t>(O::arity));
  [&]<std::size_t... I>(std::index_sequence<I...>) {
    ((args.need(I) ? void(grads[I] = grad_of_input<O, static_cast<int>(I)>(op, args)) : void()), ...);
  }(std::make_index_sequence<O::arity>{});
  return grads;
}

template <class O>
Reads elementwise_reads(Mask needs) {
  Reads all;
  [&]<std::size_t... I>(std::index_sequence<I...>) {
    ((((needs >> I) & 1) ? void(all = all | reads_of<O, static_cast<int>(I)>()) : void()), ...);
  }(std::make_index_sequence<O::arity>{});
  return all;
}

/// `there` says whether an op has a form in other ops, `of` builds that. Two kinds have one: the gradient of
/// an elementwise op, and the op with a number in place of a tensor.
template <class O>
struct InOtherOps {
  static constexpr bool there = false;
};
template <class O, int I>
struct InOtherOps<ElementwiseGrad<O, I>> {
  static constexpr bool there = true;
  static Tensor of(const ElementwiseGrad<O, I>& op, Inputs in) { return gradient_in_other_ops<I>(op.op, in); }
};
template <class O>
struct InOtherOps<WithScalar<O>> {
  static constexpr bool there = true;
  static Tensor of(const WithScalar<O>& op, Inputs in) {
    return apply(op.op, in[0], Expr(op.right).materialize({{}, in[0].dtype(), in[0].device()}));
  }
};
template <class O>
struct InOtherOps<ScalarWith<O>> {
  static constexpr bool there = true;
  static Tensor of(const ScalarWith<O>& op, Inputs in) {
    return apply(op.op, Expr(op.left).materialize({{}, in[0].dtype(), in[0].device()}), in[0]);
  }
};

}  // namespace detail

template <ElementwiseOp O>
class OpModel<O> final : public OpModelBase<O> {
  static_assert(O::arity >= 1 && O::arity <= max_elementwise_inputs,
                "the kernels' tables hold no more inputs");
  static_assert(!detail::HasScalarGrad<O> || O::arity + 2 <= max_elementwise_inputs,
                "a gradient reads gy, the inputs and the output; write grad(const GradArgs&) in ops");

 public:
  using OpModelBase<O>::OpModelBase;
  Ref<const AnyOp> keep() const override { return make_ref<const OpModel>(this->op_); }
  void prepare(Inputs in, Tensors& out) const override {
    detail::check_inputs(O::name, O::arity, 0, in);
    Spec spec = detail::infer_elementwise(O::name, O::dtypes, in, detail::first_is_condition<O>());
    detail::check_numbers(O::name, this->op_, spec.dtype);
    if constexpr (detail::gives_bool<O>()) spec.dtype = DType::boolean;
    out.push_back(empty(spec));
  }
  bool run_reference([[maybe_unused]] Inputs in, [[maybe_unused]] Outputs out) const override {
    using Form = detail::InOtherOps<O>;
    if constexpr (Form::there) detail::adopt_reference(O::name, {Form::of(this->op_, in)}, out);
    return Form::there;
  }
  Reads reads(Mask needs) const override {
    if constexpr (detail::HasScalarGrad<O>)
      return detail::elementwise_reads<O>(needs);
    else
      return OpModelBase<O>::reads(needs);
  }
  Tensors grad(const GradArgs& args) const override {
    if constexpr (detail::HasScalarGrad<O>)
      return detail::elementwise_grad(this->op_, args);
    else if constexpr (detail::is_gradient<O>)
      return detail::reference_gradient(
          args, [this](Inputs in) { return Tensors{detail::InOtherOps<O>::of(this->op_, in)}; });
    else
      return OpModelBase<O>::grad(args);
  }
};

template <ElementwiseOp O>
class OpModel<InPlace<O>> final : public OpModelBase<InPlace<O>> {
  static_assert(!detail::gives_bool<O>(), "an op that gives bool cannot write its result over its input");

 public:
  using OpModelBase<InPlace<O>>::OpModelBase;
  Ref<const AnyOp> keep() const override { return make_ref<const OpModel>(this->op_); }
  std::string text() const override { return detail::op_text(InPlace<O>::name, this->op_.op); }
  bool mutating() const override { return true; }
  bool writes(std::size_t i) const override { return i == 0; }
  void prepare(Inputs in, Tensors& out) const override {
    constexpr std::string_view name = InPlace<O>::name;
    detail::check_inputs(name, O::arity, 0, in);
    const Spec spec = detail::infer_elementwise(name, O::dtypes, in, false);
    detail::check_numbers(name, this->op_.op, spec.dtype);
    detail::check_in_place(name, spec, in);
    detail::check_overlap(*this, in);
    out.push_back(in[0]);
  }
  // The kernel of the form that is not in place serves: here its output is input 0.
  const KernelRow& kernels() const override { return kernel_row<O>(); }
  const void* value() const override { return &this->op_.op; }
  bool run_reference(Inputs in, Outputs out) const override {
    detail::adopt_reference(InPlace<O>::name, apply_many(this->op_.op, in), out);
    return true;
  }
  bool differentiable() const override { return !NotDifferentiable<O>; }
  Reads reads(Mask needs) const override {
    if constexpr (detail::HasScalarGrad<O>)
      return detail::elementwise_reads<O>(needs);
    else
      return {};
  }
  Tensors grad(const GradArgs& args) const override {
    if constexpr (detail::HasScalarGrad<O>)
      return detail::elementwise_grad(this->op_.op, args);
    else
      fail<InternalError>("{}: has no gradient", this->name());
  }
};

}  // namespace sherd
