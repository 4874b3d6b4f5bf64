// Optimizer steps over lists of parameters.
#include <vector>

#include "runtime/cuda/launchers.h"
#include "runtime/cuda/rank.h"
#include "runtime/ops.h"
#include "runtime/ops/optimizer_steps.h"

namespace sherd::cuda {
namespace {

template <class T = float>
T* dense_data(std::string_view op, const Tensor& t) {
  check<StateError>(t.is_contiguous(), "{}: a tensor of shape {} and strides {} is not dense; clone it", op,
                    t.shape(), t.strides());
  return reinterpret_cast<T*>(t.raw());
}

/// Calls `launch(slots)` for as many parameters at a time as one launch takes; `slot_at(i)` is the one that
/// begins at input i.
template <class SlotAt, class Launch>
void in_portions(std::size_t first, std::size_t stride, std::size_t end, SlotAt&& slot_at, Launch&& launch) {
  OptimizerSlots slots;
  for (std::size_t i = first; i < end; i += stride) {
    slots.add(slot_at(i));
    if (slots.count < OptimizerSlots::most && i + stride < end) continue;
    launch(slots);
    slots = {};
  }
}

template <class Op>
const float* skip_of(const Op& op, Inputs in) {
  return op.skippable == ops::Skippable::yes ? in[1].data<float>() : nullptr;
}

template <class Op>
const double* factor_of(const Op& op, Inputs in) {
  return op.clipped == ops::Clipped::yes ? in[op.first() - 1].template data<double>() : nullptr;
}

void adam_kernel(const void* erased, Inputs in, Outputs) {
  const auto& op = *static_cast<const ops::AdamStep*>(erased);
  const cudaStream_t stream = stream_of(in[0].device());
  std::vector<Tensor> dense;  // gradients may be views
  in_portions(
      op.first(), op.stride(), in.size(),
      [&](std::size_t i) {
        dense.push_back(contiguous(in[i + 1]));
        OptimizerSlot slot{dense_data(op.name, in[i]),
                           dense.back().raw(),
                           dense_data(op.name, in[i + 2]),
                           dense_data(op.name, in[i + 3]),
                           dense_data<double>(op.name, in[i + 4]),
                           in[i].numel(),
                           in[i + 1].dtype()};
        if (op.twins == ops::Twins::yes) {
          slot.twin_dtype = in[i + 5].dtype();
          slot.twin = dense_data<std::byte>(op.name, in[i + 5]);
        }
        return slot;
      },
      [&](const OptimizerSlots& slots) {
        launch_adam(slots,
                    {in[0].data<double>(), skip_of(op, in), factor_of(op, in), op.beta1, op.beta2, op.eps,
                     op.weight_decay, op.decoupled},
                    stream);
      });
  check_launch(op.name);
}

void sgd_kernel(const void* erased, Inputs in, Outputs) {
  const auto& op = *static_cast<const ops::SgdStep*>(erased);
  const cudaStream_t stream = stream_of(in[0].device());
  std::vector<Tensor> dense;
  in_portions(
      op.first(), op.stride(), in.size(),
      [&](std::size_t i) {
        dense.push_back(contiguous(in[i + 1]));
        const bool carries = op.momentum != 0;
        return OptimizerSlot{dense_data(op.name, in[i]),
                             dense.back().raw(),
                             carries ? dense_data(op.name, in[i + 2]) : nullptr,
                             nullptr,
                             carries ? dense_data<double>(op.name, in[i + 3]) : nullptr,
                             in[i].numel(),
                             in[i + 1].dtype()};
      },
      [&](const OptimizerSlots& slots) {
        launch_sgd(slots,
                   {in[0].data<double>(), skip_of(op, in), factor_of(op, in), op.momentum, op.weight_decay,
                    op.dampening, op.nesterov},
                   stream);
      });
  check_launch(op.name);
}

void rmsprop_kernel(const void* erased, Inputs in, Outputs) {
  const auto& op = *static_cast<const ops::RmspropStep*>(erased);
  const cudaStream_t stream = stream_of(in[0].device());
  std::vector<Tensor> dense;
  in_portions(
      op.first(), op.stride(), in.size(),
      [&](std::size_t i) {
        dense.push_back(contiguous(in[i + 1]));
        OptimizerSlot slot{dense_data(op.name, in[i]),
                           dense.back().raw(),
                           op.momentum != 0 ? dense_data(op.name, in[i + op.stride() - 1]) : nullptr,
                           dense_data(op.name, in[i + 2]),
                           nullptr,
                           in[i].numel(),
                           in[i + 1].dtype()};
        if (op.centered) slot.twin = dense_data(op.name, in[i + 3]);
        return slot;
      },
      [&](const OptimizerSlots& slots) {
        launch_rmsprop(slots,
                       {in[0].data<double>(), skip_of(op, in), factor_of(op, in), op.alpha, op.eps,
                        op.weight_decay, op.momentum},
                       stream);
      });
  check_launch(op.name);
}

}  // namespace

void add_optimizer() {
  kernel_row<ops::AdamStep>().set(DeviceType::cuda, adam_kernel);
  kernel_row<ops::SgdStep>().set(DeviceType::cuda, sgd_kernel);
  kernel_row<ops::RmspropStep>().set(DeviceType::cuda, rmsprop_kernel);
}

}  // namespace sherd::cuda
