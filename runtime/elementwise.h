// Elementwise ops behind the door: broadcasting, dtypes, gradients and in-place forms are written here once,
// for all of them.
#pragma once

#include "runtime/apply.h"
#include "runtime/expr.h"
#include "runtime/functor.h"
#include "runtime/op.h"

namespace sherd {
namespace detail {

/// Checks dtypes (all equal and in `dtypes`) and broadcasts shapes. `first_condition`: input 0 is bool and is
/// not compared.
SHERD_API Spec infer_elementwise(std::string_view op, DTypeSet dtypes, Inputs in, bool first_condition);
/// The written input must have the result's shape and dtype and must not overlap another input in a different
/// layout.
SHERD_API void check_in_place(std::string_view op, const Spec& result, Inputs in);
/// Sums `g` over the axes that broadcasting added, back to `shape`.
SHERD_API Tensor sum_to(const Tensor& g, const Shape& shape);

template <class O>
constexpr bool first_is_condition() {
  return requires { requires O::first_is_condition; };
}

template <class O>
concept HasScalarGrad = !NotDifferentiable<O> && !requires(const O op, const GradArgs& g) { op.grad(g); };

/// Defined in runtime/cpu/elementwise_loop.h; the library instantiates it for its own ops.
template <class O>
void run_elementwise(const O& op, Inputs in, Outputs out);

template <class O, int I>
Tensor grad_of_input(const O& op, const GradArgs& args) {
  const Tensor& gy = args.gy[0];
  if constexpr ((identity_grads<O>() >> I) & 1)
    return sum_to(gy, args.specs[I].shape);
  else {
    constexpr Reads kept = reads_of<O, I>();
    if (args.create_graph) {
      Expr values[O::arity + 1];
      for (int i = 0; i < O::arity; ++i)
        if ((kept.inputs >> i) & 1) values[i] = Expr(args.inputs[static_cast<std::size_t>(i)]);
      if (kept.outputs & 1) values[O::arity] = Expr(args.outputs[0]);
      Expr g;
      if constexpr (O::arity == 1)
        g = grad_of<I>(op, Expr(gy), values[0], values[1]);
      else if constexpr (O::arity == 2)
        g = grad_of<I>(op, Expr(gy), values[0], values[1], values[2]);
      else
        g = grad_of<I>(op, Expr(gy), values[0], values[1], values[2], values[3]);
      return sum_to(g.materialize(gy.spec()), args.specs[I].shape);
    }
    Tensors in{gy};
    for (int i = 0; i < O::arity; ++i)
      if ((kept.inputs >> i) & 1) in.push_back(args.inputs[static_cast<std::size_t>(i)]);
    if (kept.outputs & 1) in.push_back(args.outputs[0]);
    return sum_to(apply_many(ElementwiseGrad<O, I>{op}, in)[0], args.specs[I].shape);
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

}  // namespace detail

template <ElementwiseOp O>
class OpModel<O> final : public OpModelBase<O> {
 public:
  using OpModelBase<O>::OpModelBase;
  Ref<const AnyOp> keep() const override { return make_ref<const OpModel>(this->op_); }
  void prepare(Inputs in, Tensors& out) const override {
    Spec spec = detail::infer_elementwise(O::name, O::dtypes, in, detail::first_is_condition<O>());
    if constexpr (detail::gives_bool<O>()) spec.dtype = DType::boolean;
    out.push_back(empty(spec));
  }
  void run(Device device, Inputs in, Outputs out) const override {
    if (device.is_cpu()) return detail::run_elementwise(this->op_, in, out);
    if (device.type == DeviceType::meta) return;
    if (!detail::run_backend_kernel(typeid(O), &this->op_, device, in, out))
      detail::refuse_device(O::name, device);
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
    else
      return OpModelBase<O>::grad(args);
  }
};

template <ElementwiseOp O>
class OpModel<InPlace<O>> final : public OpModelBase<InPlace<O>> {
 public:
  using OpModelBase<InPlace<O>>::OpModelBase;
  Ref<const AnyOp> keep() const override { return make_ref<const OpModel>(this->op_); }
  std::string text() const override { return detail::op_text(this->op_.op) + "_"; }
  bool mutating() const override { return true; }
  bool writes(std::size_t i) const override { return i == 0; }
  void prepare(Inputs in, Tensors& out) const override {
    detail::check_in_place(InPlace<O>::name,
                           detail::infer_elementwise(InPlace<O>::name, O::dtypes, in, false), in);
    out.push_back(in[0]);
  }
  void run(Device device, Inputs in, Outputs out) const override {
    if (device.is_cpu()) return detail::run_elementwise(this->op_.op, in, out);
    if (device.type == DeviceType::meta) return;
    // The kernel of the plain form writes wherever its output lies.
    if (!detail::run_backend_kernel(typeid(O), &this->op_.op, device, in, out))
      detail::refuse_device(this->name(), device);
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
