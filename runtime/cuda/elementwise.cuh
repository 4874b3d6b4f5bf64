// Elementwise kernels: one functor, every dtype that it takes, a wide path for dense operands and a strided
// one.
#pragma once

#include <algorithm>
#include <concepts>
#include <type_traits>
#include <utility>

#include "runtime/cuda/kernels.h"
#include "runtime/cuda/launch.cuh"
#include "runtime/cuda/types.cuh"
#include "runtime/functor.h"

namespace sherd::cuda {

/// Elements that one thread loads and stores at once.
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T at[N];
};

/// Where the operands' elements with the row-major index `i` lie.
template <int count, class Index>
__device__ void offsets_of(const Operands& p, Index i, std::int64_t (&at)[count]) {
  for (int k = 0; k < count; ++k) at[k] = 0;
#pragma unroll 1
  for (int d = p.rank - 1; d > 0; --d) {
    const Index size = static_cast<Index>(p.sizes[d]), rest = i / size;
    const auto index = static_cast<std::int64_t>(i - rest * size);
    for (int k = 0; k < count; ++k) at[k] += index * p.strides[k][d];
    i = rest;
  }
  if (p.rank > 0)
    for (int k = 0; k < count; ++k) at[k] += static_cast<std::int64_t>(i) * p.strides[k][0];
}

/// Element `i`, of `dtype` where it is computed in float, else of `C`.
template <class C>
__device__ C load_as(const void* data, std::int64_t i, DType dtype) {
  if constexpr (std::is_same_v<C, float>) {
    if (dtype == DType::bf16) return widen(static_cast<const BFloat16*>(data)[i]);
    if (dtype == DType::f16) return widen(static_cast<const Half*>(data)[i]);
  }
  return static_cast<const C*>(data)[i];
}
template <class C>
__device__ void store_as(void* data, std::int64_t i, DType dtype, C x) {
  if constexpr (std::is_same_v<C, float>) {
    if (dtype == DType::bf16) return void(static_cast<BFloat16*>(data)[i] = narrow<BFloat16>(x));
    if (dtype == DType::f16) return void(static_cast<Half*>(data)[i] = narrow<Half>(x));
  }
  static_cast<C*>(data)[i] = x;
}

/// Elements wherever they lie; of the types that they are computed in, so that one kernel serves all small
/// floats. Kept small, since there is one of every functor: loops are not unrolled.
template <class F, class CO, class... CI>
__global__ void __launch_bounds__(threads_per_block) strided_kernel(F f, const __grid_constant__ Operands p) {
  wait_for_earlier();
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * threads_per_block;
#pragma unroll 1
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x; i < p.numel;
       i += step) {
    std::int64_t at[sizeof...(CI) + 1];
    if (p.dense)
      for (std::int64_t& k : at) k = i;
    else if (p.numel <= 0x7fffffff)
      offsets_of(p, static_cast<std::uint32_t>(i), at);  // division in 64 bits is slow
    else
      offsets_of(p, static_cast<std::uint64_t>(i), at);
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      store_as<CO>(p.data[0], at[0], p.out_dtype, f(load_as<CI>(p.data[I + 1], at[I + 1], p.dtype)...));
    }(std::index_sequence_for<CI...>{});
  }
}

/// Takes packs by value: of references nvcc loads the elements one by one.
template <class TO, int V, class F, class... TI>
__device__ Pack<TO, V> map_packs(const F& f, const Pack<TI, V>... in) {
  Pack<TO, V> out;
#pragma unroll
  for (int j = 0; j < V; ++j) out.at[j] = narrow<TO>(f(widen(in.at[j])...));
  return out;
}

/// How dense rows lie: `step` elements from one to the next, 0 where one is for all; bit k of `splat`: a row
/// of operand k is one element.
template <int count>
struct DenseRows {
  std::int64_t columns;
  std::int64_t step[count];
  std::uint32_t splat = 0;
};

/// Whether a functor's operands may be rows; those of one input seldom are, but for copies.
template <class F, class... TI>
constexpr bool takes_rows() {
  if constexpr (requires { typename F::Copies; }) return true;
  return sizeof...(TI) > 1;
}

template <int V, class T>
__device__ Pack<T, V> load_operand(const T* row, std::int64_t column, bool splat) {
  if (!splat) return *reinterpret_cast<const Pack<T, V>*>(row + column);
  Pack<T, V> all;
#pragma unroll
  for (int j = 0; j < V; ++j) all.at[j] = *row;
  return all;
}

