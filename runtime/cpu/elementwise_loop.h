// The loops of elementwise ops on the CPU over one row: of lanes where its operands are floats. Included
// where ops are instantiated: in the library for its own, in an application for its own. What walks from row
// to row is no template (runtime/cpu/operands.h).
#pragma once

#include <tuple>

#include "runtime/cpu/for_processor.h"
#include "runtime/cpu/lanes.h"
#include "runtime/cpu/operands.h"
#include "runtime/elementwise.h"

namespace sherd::detail {

/// How an input of a span is read: its elements, or one for all. They are types, so that the compiler knows
/// which and makes vectors.
template <class T>
struct Dense {
  const T* at;
  T operator[](std::int64_t i) const { return at[i]; }
};
template <class T>
struct Same {
  T value;
  T operator[](std::int64_t) const { return value; }
};
template <class T, bool is_number>
auto operand(const std::byte* at) {
  const T* const first = reinterpret_cast<const T*>(at);
  if constexpr (is_number)
    return Same<T>{*first};
  else
    return Dense<T>{first};
}

template <class T>
constexpr compute_t<T> widen(T x) {
  return static_cast<compute_t<T>>(x);
}

/// `f` is a copy, so that no store can change its fields and they stay in registers. Flattened, because a
/// call that the compiler leaves in the loop (its inlining budget for a file runs out) prevents
/// vectorisation.
template <class F, class TO, class... Operand>
[[gnu::flatten]] void dense_span(F f, std::int64_t n, TO* out, Operand... in) {
#ifdef __clang__
#pragma clang loop vectorize(assume_safety)
#else
#pragma GCC ivdep
#endif
  for (std::int64_t i = 0; i < n; ++i) out[i] = static_cast<TO>(f(widen(in[i])...));
}

template <class C, class T>
cpu::Lanes<C> lanes_at(Dense<T> x, std::int64_t i, std::int64_t count) {
  constexpr std::int64_t whole = 64 / sizeof(C);
  return count == whole ? cpu::load_lanes<C>(x.at + i) : cpu::load_lanes<C>(x.at + i, count);
}
template <class C, class T>
cpu::Lanes<C> lanes_at(Same<T> x, std::int64_t, std::int64_t) {
  return widen(x.value);
}

/// The same of floats, by vectors that no compiler has to find; whole ones and the rest by the same code.
template <class F, class TO, class... Operand>
[[gnu::flatten]] void lanes_span(F f, std::int64_t n, TO* out, Operand... in) {
  using C = compute_t<TO>;
  constexpr std::int64_t whole = 64 / sizeof(C);
  for (std::int64_t i = 0; i < n; i += whole) {
    const std::int64_t count = std::min(whole, n - i);
    const cpu::Lanes<C> y = f(lanes_at<C>(in, i, count)...);
    if (count == whole)
      cpu::store_lanes<C>(out + i, y);
    else
      cpu::store_lanes<C>(out + i, y, count);
  }
}

/// Whether a functor of floats takes lanes too: a template does, unless it says that it does not (`static
/// constexpr bool lanes = false`), and one of plain numbers does not. Where this is compiled for a processor
/// whose lanes are not made one by one.
template <class F, class TO, class... TI>
constexpr bool takes_lanes() {
  if constexpr (!cpu::has_vectors || !std::floating_point<compute_t<TO>> ||
                !(std::same_as<compute_t<TO>, compute_t<TI>> && ...) || requires { requires !F::lanes; })
    return false;
  else
    return requires(const F& f, cpu::Lanes<compute_t<TI>>... x) { f(x...); };
}

/// The loop of `f` from operands of types `TI` to `TO`.
template <class TO, class... TI, class F, class... Operand>
void run_span(const F& f, std::int64_t n, TO* out, Operand... in) {
  if constexpr (takes_lanes<F, TO, TI...>())
    lanes_span(f, n, out, in...);
  else
    dense_span(f, n, out, in...);
}

/// How a condition is read: of bools beside wider elements the compiler makes no vectors.
using Truth = std::uint8_t;

/// One row of a call of functor `F`; one of the operands `numbers` may be a number.
template <class F, Mask numbers, class TO, class... TI>
struct ElementwiseRow {
  static Row best() { return ForProcessor<run>::best(); }
  static void run(const void* f, std::int64_t n, std::byte* const* at, const std::int64_t* steps) {
    go(f, n, at, steps, std::index_sequence_for<TI...>{});
  }

