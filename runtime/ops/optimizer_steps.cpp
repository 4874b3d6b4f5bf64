#include "runtime/ops/optimizer_steps.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "runtime/apply.h"
#include "runtime/cpu/optim.h"
#include "runtime/ops.h"

namespace sherd {
namespace ops {
namespace {

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

void check_floating(std::string_view op, const Spec& s) {
  check<DTypeError>(is_floating(s.dtype), "{}: takes floating tensors, got {}; cast it", op,
                    name_of(s.dtype));
}

void check_scalar(std::string_view op, std::string_view what, const Spec& s) {
  check<DTypeError>(s.dtype == DType::f64 && s.shape.rank() == 0,
                    "{}: {} must be a 0-d f64 tensor, got {} {}", op, what, name_of(s.dtype), s.shape);
}

/// Calls `body(tag, tensors)` for the tensors of each floating dtype that occurs.
template <class F>
void by_dtype(std::string_view op, Inputs in, const F& body) {
  for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
    std::vector<Tensor> tensors;
    for (const Tensor& t : in)
      if (t.dtype() == dtype) tensors.push_back(t);
    if (!tensors.empty()) dispatch_floating(op, dtype, [&](auto tag) { body(tag, tensors); });
  }
}

/// The same with the tensors' values: `body(span of cpu::Values<T>)`.
template <class F>
void values_by_dtype(std::string_view op, Inputs in, const F& body) {
  by_dtype(op, in, [&](auto tag, std::vector<Tensor>& tensors) {
    using T = typename decltype(tag)::type;
    std::vector<cpu::Values<T>> list;
    for (Tensor& t : tensors) {
      t = contiguous(t);
      list.push_back({t.data<T>(), t.numel()});
    }
    body(std::span<const cpu::Values<T>>(list));
  });
}

double& scalar(const Tensor& t) { return *reinterpret_cast<double*>(t.raw()); }

}  // namespace

Specs AdamStep::infer(SpecSpan in) const {
  check_scalar(name, "the rate", in[0]);
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
  check_scalar(name, "the rate", in[0]);
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

Specs LargestMagnitude::infer(SpecSpan in) const {
  check<ValueError>(!in.empty(), "{}: needs a tensor, got none", name);
  for (const Spec& s : in) check_floating(name, s);
  return {{{}, DType::f64, in[0].device}};
}

void LargestMagnitude::run(Cpu, Inputs in, Outputs out) const {
  double largest = 0;
  values_by_dtype(name, in, [&](auto values) {
    const double here = cpu::max_abs(values);
    if (here > largest || std::isnan(here)) largest = here;
    if (std::isnan(largest)) largest = std::numeric_limits<double>::quiet_NaN();  // one of many bit patterns
  });
  scalar(out[0]) = largest;
}

Specs SquareSums::infer(SpecSpan in) const {
  check_scalar(name, "the largest magnitude", in[0]);
  for (const Spec& s : in.subspan(1)) check_floating(name, s);
  return {{{2}, DType::i64, in[0].device}};
}

void SquareSums::run(Cpu, Inputs in, Outputs out) const {
  const double largest = scalar(in[0]);
  cpu::SquareSum total;
  if (std::isfinite(largest))
    values_by_dtype(name, in.subspan(1),
                    [&](auto values) { total += cpu::square_sum(values, cpu::square_exponent(largest)); });
  auto* sums = reinterpret_cast<std::int64_t*>(out[0].raw());
  sums[0] = total.high;
  sums[1] = total.low;
}

Specs NormOfSums::infer(SpecSpan in) const {
  check<DTypeError>(in[0].dtype == DType::i64, "{}: sums must be i64, got {}", name, name_of(in[0].dtype));
  check<ShapeError>(in[0].shape == Shape{2}, "{}: sums must be of shape (2), got {}", name, in[0].shape);
  check_scalar(name, "the largest magnitude", in[1]);
  return {in[1]};
}

void NormOfSums::run(Cpu, Inputs in, Outputs out) const {
  const Tensor sums = contiguous(in[0]);
  const std::int64_t* parts = sums.data<std::int64_t>();
  scalar(out[0]) = cpu::norm_from({parts[0], parts[1]}, scalar(in[1]));
}

Specs ClipScale::infer(SpecSpan in) const {
  check_scalar(name, "the norm", in[0]);
  for (const Spec& s : in.subspan(1)) check_floating(name, s);
  return {};
}

void ClipScale::run(Cpu, Inputs in, Outputs) const {
  const double factor = std::min(1.0, limit / (scalar(in[0]) + 1e-6));
  if (factor == 1.0) return;
  by_dtype(name, in.subspan(1), [&](auto tag, const std::vector<Tensor>& tensors) {
    using T = typename decltype(tag)::type;
    std::vector<cpu::MutableValues<T>> list;
    for (const Tensor& t : tensors) list.push_back({dense_data<T>(name, t), t.numel()});
    cpu::scale<T>(list, factor);
  });
}

}  // namespace ops

Tensor order_free_norm(std::span<const Tensor> tensors) {
  if (tensors.empty()) return Tensor::scalar(0, {DType::f64});
  std::vector<Tensor> list{apply_many(ops::LargestMagnitude{}, tensors)[0]};
  list.insert(list.end(), tensors.begin(), tensors.end());
  return apply(ops::NormOfSums{}, apply_many(ops::SquareSums{}, list)[0], list[0]);
}

}  // namespace sherd