/// `n` elements in rows; one operand, or operands that are all dense, are one row.
template <int V, class F, class TO, class... TI>
__global__ void __launch_bounds__(threads_per_block)
    dense_kernel(F f, std::int64_t n, DenseRows<sizeof...(TI) + 1> rows, TO* out, const TI*... in) {
  wait_for_earlier();
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * threads_per_block;
  for (std::int64_t i = first; i < n / V; i += step) {
    std::int64_t row = 0, column = i * V;
    if constexpr (takes_rows<F, TI...>()) {
      if (rows.columns != n) {
        row = n <= 0x7fffffff ? static_cast<std::uint32_t>(column) / static_cast<std::uint32_t>(rows.columns)
                              : column / rows.columns;  // division in 64 bits is slow
        column -= row * rows.columns;
      }
    }
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      *reinterpret_cast<Pack<TO, V>*>(out + row * rows.step[0] + column) =
          map_packs<TO, V>(f, load_operand<V>(in + row * rows.step[I + 1], column,
                                              takes_rows<F, TI...>() && (rows.splat >> (I + 1) & 1) != 0)...);
    }(std::index_sequence_for<TI...>{});
  }
  if (const std::int64_t i = n / V * V + first; i < n) out[i] = narrow<TO>(f(widen(in[i])...));
}

template <class F, class TO, class... TI>
void launch_strided(const F& f, const Operands& p) {
  launch_early(strided_kernel<F, compute_t<TO>, compute_t<TI>...>, blocks_for(p.numel), threads_per_block,
               p.stream, f, p);
}

template <class F, class TO, class... TI>
void launch(const F& f, const Operands& p) {
  constexpr int pack = std::min<int>(8, 16 / std::max({sizeof(TO), sizeof(TI)...}));  // 16 bytes at once
  if (p.dense || (p.dense_rows && takes_rows<F, TI...>())) {
    const int last = p.rank - 1;
    DenseRows<sizeof...(TI) + 1> rows{p.dense ? p.numel : p.sizes[last], {}};
    if (!p.dense)
      for (std::size_t k = 0; k <= sizeof...(TI); ++k) {
        rows.step[k] = p.strides[k][0];
        if (p.strides[k][last] == 0) rows.splat |= 1u << k;
      }
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      launch_early(dense_kernel<pack, F, TO, TI...>, blocks_for(p.numel / pack), threads_per_block,
                   p.stream, f, p.numel, rows, static_cast<TO*>(p.data[0]),
                   static_cast<const TI*>(p.data[I + 1])...);
    }(std::index_sequence_for<TI...>{});
  } else {
    launch_strided<F, TO, TI...>(f, p);
  }
}

template <class T, std::size_t>
using Repeated = T;

/// Launches `O` on elements of `T`; functors that do the same as the op with its number, as on the CPU.
template <class O, class T>
void launch_typed(const O& op, const Operands& p) {
  using TO = std::conditional_t<sherd::detail::gives_bool<O>(), bool, T>;
  const auto run = [&]<class F>(const F& f) {
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      if constexpr (std::same_as<compute_t<T>, float>)
        launch<F, TO, Repeated<T, I>...>(f, p);
      else
        launch_strided<F, TO, Repeated<T, I>...>(f, p);
    }(std::make_index_sequence<O::arity>{});
  };
  if constexpr (std::same_as<compute_t<T>, float> && requires { op.for_number(run); })
    if (op.for_number(run)) return;
  run(op);
}

/// The kernel of elementwise op `O` for the dtypes that are both its own and `allowed`.
template <class O, DTypeSet allowed>
void elementwise_kernel(const void* erased, Inputs in, Outputs out) {
  const O& op = *static_cast<const O*>(erased);
  constexpr DTypeSet dtypes{static_cast<std::uint16_t>(O::dtypes.mask & allowed.mask)};
  with_operands(in, out, [&op](const Operands& p) {
    if (p.numel == 0) return;
    with_element<dtypes>(p.dtype, [&]<class T>() { launch_typed<O, T>(op, p); });
    check_launch(O::name);
  });
}

template <class O, DTypeSet allowed = any_dtype>
void add_elementwise() {
  kernel_row<O>().set(DeviceType::cuda, elementwise_kernel<O, allowed>);
}

/// Adds the gradient of input I of `O`, if it is computed by a functor. Only floats have gradients.
template <class O, int I>
void add_gradient() {
  constexpr bool none = [] {
    if constexpr (requires { O::differentiable; })
      return !O::differentiable;
    else
      return false;
  }();
  if constexpr (!none && ((sherd::detail::identity_grads<O>() >> I) & 1) == 0)
    add_elementwise<ElementwiseGrad<O, I>, floating_dtypes>();
}

}  // namespace sherd::cuda
