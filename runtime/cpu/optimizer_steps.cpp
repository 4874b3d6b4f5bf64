// Optimizer steps and the order-free norm over lists of tensors.
#include "runtime/ops/optimizer_steps.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "runtime/cpu/optim.h"
#include "runtime/exact_squares.h"
#include "runtime/ops.h"

namespace sherd::cpu {
namespace {

template <class T = float>
T* dense_data(std::string_view op, const Tensor& t) {
  check<StateError>(t.is_contiguous(), "{}: a tensor of shape {} and strides {} is not dense; clone it", op,
                    t.shape(), t.strides());
  return reinterpret_cast<T*>(t.raw());
}

/// Calls `body.operator()<T>(tensors)` for the tensors of each floating dtype that occurs.
template <class F>
void by_dtype(std::string_view op, Inputs in, const F& body) {
  for (const DType dtype : all_dtypes) {
    std::vector<Tensor> tensors;
    for (const Tensor& t : in)
      if (t.dtype() == dtype) tensors.push_back(t);
    if (!tensors.empty()) with_floating(op, dtype, [&]<class T>() { body.template operator()<T>(tensors); });
  }
}

/// The same with the tensors' values: `body(span of Values<T>)`.
template <class F>
void values_by_dtype(std::string_view op, Inputs in, const F& body) {
  by_dtype(op, in, [&]<class T>(std::vector<Tensor>& tensors) {
    std::vector<Values<T>> list;
    for (Tensor& t : tensors) {
      t = contiguous(t);
      list.push_back({t.data<T>(), t.numel()});
    }
    body(std::span<const Values<T>>(list));
  });
}

double& scalar(const Tensor& t) { return *reinterpret_cast<double*>(t.raw()); }

bool skipped(ops::Skippable skippable, Inputs in) {
  return skippable == ops::Skippable::yes && *in[1].data<float>() != 0;
}

/// Input `i`, a gradient, as the step takes it: f32, dense, and clipped in its own dtype if that is asked
/// for.
template <class Op>
Tensor gradient(const Op& op, Inputs in, std::size_t i) {
  const double factor = op.clipped == ops::Clipped::yes ? scalar(in[op.first() - 1]) : 1.0;
  Tensor g = contiguous(in[i]);
  if (factor != 1.0) {
    g = clone(g);
    with_floating(op.name, g.dtype(), [&]<class T>() {
      const MutableValues<T> values{dense_data<T>(op.name, g), g.numel()};
      scale<T>(std::span(&values, 1), factor);
    });
  }
  return to(g, DType::f32);
}

void adam_step(const ops::AdamStep& op, Inputs in, Outputs) {
  if (skipped(op.skippable, in)) return;
  std::vector<AdamSlot> slots;
  slots.reserve(in.size() / op.stride());
  std::vector<Tensor> dense;  // gradients may be views, and of 16 bits
  for (std::size_t i = op.first(); i < in.size(); i += op.stride()) {
    dense.push_back(gradient(op, in, i + 1));
    double& step = *reinterpret_cast<double*>(in[i + 4].raw());
    step += 1;
    slots.push_back({dense_data(op.name, in[i]), dense.back().data<float>(), dense_data(op.name, in[i + 2]),
                     dense_data(op.name, in[i + 3]), in[i].numel(), step});
  }
  adam(slots, {*in[0].data<double>(), op.beta1, op.beta2, op.eps, op.weight_decay, op.decoupled});
  if (op.twins == ops::Twins::yes)
    for (std::size_t i = op.first(); i < in.size(); i += op.stride())
      copy_(alias(in[i + 5], in[i + 5].layout()), in[i]);
}

void sgd_step(const ops::SgdStep& op, Inputs in, Outputs) {
  if (skipped(op.skippable, in)) return;
  std::vector<SgdSlot> slots;
  std::vector<Tensor> dense;
  for (std::size_t i = op.first(); i < in.size(); i += op.stride()) {
    dense.push_back(gradient(op, in, i + 1));
    SgdSlot slot{dense_data(op.name, in[i]), dense.back().data<float>(), nullptr, in[i].numel(), false};
    if (op.momentum != 0) {
      double& steps = *reinterpret_cast<double*>(in[i + 3].raw());
      slot.momentum = dense_data(op.name, in[i + 2]);
      slot.first = steps == 0;
      steps += 1;
    }
    slots.push_back(slot);
  }
  sgd(slots, {*in[0].data<double>(), op.momentum, op.weight_decay, op.dampening, op.nesterov});
}

void rmsprop_step(const ops::RmspropStep& op, Inputs in, Outputs) {
  if (skipped(op.skippable, in)) return;
  std::vector<RmspropSlot> slots;
  std::vector<Tensor> dense;
  for (std::size_t i = op.first(); i < in.size(); i += op.stride()) {
    dense.push_back(gradient(op, in, i + 1));
    slots.push_back({dense_data(op.name, in[i]), dense.back().data<float>(), dense_data(op.name, in[i + 2]),
                     op.centered ? dense_data(op.name, in[i + 3]) : nullptr,
                     op.momentum != 0 ? dense_data(op.name, in[i + op.stride() - 1]) : nullptr,
                     in[i].numel()});
  }
  rmsprop(slots, {*in[0].data<double>(), op.alpha, op.eps, op.weight_decay, op.momentum});
}

void largest_magnitude(const ops::LargestMagnitude& op, Inputs in, Outputs out) {
  double largest = 0;
  values_by_dtype(op.name, in, [&](auto values) {
    const double here = max_abs(values);
    if (here > largest || std::isnan(here)) largest = here;
    if (std::isnan(largest)) largest = std::numeric_limits<double>::quiet_NaN();  // one of many bit patterns
  });
  scalar(out[0]) = largest;
}

void square_sums(const ops::SquareSums& op, Inputs in, Outputs out) {
  auto* limbs = reinterpret_cast<std::int64_t*>(out[0].raw());
  std::fill_n(limbs, static_cast<int>(ExactSquares::limbs), 0);
  values_by_dtype(op.name, in, [&](auto values) { add_squares(values, limbs); });
}

void norm_of_sums(const ops::NormOfSums&, Inputs in, Outputs out) {
  scalar(out[0]) = root_of(in[0].data<std::int64_t>());
}

void clip_scale(const ops::ClipScale& op, Inputs in, Outputs) {
  const double factor = std::min(op.limit / (scalar(in[0]) + 1e-6), 1.0);  // NaN stays: it is for all tensors
  for (const Tensor& t : in.subspan(1)) dense_data<std::byte>(op.name, t);  // all or none
  if (factor == 1.0) return;
  by_dtype(op.name, in.subspan(1), [&]<class T>(const std::vector<Tensor>& tensors) {
    std::vector<MutableValues<T>> list;
    for (const Tensor& t : tensors) list.push_back({dense_data<T>(op.name, t), t.numel()});
    scale<T>(list, factor);
  });
}

}  // namespace

void add_optimizer_steps() {
  add_kernel<adam_step>(DeviceType::cpu);
  add_kernel<sgd_step>(DeviceType::cpu);
  add_kernel<rmsprop_step>(DeviceType::cpu);
  add_kernel<largest_magnitude>(DeviceType::cpu);
  add_kernel<square_sums>(DeviceType::cpu);
  add_kernel<norm_of_sums>(DeviceType::cpu);
  add_kernel<clip_scale>(DeviceType::cpu);
}

}  // namespace sherd::cpu
