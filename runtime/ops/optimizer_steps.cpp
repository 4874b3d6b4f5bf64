#include "runtime/ops/optimizer_steps.h"

#include <algorithm>
#include <vector>

#include "runtime/apply.h"
#include "runtime/cpu/optim.h"
#include "runtime/ops.h"

namespace sherd {
namespace ops {
namespace {

void check_lr(std::string_view op, const Spec& lr) {
  check<DTypeError>(lr.dtype == DType::f64 && lr.shape.rank() == 0,
                    "{}: the rate must be a 0-d f64 tensor, got {} {}", op, name_of(lr.dtype), lr.shape);
}

/// The f32 tensors of one parameter have one shape; the gradient may not have another.
void check_parameter(std::string_view op, const Spec& p, const Spec& other, std::string_view what) {
  check<DTypeError>(
      p.dtype == DType::f32 && other.dtype == DType::f32,
      "{}: parameters, gradients and state must be f32, got a {} parameter with a {} {}; keep f32 masters",
      op, name_of(p.dtype), name_of(other.dtype), what);
  check<ShapeError>(p.shape == other.shape, "{}: a parameter of shape {} has a {} of shape {}", op, p.shape,
                    what, other.shape);
}

template <class T = float>
T* dense_data(std::string_view op, const Tensor& t) {
  check<StateError>(t.is_contiguous(), "{}: a tensor of shape {} and strides {} is not dense; clone it", op,
                    t.shape(), t.strides());
  return reinterpret_cast<T*>(t.raw());
}

}  // namespace

Specs AdamStep::infer(SpecSpan in) const {
  check_lr(name, in[0]);
  for (std::size_t i = first; i < in.size(); i += stride) {
    check_parameter(name, in[i], in[i + 1], "gradient");
    check_parameter(name, in[i], in[i + 2], "first moment");
    check_parameter(name, in[i], in[i + 3], "second moment");
  }
  return {};
}

void AdamStep::run(Cpu, Inputs in, Outputs) const {
  std::vector<cpu::AdamSlot> slots;
  slots.reserve(in.size() / stride);
  std::vector<Tensor> dense;  // gradients may be views
  for (std::size_t i = first; i < in.size(); i += stride) {
    dense.push_back(contiguous(in[i + 1]));
    double& step = *reinterpret_cast<double*>(in[i + 4].raw());
    step += 1;
    slots.push_back({dense_data(name, in[i]), dense.back().data<float>(), dense_data(name, in[i + 2]),
                     dense_data(name, in[i + 3]), in[i].numel(), step});
  }
  cpu::adam(slots, {*in[0].data<double>(), beta1, beta2, eps, weight_decay, decoupled});
}

Specs SgdStep::infer(SpecSpan in) const {
  check_lr(name, in[0]);
  for (std::size_t i = first; i < in.size(); i += stride()) {
    check_parameter(name, in[i], in[i + 1], "gradient");
    if (momentum != 0) check_parameter(name, in[i], in[i + 2], "momentum buffer");
  }
  return {};
}

void SgdStep::run(Cpu, Inputs in, Outputs) const {
  std::vector<cpu::SgdSlot> slots;
  std::vector<Tensor> dense;
  for (std::size_t i = first; i < in.size(); i += stride()) {
    dense.push_back(contiguous(in[i + 1]));
    cpu::SgdSlot slot{dense_data(name, in[i]), dense.back().data<float>(), nullptr, in[i].numel(), false};
    if (momentum != 0) {
      double& steps = *reinterpret_cast<double*>(in[i + 3].raw());
      slot.momentum = dense_data(name, in[i + 2]);
      slot.first = steps == 0;
      steps += 1;
    }
    slots.push_back(slot);
  }
  cpu::sgd(slots, {*in[0].data<double>(), momentum, weight_decay});
}

Specs OrderFreeNorm::infer(SpecSpan in) const {
  for (const Spec& s : in)
    check<DTypeError>(is_floating(s.dtype) && s.dtype == in[0].dtype,
                      "order_free_norm: takes tensors of one floating dtype, got {} "
                      "and {}",
                      name_of(in[0].dtype), name_of(s.dtype));
  return {{{}, DType::f64, in[0].device}};
}

void OrderFreeNorm::run(Cpu, Inputs in, Outputs out) const {
  dispatch_floating(name, in[0].dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    std::vector<Tensor> dense;
    std::vector<cpu::Values<T>> list;
    for (const Tensor& t : in) {
      dense.push_back(contiguous(t));
      list.push_back({dense.back().data<T>(), t.numel()});
    }
    const double largest = cpu::max_abs<T>(list);
    *reinterpret_cast<double*>(out[0].raw()) =
        cpu::norm_from(cpu::square_sum<T>(list, cpu::square_exponent(largest)), largest);
  });
}

Specs ClipScale::infer(SpecSpan in) const {
  check_lr(name, in[0]);
  for (std::size_t i = 1; i < in.size(); ++i)
    check<DTypeError>(is_floating(in[i].dtype) && in[i].dtype == in[1].dtype,
                      "clip_scale_: takes tensors of one floating dtype, got "
                      "{} and {}",
                      name_of(in[1].dtype), name_of(in[i].dtype));
  return {};
}

void ClipScale::run(Cpu, Inputs in, Outputs) const {
  const double factor = std::min(1.0, limit / (*in[0].data<double>() + 1e-6));
  if (in.size() < 2 || factor == 1.0) return;
  dispatch_floating(name, in[1].dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    std::vector<cpu::MutableValues<T>> list;
    for (std::size_t i = 1; i < in.size(); ++i) list.push_back({dense_data<T>(name, in[i]), in[i].numel()});
    cpu::scale<T>(list, factor);
  });
}

}  // namespace ops

Tensor order_free_norm(std::span<const Tensor> tensors) {
  if (tensors.empty()) return Tensor::scalar(0, {DType::f64});
  return apply_many(ops::OrderFreeNorm{}, tensors)[0];
}

}  // namespace sherd
