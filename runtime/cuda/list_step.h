// Steps over lists of parameters, as launches see them. Safe to include in device code.
#pragma once

#include "runtime/cuda/kernels.h"
#include "runtime/cuda/slots.h"
#include "runtime/list_rule.h"

namespace sherd::cuda {

/// One parameter: its value, gradient and state (null where it is not kept), its count of steps and its twin
/// (null where there is none).
struct StepSlot {
  void* p;
  const void* g;
  void* state[StepLists::most_states];  ///< as `p`
  double* steps;
  void* twin;
  std::int64_t n;
  DType p_dtype, g_dtype, twin_dtype;
};
/// The parameters of one launch.
using StepSlots = Slots<StepSlot, 48>;

/// What is the same for all of them.
struct StepCall {
  const double* lr;
  const float* skip;     ///< nothing is done where it is not 0; may be null
  const double* factor;  ///< by which gradients count as multiplied, rounded to their dtype; may be null
};

/// Launches a rule's kernels for what one launch takes, and says whether they were accepted.
using LaunchStep = cudaError_t (*)(const void* rule, const StepSlots& slots, const StepCall& call,
                                   cudaStream_t stream);

/// Calls `launch` for all parameters of a step; what looks into tensors is done here.
SHERD_API void run_step(const StepLists& lists, Inputs in, const void* rule, LaunchStep launch);

}  // namespace sherd::cuda
