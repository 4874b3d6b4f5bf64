#include "runtime/cuda/launchers.h"
#include "runtime/math.h"

namespace sherd::cuda {
namespace {

__global__ void count_steps(const __grid_constant__ OptimizerSlots slots) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < slots.count && slots.slot[i].steps != nullptr) *slots.slot[i].steps += 1;
}

/// One parameter a `blockIdx.y`. Scalars round to float where the CPU's kernel rounds them.
__global__ void __launch_bounds__(threads_per_block)
    adam_kernel(const __grid_constant__ OptimizerSlots slots, const __grid_constant__ AdamCall call) {
  const OptimizerSlot& s = slots.slot[blockIdx.y];
  const double lr = *call.lr, step = *s.steps;
  const float keep = call.decoupled ? static_cast<float>(1 - lr * call.weight_decay) : 1.f;
  const float decay = call.decoupled ? 0.f : static_cast<float>(call.weight_decay);
  const float share1 = static_cast<float>(1 - call.beta1), share2 = static_cast<float>(1 - call.beta2);
  const float beta2 = static_cast<float>(call.beta2), eps = static_cast<float>(call.eps);
  const float root2 = static_cast<float>(std::sqrt(1 - std::pow(call.beta2, step)));
  const float rate = static_cast<float>(-(lr / (1 - std::pow(call.beta1, step))));
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * threads_per_block;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x; i < s.n;
       i += stride) {
    const float kept = s.p[i] * keep;
    const float grad = std::fma(kept, decay, s.g[i]);
    const float m = std::fma(share1, grad - s.m[i], s.m[i]);
    const float v = std::fma(share2 * grad, grad, s.v[i] * beta2);
    s.m[i] = m;
    s.v[i] = v;
    s.p[i] = kept + rate * m / (math::sqrt(v) / root2 + eps);
  }
}

__global__ void __launch_bounds__(threads_per_block)
    sgd_kernel(const __grid_constant__ OptimizerSlots slots, const double* lr, float momentum, float decay) {
  const OptimizerSlot& s = slots.slot[blockIdx.y];
  const float rate = static_cast<float>(-*lr);
  const bool first = s.m != nullptr && *s.steps == 0;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * threads_per_block;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads_per_block + threadIdx.x; i < s.n;
       i += stride) {
    float step = std::fma(s.p[i], decay, s.g[i]);
    if (s.m != nullptr) {
      if (!first) step = std::fma(s.m[i], momentum, step);
      s.m[i] = step;
    }
    s.p[i] = std::fma(rate, step, s.p[i]);
  }
}

dim3 grid_of(const OptimizerSlots& slots) {
  return {blocks_for(slots.largest), static_cast<unsigned>(slots.count)};
}

}  // namespace

void launch_adam(const OptimizerSlots& slots, const AdamCall& call, cudaStream_t stream) {
  count_steps<<<1, OptimizerSlots::most, 0, stream>>>(slots);
  adam_kernel<<<grid_of(slots), threads_per_block, 0, stream>>>(slots, call);
}

void launch_sgd(const OptimizerSlots& slots, const double* lr, double momentum, double weight_decay,
                cudaStream_t stream) {
  sgd_kernel<<<grid_of(slots), threads_per_block, 0, stream>>>(slots, lr, static_cast<float>(momentum),
                                                               static_cast<float>(weight_decay));
  if (momentum != 0) count_steps<<<1, OptimizerSlots::most, 0, stream>>>(slots);
}

}  // namespace sherd::cuda
