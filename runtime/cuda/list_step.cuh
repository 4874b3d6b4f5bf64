// The kernel of a rule over lists of tensors: wide loads, tensors of 16 bits, twins, skipped and clipped
// steps, written once for all rules. An application compiles it for a rule of its own.
#pragma once

#include "runtime/cuda/launch.cuh"
#include "runtime/cuda/list_step.h"
#include "runtime/cuda/packed.cuh"
#include "runtime/cuda/slots.cuh"
#include "runtime/cuda/types.cuh"

namespace sherd::cuda {
namespace detail {

inline __device__ bool skipped(const float* skip) { return skip != nullptr && *skip != 0; }

static __global__ void count_steps(const __grid_constant__ StepSlots slots, const float* skip) {
  wait_for_earlier();
  if (skipped(skip)) return;
  const int i = static_cast<int>(threadIdx.x);
  if (i < slots.count) *slots.slot[i].steps += 1;
}

inline __device__ bool aligned(const StepSlot& s) {
  auto bits = reinterpret_cast<std::uintptr_t>(s.p) | reinterpret_cast<std::uintptr_t>(s.g) |
              reinterpret_cast<std::uintptr_t>(s.twin);
  for (const void* state : s.state) bits |= reinterpret_cast<std::uintptr_t>(state);
  return bits % 16 == 0;
}

template <int V, class T>
__device__ Packed<V, float> widened(const void* from, std::int64_t i, double factor) {
  Packed<V, T> pack = load_pack<V>(static_cast<const T*>(from) + i);
  Packed<V, float> wide;
#pragma unroll
  for (int j = 0; j < V; ++j) {
    wide.at[j] = widen(pack.at[j]);
    if (factor != 1.0)
      wide.at[j] = widen(narrow<T>(static_cast<float>(static_cast<double>(wide.at[j]) * factor)));
  }
  return wide;
}

template <int V>
__device__ Packed<V, float> gradient(const StepSlot& s, std::int64_t i, double factor) {
  return s.g_dtype == DType::bf16  ? widened<V, BFloat16>(s.g, i, factor)
         : s.g_dtype == DType::f16 ? widened<V, Half>(s.g, i, factor)
                                   : widened<V, float>(s.g, i, factor);
}

template <class T, int V>
__device__ void store_narrow(void* to, std::int64_t i, const Packed<V, float>& wide) {
  Packed<V, T> pack;
#pragma unroll
  for (int j = 0; j < V; ++j) pack.at[j] = narrow<T>(wide.at[j]);
  store_pack(static_cast<T*>(to) + i, pack);
}

/// V elements from i on, the parameter's and its state's of T.
template <int V, class T, int form, class Rule, class Factors, std::size_t... k>
__device__ void step_pack(const Rule& rule, const Factors& factors, const StepSlot& s, std::int64_t i,
                          double clip, std::index_sequence<k...>) {
  constexpr Mask kept = Rule::keeps(form);
  Packed<V, float> p = widened<V, T>(s.p, i, 1.0), state[sizeof...(k)] = {};
  ((has(kept, k) ? void(state[k] = widened<V, T>(s.state[k], i, 1.0)) : void()), ...);
  const Packed<V, float> g = gradient<V>(s, i, clip);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const float before[] = {state[k].at[j]...};
    const auto after = sherd::detail::stepped<form>(rule, factors, p.at[j], g.at[j], before);
    p.at[j] = after.value;
    ((state[k].at[j] = after.state[k]), ...);
  }
  ((has(kept, k) ? store_narrow<T>(s.state[k], i, state[k]) : void()), ...);
  store_narrow<T>(s.p, i, p);
  if constexpr (requires { rule.twins; }) {
    if (s.twin == nullptr) return;
    if (s.twin_dtype == DType::bf16)
      store_narrow<BFloat16>(s.twin, i, p);
    else
      store_narrow<Half>(s.twin, i, p);
  }
}

template <int form, class Rule>
__global__ void __launch_bounds__(threads_per_block)
    step_kernel(const __grid_constant__ StepSlots slots, const __grid_constant__ StepCall call,
                const __grid_constant__ Rule rule) {
  const auto rounded = [](double x) { return static_cast<float>(x); };
  using Factors = decltype(rule.factors(1.0, 1.0, rounded));
  __shared__ alignas(Factors) unsigned char memory[sizeof(Factors)];
  wait_for_earlier();
  if (skipped(call.skip)) return;
  const Chunk chunk(slots);
  const StepSlot& s = slots.slot[chunk.slot];
  auto& shared = *reinterpret_cast<Factors*>(memory);
  if (threadIdx.x == 0) shared = rule.factors(*call.lr, Rule::counts(form) ? *s.steps : 1.0, rounded);
  __syncthreads();
  const Factors factors = shared;
  const double clip = call.factor == nullptr ? 1.0 : *call.factor;
  const auto step = [&]<class T>() {
    chunk.for_each<4>(aligned(s), [&]<int V>(std::int64_t i) {
      step_pack<V, T, form>(rule, factors, s, i, clip, std::make_index_sequence<std::size(Rule::states)>{});
    });
  };
  s.p_dtype == DType::bf16  ? step.template operator()<BFloat16>()
  : s.p_dtype == DType::f16 ? step.template operator()<Half>()
                            : step.template operator()<float>();
}

template <class Rule>
cudaError_t launch_step(const void* erased, const StepSlots& slots, const StepCall& call,
                        cudaStream_t stream) {
  static_assert(sizeof(StepSlots) + sizeof(StepCall) + sizeof(Rule) <= 4096, "a launch takes no more");
  const Rule& rule = *static_cast<const Rule*>(erased);
  sherd::detail::with_form(rule, [&]<int form>() {
    if (Rule::counts(form)) launch_early(count_steps, 1, StepSlots::most, stream, slots, call.skip);
    if (const unsigned blocks = slots.blocks(); blocks > 0)
      launch_early(step_kernel<form, Rule>, blocks, threads_per_block, stream, slots, call, rule);
  });
  return cudaGetLastError();
}

template <class Rule>
void list_step(const void* op, Inputs in, Outputs) {
  run_step(static_cast<const Rule*>(op)->lists(), in, op, launch_step<Rule>);
}

}  // namespace detail

/// Adds the kernel above for a rule over lists. An application calls it once for a rule of its own, from a
/// file that nvcc compiles.
template <class Rule>
void add_list_step() {
  kernel_row<Rule>().set(DeviceType::cuda, detail::list_step<Rule>);
}

}  // namespace sherd::cuda