 private:
  template <std::size_t... I>
  static void go(const void* functor, std::int64_t n, std::byte* const* at, const std::int64_t* steps,
                 std::index_sequence<I...>) {
    const F& f = *static_cast<const F*>(functor);
    TO* out = reinterpret_cast<TO*>(at[0]);
    const auto with_number = [&]<std::size_t number>() {
      if constexpr (((numbers >> number) & 1) != 0)
        if (steps[number] == 0)
          return run_span<TO, TI...>(f, n, out, operand < TI, number == I + 1 > (at[I + 1])...), true;
      return false;
    };
    if ((with_number.template operator()<I + 1>() || ...)) return;
    run_span<TO, TI...>(f, n, out, operand<TI, false>(at[I + 1])...);
  }
};

/// A functor that says what it does to the bits of a 16-bit float.
template <class F>
concept HasBits = requires { &F::template on_bits<std::uint16_t>; };
template <class F>
struct OnBits {
  F f;
  template <class... V>
  constexpr std::uint16_t operator()(V... values) const {
    return f.on_bits(values...);
  }
};

/// Operands that are often numbers: one side of what costs no more than reading it, and what a condition
/// picks.
template <class O>
constexpr Mask numbers_of() {
  if (O::arity == 3 && first_is_condition<O>()) return 0b1100;
  return O::arity == 2 && is_light<O>() ? 0b110 : 0;
}

/// Gives the loop of `O` on elements of type `T`; of functors that do the same as the op with its number, if
/// there are any for what is computed in f32. Those that are not light see halves as f32.
template <class T, class O, std::size_t... I>
void give_typed_loop(const O& op, const LoopTaker& taker, std::index_sequence<I...>) {
  constexpr Mask numbers = numbers_of<O>();
  const auto give_row = [&]<class Row, class F>(const Row&, const F& f, bool in_f32) {
    constexpr bool copies =
        std::is_trivially_copyable_v<F> && sizeof(F) <= largest_functor && alignof(F) <= functor_alignment;
    taker.take({Row::best(), numbers, in_f32}, &f, copies ? sizeof f : 0);
  };
  if constexpr (HasBits<O> && std::same_as<compute_t<T>, float> && !std::same_as<T, float>) {
    using Row =
        ElementwiseRow<OnBits<O>, numbers, std::uint16_t,
                       std::conditional_t<I == 0 && first_is_condition<O>(), Truth, std::uint16_t>...>;
    return give_row(Row{}, OnBits<O>{op}, false);
  }
  const auto give = [&]<class F>(const F& f) {
    constexpr bool in_f32 = std::same_as<compute_t<T>, float> && !std::same_as<T, float> && !is_light<F>();
    using TX = std::conditional_t<in_f32, float, T>;
    using Row = ElementwiseRow<F, numbers, std::conditional_t<gives_bool<O>(), bool, TX>,
                               std::conditional_t<I == 0 && first_is_condition<O>(), Truth, TX>...>;
    give_row(Row{}, f, in_f32);
  };
  if constexpr (std::same_as<compute_t<T>, float> && requires { op.for_number(give); })
    if (op.for_number(give)) return;
  give(op);
}

template <class O>
void give_loop(const void* op, DType dtype, const LoopTaker& taker) {
  with_element(dtype, [&]<class T>() {
    if constexpr (O::dtypes.contains(dtype_of<T>))
      give_typed_loop<T>(*static_cast<const O*>(op), taker, std::make_index_sequence<O::arity>{});
    else
      fail<InternalError>("{}: reached its kernel with {}", O::name, name_of(dtype_of<T>));
  });
}

template <class O>
void run_elementwise(const O& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Operands w = operands_of(in, out[0]);
  give_loop<O>(&op, in.back().dtype(), RunsRows(w));
}

/// Adds the loop of `O` as its kernel, and for who runs it among others.
template <class O>
void add_elementwise_kernel() {
  add_kernel<&run_elementwise<O>>(DeviceType::cpu);
  add_loop(kernel_row<O>(), &give_loop<O>, is_light<O>());
}

}  // namespace sherd::detail

namespace sherd::cpu {

/// Adds the loops above as CPU kernels of elementwise op `O` and of its gradients. An application calls it
/// once for an op of its own, before using it: `cpu::add_elementwise<Softsign>();`
template <ElementwiseOp O>
void add_elementwise() {
  detail::add_elementwise_kernel<O>();
  if constexpr (detail::HasScalarGrad<O>)
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      const auto add = [&]<int i>() {
        if constexpr (((detail::identity_grads<O>() >> i) & 1) == 0)
          detail::add_elementwise_kernel<ElementwiseGrad<O, i>>();
      };
      (add.template operator()<static_cast<int>(I)>(), ...);
    }(std::make_index_sequence<O::arity>{});
}

}  // namespace sherd::cpu
