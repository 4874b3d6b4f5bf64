// The loops of a loss that is an elementwise op, of its mean and sum and of their gradients on the CPU.
// Included where losses are instantiated: in the library for its own, in an application for its own.
#pragma once

#include "runtime/cpu/elementwise_loop.h"
#include "runtime/loss.h"

namespace sherd::detail {

/// A functor and its loop over elements that lie one behind another, of the type that is computed in.
struct DenseLoop {
  Row row = nullptr;
  const void* functor = nullptr;
};

/// The loop of a gradient, whose first operand is one number, gy. Of its own, because gy stays in a register.
template <class C, class Gradient>
struct LossGradientRow {
  static Row best() { return ForProcessor<run>::best(); }
  static void run(const void* f, std::int64_t n, std::byte* const* at, const std::int64_t*) {
    go(*static_cast<const Gradient*>(f), n, at, std::make_index_sequence<Gradient::arity - 1>{});
  }

 private:
  template <std::size_t... I>
  static void go(const Gradient& f, std::int64_t n, std::byte* const* at, std::index_sequence<I...>) {
    run_span<C, C, decltype(C(I))...>(f, n, reinterpret_cast<C*>(at[0]), operand<C, true>(at[1]), operand < C,
                                      I != I > (at[2 + I])...);
  }
};

/// What the kernels of a loss call for a block of elements. A gradient's loop takes one gy for all, then what
/// `reads` has of input, target and loss; where it is null the gradient is gy.
struct LossLoops {
  DenseLoop loss, gradient[2];
  Reads reads[2];
};

/// The kernels, but for the loops. Blocks stay in the nearest cache, and threads share fixed chunks.
SHERD_API void run_loss_total(std::string_view op, bool mean, const LossLoops& loops, Inputs in, Outputs out);
SHERD_API void run_loss_total_grad(std::string_view op, bool mean, Mask needs, const LossLoops& loops,
                                   Inputs in, Outputs out);

/// Calls `body` with the loops of `loss` for what `dtype` is computed in.
template <class Loss, class F>
void with_loss_loops(std::string_view op, const Loss& loss, DType dtype, const F& body) {
  const auto gradient = []<class C, int i>(const ElementwiseGrad<Loss, i>& grad) {
    if constexpr (((identity_grads<Loss>() >> i) & 1) != 0)
      return DenseLoop{};
    else
      return DenseLoop{LossGradientRow<C, ElementwiseGrad<Loss, i>>::best(), &grad};
  };
  const ElementwiseGrad<Loss, 0> a{loss};
  const ElementwiseGrad<Loss, 1> b{loss};
  with_floating(op, dtype, [&]<class T>() {
    using C = compute_t<T>;
    if constexpr (Loss::dtypes.contains(dtype_of<T>))
      body(LossLoops{{ElementwiseRow<Loss, numbers_of<Loss>(), C, C, C>::best(), &loss},
                     {gradient.template operator()<C>(a), gradient.template operator()<C>(b)},
                     {reads_of<Loss, 0>(), reads_of<Loss, 1>()}});
  });
}

template <class Loss>
void loss_total(const ops::LossTotal<Loss>& op, Inputs in, Outputs out) {
  with_loss_loops(op.name, op.loss, in[0].dtype(),
                  [&](const LossLoops& loops) { run_loss_total(op.name, op.mean, loops, in, out); });
}
template <class Loss>
void loss_total_grad(const ops::LossTotalGrad<Loss>& op, Inputs in, Outputs out) {
  with_loss_loops(op.name, op.forward.loss, in[0].dtype(), [&](const LossLoops& loops) {
    run_loss_total_grad(op.name, op.forward.mean, op.needs, loops, in, out);
  });
}

/// The mean and sum, without the elementwise op.
template <ElementwiseLoss Loss>
void add_loss_total() {
  add_kernel<&loss_total<Loss>>(DeviceType::cpu);
  add_kernel<&loss_total_grad<Loss>>(DeviceType::cpu);
}

}  // namespace sherd::detail

namespace sherd::cpu {

/// Adds the CPU's kernels of a loss: those of the elementwise op, and of its mean and sum. An application
/// calls it once for a loss of its own, before using it: `cpu::add_loss<PseudoHuber>();`
template <ElementwiseLoss Loss>
void add_loss() {
  add_elementwise<Loss>();
  detail::add_loss_total<Loss>();
}

}  // namespace sherd::cpu
