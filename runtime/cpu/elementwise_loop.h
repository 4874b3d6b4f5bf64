// The loops of elementwise ops on the CPU: strides collapsed, the innermost span vectorised, long work cut
// into fixed tiles. Included where ops are instantiated: in the library for its own, in an application for
// its own.
#pragma once

#include <tuple>

#include "runtime/cpu/operands.h"
#include "runtime/elementwise.h"
#include "runtime/parallel.h"

namespace sherd::detail {

/// How an operand of a span is read. Stride 1 (`Dense`) and stride 0 (`Same`) are types, so that the compiler
/// knows them and the loop vectorises.
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
template <class T>
struct Spaced {
  const T* at;
  std::int64_t step;
  T operator[](std::int64_t i) const { return at[i * step]; }
};

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
template <class F, class TO, class... Operand>
void spaced_span(F f, std::int64_t n, TO* out, std::int64_t step, Operand... in) {
  for (std::int64_t i = 0; i < n; ++i) out[i * step] = static_cast<TO>(f(widen(in[i])...));
}

template <class F, class TO, class... TI>
void run_span(const F& f, std::int64_t n, TO* out, const std::int64_t* steps, const TI*... in) {
  const std::int64_t so = steps[0];
  int i = 0;
  const bool dense = so == 1 && ((steps[++i] == 1 || sizeof(TI) == 0) && ...);
  if (dense) return dense_span(f, n, out, Dense<TI>{in}...);
  if constexpr (sizeof...(TI) == 2) {
    const auto [a, b] = std::tuple{in...};
    using A = std::remove_cvref_t<decltype(*a)>;
    using B = std::remove_cvref_t<decltype(*b)>;
    if (so == 1 && steps[1] == 1 && steps[2] == 0) return dense_span(f, n, out, Dense<A>{a}, Same<B>{*b});
    if (so == 1 && steps[1] == 0 && steps[2] == 1) return dense_span(f, n, out, Same<A>{*a}, Dense<B>{b});
  }
  i = 0;
  // Braces fix the order in which the steps are taken.
  const std::tuple<Spaced<TI>...> operands{Spaced<TI>{in, steps[++i]}...};
  std::apply([&](auto... o) { spaced_span(f, n, out, so, o...); }, operands);
}

inline constexpr std::int64_t elements_per_tile = 16384;

template <class F, class TO, class... TI, std::size_t... I>
void run_operands(const F& f, const Operands& w, std::index_sequence<I...>) {
  const std::int64_t n = w.inner();
  std::int64_t steps[Operands::most] = {};
  for (int k = 0; k < w.count; ++k) steps[k] = w.step(k);
  if (w.rank <= 1) {
    parallel_for(n, elements_per_tile, [&](std::int64_t begin, std::int64_t end) {
      run_span(f, end - begin, reinterpret_cast<TO*>(w.data[0]) + begin * steps[0], steps,
               reinterpret_cast<const TI*>(w.data[I + 1]) + begin * steps[I + 1]...);
    });
    return;
  }
  const std::int64_t rows_per_tile =
      std::max<std::int64_t>(1, elements_per_tile / std::max<std::int64_t>(n, 1));
  parallel_for(w.outer(), rows_per_tile, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      std::int64_t at[Operands::most] = {}, rest = row;
      for (int d = w.rank - 2; d >= 0; --d) {
        const std::int64_t index = rest % w.sizes[d];
        rest /= w.sizes[d];
        for (int k = 0; k < w.count; ++k) at[k] += index * w.strides[k][d];
      }
      run_span(f, n, reinterpret_cast<TO*>(w.data[0]) + at[0], steps,
               reinterpret_cast<const TI*>(w.data[I + 1]) + at[I + 1]...);
    }
  });
}

/// Instantiates the loops for `O` on elements of type `T`; of functors that do the same as the op with its
/// number, if there are any for what is computed in f32.
template <class T, class O, std::size_t... I>
void run_typed(const O& op, const Operands& w, std::index_sequence<I...> indices) {
  using TO = std::conditional_t<gives_bool<O>(), bool, T>;
  const auto run = [&]<class F>(const F& f) {
    run_operands<F, TO, std::conditional_t<I == 0 && first_is_condition<O>(), bool, T>...>(f, w, indices);
  };
  if constexpr (std::same_as<compute_t<T>, float> && requires { op.for_number(run); })
    if (op.for_number(run)) return;
  run(op);
}

template <class O>
void run_elementwise(const O& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Operands w = operands_of(in, out[0]);
  dispatch(in.back().dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (O::dtypes.contains(dtype_of<T>))
      run_typed<T>(op, w, std::make_index_sequence<O::arity>{});
    else
      fail<InternalError>("{}: reached its kernel with {}", O::name, name_of(dtype_of<T>));
  });
}

}  // namespace sherd::detail

namespace sherd::cpu {

/// Adds the loops above as CPU kernels of elementwise op `O` and of its gradients. An application calls it
/// once for an op of its own, before using it: `cpu::add_elementwise<Softsign>();`
template <ElementwiseOp O>
void add_elementwise() {
  add_kernel<&detail::run_elementwise<O>>(DeviceType::cpu);
  if constexpr (detail::HasScalarGrad<O>)
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      const auto add = [&]<int i>() {
        if constexpr (((detail::identity_grads<O>() >> i) & 1) == 0)
          add_kernel<&detail::run_elementwise<ElementwiseGrad<O, i>>>(DeviceType::cpu);
      };
      (add.template operator()<static_cast<int>(I)>(), ...);
    }(std::make_index_sequence<O::arity>{});
}

}  // namespace sherd::cpu
