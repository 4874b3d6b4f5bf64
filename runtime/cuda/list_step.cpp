#include "runtime/cuda/list_step.h"

#include <vector>

#include "runtime/cuda/check.h"
#include "runtime/cuda/rank.h"
#include "runtime/list_step.h"
#include "runtime/ops.h"

namespace sherd::cuda {
namespace {

template <class T>
T* dense(const StepLists& lists, const Tensor& t) {
  return reinterpret_cast<T*>(sherd::detail::dense_data(lists.name, t));
}

/// One parameter, whose gradient is dense.
StepSlot slot_of(const StepLists& lists, Inputs one, const Tensor& gradient) {
  StepSlot slot{};
  slot.p = dense<void>(lists, one[0]);
  slot.p_dtype = one[0].dtype();
  slot.g = gradient.raw();
  slot.g_dtype = gradient.dtype();
  slot.n = one[0].numel();
  for (std::size_t k = 0, from = 2; k < lists.states.size(); ++k)
    if (has(lists.kept, k)) slot.state[k] = dense<void>(lists, one[from++]);
  if (lists.counts) slot.steps = dense<double>(lists, one[lists.count()]);
  if (lists.twins) {
    slot.twin = dense<void>(lists, one[lists.twin()]);
    slot.twin_dtype = one[lists.twin()].dtype();
  }
  return slot;
}

}  // namespace

void run_step(const StepLists& lists, Inputs in, const void* rule, LaunchStep launch) {
  const StepCall call{in[0].data<double>(), lists.skippable ? in[1].data<float>() : nullptr,
                      lists.clipped ? in[lists.factor()].data<double>() : nullptr};
  const cudaStream_t stream = stream_of(in[0].device());
  std::vector<Tensor> gradients;  // they may be views
  std::vector<StepSlot> all;      // before the first launch, since one of them may be refused
  for (std::size_t i = lists.first(); i < in.size(); i += lists.stride()) {
    const Inputs one = in.subspan(i, lists.stride());
    all.push_back(slot_of(lists, one, gradients.emplace_back(contiguous(one[1]))));
  }
  StepSlots slots;
  for (std::size_t k = 0; k < all.size(); ++k) {
    slots.add(all[k]);
    if (slots.count < StepSlots::most && k + 1 < all.size()) continue;
    check_cuda(launch(rule, slots, call, stream), lists.name);
    slots = {};
  }
}

}  // namespace sherd::cuda
