#include "runtime/cuda/block.cuh"
#include "runtime/cuda/launch.cuh"
#include "runtime/cuda/launchers.h"
#include "runtime/cuda/slots.cuh"
#include "runtime/cuda/types.cuh"
#include "runtime/math.h"

namespace sherd::cuda {
namespace {

__device__ bool skipped(const float* skip) { return skip != nullptr && *skip != 0; }

__global__ void count_steps(const __grid_constant__ OptimizerSlots slots, const float* skip) {
  wait_for_earlier();
  if (skipped(skip)) return;
  const int i = static_cast<int>(threadIdx.x);
  if (i < slots.count && slots.slot[i].steps != nullptr) *slots.slot[i].steps += 1;
}

__device__ bool aligned(const OptimizerSlot& s) {
  const auto bits = reinterpret_cast<std::uintptr_t>(s.p) | reinterpret_cast<std::uintptr_t>(s.g) |
                    reinterpret_cast<std::uintptr_t>(s.m) | reinterpret_cast<std::uintptr_t>(s.v) |
                    reinterpret_cast<std::uintptr_t>(s.twin);
  return bits % 16 == 0;
}

/// By which gradients count as multiplied.
__device__ double factor_of(const double* factor) { return factor == nullptr ? 1.0 : *factor; }

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
__device__ Packed<V, float> gradient(const OptimizerSlot& s, std::int64_t i, double factor) {
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

/// Scalars of a step, rounded to float where the CPU's kernel rounds them.
struct AdamFactors {
  float keep, decay, share1, share2, beta1, beta2, eps, root2, rate;
  /// `power1`, `power2`: the betas to the number of the step.
  __device__ AdamFactors(const AdamCall& c, double lr, double power1, double power2)
      : keep(c.decoupled ? static_cast<float>(1 - lr * c.weight_decay) : 1.f),
        decay(c.decoupled ? 0.f : static_cast<float>(c.weight_decay)),
        share1(static_cast<float>(1 - c.beta1)),
        share2(static_cast<float>(1 - c.beta2)),
        beta1(static_cast<float>(c.beta1)),
        beta2(static_cast<float>(c.beta2)),
        eps(static_cast<float>(c.eps)),
        root2(static_cast<float>(std::sqrt(1 - power2))),
        rate(static_cast<float>(-(lr / (1 - power1)))) {}
};

__global__ void __launch_bounds__(threads_per_block)
    adam_kernel(const __grid_constant__ OptimizerSlots slots, const __grid_constant__ AdamCall call) {
  __shared__ alignas(AdamFactors) unsigned char memory[sizeof(AdamFactors)];
  wait_for_earlier();
  if (skipped(call.skip)) return;
  const Chunk chunk(slots);
  const OptimizerSlot& s = slots.slot[chunk.slot];
  auto& shared = *reinterpret_cast<AdamFactors*>(memory);
  __shared__ double powers[2];
  // Powers in f64 are slow: each once, in warps of their own.
  if (threadIdx.x == 0) powers[0] = std::pow(call.beta1, *s.steps);
  if (threadIdx.x == warp_size) powers[1] = std::pow(call.beta2, *s.steps);
  __syncthreads();
  if (threadIdx.x == 0) shared = AdamFactors(call, *call.lr, powers[0], powers[1]);
  __syncthreads();
  const AdamFactors f = shared;
  const double factor = factor_of(call.factor);
  chunk.for_each<4>(aligned(s), [&]<int V>(std::int64_t i) {
    Packed<V, float> p = load_pack<V>(s.p + i), m = load_pack<V>(s.m + i), v = load_pack<V>(s.v + i);
    const Packed<V, float> g = gradient<V>(s, i, factor);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const float kept = p.at[j] * f.keep;
      const float grad = std::fma(kept, f.decay, g.at[j]);
      m.at[j] = std::fma(f.share1, grad, m.at[j] * f.beta1);
      v.at[j] = std::fma(f.share2 * grad, grad, v.at[j] * f.beta2);
      p.at[j] = kept + f.rate * m.at[j] / (math::sqrt(v.at[j]) / f.root2 + f.eps);
    }
    store_pack(s.m + i, m);
    store_pack(s.v + i, v);
    store_pack(s.p + i, p);
    if (s.twin == nullptr) return;
    if (s.twin_dtype == DType::bf16)
      store_narrow<BFloat16>(s.twin, i, p);
    else
      store_narrow<Half>(s.twin, i, p);
  });
}

__global__ void __launch_bounds__(threads_per_block)
    sgd_kernel(const __grid_constant__ OptimizerSlots slots, const __grid_constant__ SgdCall call) {
  if (skipped(call.skip)) return;
  const Chunk chunk(slots);
  const OptimizerSlot& s = slots.slot[chunk.slot];
  const float rate = static_cast<float>(-*call.lr), momentum = static_cast<float>(call.momentum),
              decay = static_cast<float>(call.weight_decay), share = static_cast<float>(1 - call.dampening);
  const double factor = factor_of(call.factor);
  const bool first = s.m != nullptr && *s.steps == 0;
  chunk.for_each<4>(aligned(s), [&]<int V>(std::int64_t i) {
    Packed<V, float> p = load_pack<V>(s.p + i), m{};
    const Packed<V, float> g = gradient<V>(s, i, factor);
    if (s.m != nullptr) m = load_pack<V>(s.m + i);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      float step = std::fma(p.at[j], decay, g.at[j]);
      if (s.m != nullptr) {
        m.at[j] = first ? step : std::fma(m.at[j], momentum, share * step);
        step = call.nesterov ? std::fma(m.at[j], momentum, step) : m.at[j];
      }
      p.at[j] = std::fma(rate, step, p.at[j]);
    }
    if (s.m != nullptr) store_pack(s.m + i, m);
    store_pack(s.p + i, p);
  });
}

__global__ void __launch_bounds__(threads_per_block)
    rmsprop_kernel(const __grid_constant__ OptimizerSlots slots, const __grid_constant__ RmspropCall call) {
  if (skipped(call.skip)) return;
  const Chunk chunk(slots);
  const OptimizerSlot& s = slots.slot[chunk.slot];
  const float rate = static_cast<float>(-*call.lr), alpha = static_cast<float>(call.alpha),
              share = static_cast<float>(1 - call.alpha), eps = static_cast<float>(call.eps),
              decay = static_cast<float>(call.weight_decay), momentum = static_cast<float>(call.momentum);
  const double factor = factor_of(call.factor);
  float* const average = static_cast<float*>(s.twin);
  chunk.for_each<4>(aligned(s), [&]<int V>(std::int64_t i) {
    Packed<V, float> p = load_pack<V>(s.p + i), v = load_pack<V>(s.v + i), a{}, m{};
    const Packed<V, float> g = gradient<V>(s, i, factor);
    if (average != nullptr) a = load_pack<V>(average + i);
    if (s.m != nullptr) m = load_pack<V>(s.m + i);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const float grad = std::fma(p.at[j], decay, g.at[j]);
      v.at[j] = std::fma(share * grad, grad, v.at[j] * alpha);
      float variance = v.at[j];
      if (average != nullptr) {
        a.at[j] = std::fma(share, grad, a.at[j] * alpha);
        variance = std::fma(-a.at[j], a.at[j], variance);
        variance = variance < 0 ? 0.f : variance;
      }
      float move = grad / (math::sqrt(variance) + eps);
      if (s.m != nullptr) move = m.at[j] = std::fma(m.at[j], momentum, move);
      p.at[j] = std::fma(rate, move, p.at[j]);
    }
    store_pack(s.v + i, v);
    if (average != nullptr) store_pack(average + i, a);
    if (s.m != nullptr) store_pack(s.m + i, m);
    store_pack(s.p + i, p);
  });
}

}  // namespace

void launch_adam(const OptimizerSlots& slots, const AdamCall& call, cudaStream_t stream) {
  launch_early(count_steps, 1, OptimizerSlots::most, stream, slots, call.skip);
  if (const unsigned blocks = slots.blocks(); blocks > 0)
    launch_early(adam_kernel, blocks, threads_per_block, stream, slots, call);
}

void launch_sgd(const OptimizerSlots& slots, const SgdCall& call, cudaStream_t stream) {
  if (const unsigned blocks = slots.blocks(); blocks > 0)
    sgd_kernel<<<blocks, threads_per_block, 0, stream>>>(slots, call);
  if (call.momentum != 0) launch_early(count_steps, 1, OptimizerSlots::most, stream, slots, call.skip);
}

void launch_rmsprop(const OptimizerSlots& slots, const RmspropCall& call, cudaStream_t stream) {
  if (const unsigned blocks = slots.blocks(); blocks > 0)
    rmsprop_kernel<<<blocks, threads_per_block, 0, stream>>>(slots, call);
}

}  // namespace sherd::cuda
