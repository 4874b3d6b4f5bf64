// Binary ops and `where`: their public functions and, through these, their CPU loops.
#include <cmath>

#include "runtime/cpu/elementwise_loop.h"
#include "runtime/ops.h"
#include "runtime/ops/elementwise_list.h"
#include "runtime/ops/listing.h"

namespace sherd {
namespace {

/// `op(x, value)`; an integer tensor takes whole numbers only.
template <class O>
Tensor with_scalar(const Tensor& x, double value) {
  check<DTypeError>(is_floating(x.dtype()) || value == std::floor(value),
                    "{}: {} does not fit a tensor of {}; cast it first", O::name, value, name_of(x.dtype()));
  return apply(WithScalar<O>{value}, x);
}

template <class O>
Tensor scalar_with(double value, const Tensor& x) {
  check<DTypeError>(is_floating(x.dtype()) || value == std::floor(value),
                    "{}: {} does not fit a tensor of {}; cast it first", O::name, value, name_of(x.dtype()));
  return apply(ScalarWith<O>{value}, x);
}

template <class O>
const Tensor& in_place(const Tensor& a, const Tensor& b) {
  const bool widens =
      is_floating(a.dtype()) && is_floating(b.dtype()) && size_of(b.dtype()) < size_of(a.dtype());
  return apply(InPlace<O>{}, a, widens ? to(b, a.dtype()) : b), a;
}

template <class O>
const Tensor& in_place(const Tensor& a, double b) {
  check<DTypeError>(is_floating(a.dtype()) || b == std::floor(b),
                    "{}: {} does not fit a tensor of {}; cast it first", InPlace<O>::name, b,
                    name_of(a.dtype()));
  return apply(InPlace<WithScalar<O>>{{b}}, a), a;
}

}  // namespace

Tensor add(const Tensor& a, const Tensor& b) { return apply(ops::Add{}, a, b); }
Tensor sub(const Tensor& a, const Tensor& b) { return apply(ops::Sub{}, a, b); }
Tensor mul(const Tensor& a, const Tensor& b) { return apply(ops::Mul{}, a, b); }
Tensor div(const Tensor& a, const Tensor& b) { return apply(ops::Div{}, a, b); }
Tensor pow(const Tensor& a, const Tensor& b) { return apply(ops::Pow{}, a, b); }
Tensor maximum(const Tensor& a, const Tensor& b) { return apply(ops::Maximum{}, a, b); }
Tensor minimum(const Tensor& a, const Tensor& b) { return apply(ops::Minimum{}, a, b); }
Tensor add(const Tensor& a, double b) { return with_scalar<ops::Add>(a, b); }
Tensor sub(const Tensor& a, double b) { return with_scalar<ops::Sub>(a, b); }
Tensor sub(double a, const Tensor& b) { return scalar_with<ops::Sub>(a, b); }
Tensor mul(const Tensor& a, double b) { return with_scalar<ops::Mul>(a, b); }
Tensor div(const Tensor& a, double b) { return with_scalar<ops::Div>(a, b); }
Tensor div(double a, const Tensor& b) { return scalar_with<ops::Div>(a, b); }
Tensor pow(const Tensor& a, double b) { return with_scalar<ops::Pow>(a, b); }
Tensor maximum(const Tensor& a, double b) { return with_scalar<ops::Maximum>(a, b); }
Tensor minimum(const Tensor& a, double b) { return with_scalar<ops::Minimum>(a, b); }

Tensor equal(const Tensor& a, const Tensor& b) { return apply(ops::Equal{}, a, b); }
Tensor not_equal(const Tensor& a, const Tensor& b) { return apply(ops::NotEqual{}, a, b); }
Tensor less(const Tensor& a, const Tensor& b) { return apply(ops::Less{}, a, b); }
Tensor less_equal(const Tensor& a, const Tensor& b) { return apply(ops::LessEqual{}, a, b); }
Tensor greater(const Tensor& a, const Tensor& b) { return apply(ops::Greater{}, a, b); }
Tensor greater_equal(const Tensor& a, const Tensor& b) { return apply(ops::GreaterEqual{}, a, b); }
Tensor equal(const Tensor& a, double b) { return with_scalar<ops::Equal>(a, b); }
Tensor not_equal(const Tensor& a, double b) { return with_scalar<ops::NotEqual>(a, b); }
Tensor less(const Tensor& a, double b) { return with_scalar<ops::Less>(a, b); }
Tensor less_equal(const Tensor& a, double b) { return with_scalar<ops::LessEqual>(a, b); }
Tensor greater(const Tensor& a, double b) { return with_scalar<ops::Greater>(a, b); }
Tensor greater_equal(const Tensor& a, double b) { return with_scalar<ops::GreaterEqual>(a, b); }
Tensor logical_and(const Tensor& a, const Tensor& b) { return apply(ops::LogicalAnd{}, a, b); }
Tensor logical_or(const Tensor& a, const Tensor& b) { return apply(ops::LogicalOr{}, a, b); }

Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b) {
  return apply(ops::Where{}, condition, a, b);
}
Tensor masked_fill(const Tensor& x, const Tensor& mask, double value) {
  return where(mask, Tensor::scalar(value, {x.dtype(), x.device()}), x);
}

Tensors ops::Where::grad(const GradArgs& args) const {
  const Tensor& gy = args.gy[0];
  const Tensor zero = Tensor::scalar(0, {gy.dtype(), gy.device()});
  Tensors grads(3);
  if (args.need(1)) grads[1] = detail::sum_to(where(args.inputs[0], gy, zero), args.specs[1].shape);
  if (args.need(2)) grads[2] = detail::sum_to(where(args.inputs[0], zero, gy), args.specs[2].shape);
  return grads;
}

const Tensor& add_(const Tensor& a, const Tensor& b) { return in_place<ops::Add>(a, b); }
const Tensor& sub_(const Tensor& a, const Tensor& b) { return in_place<ops::Sub>(a, b); }
const Tensor& mul_(const Tensor& a, const Tensor& b) { return in_place<ops::Mul>(a, b); }
const Tensor& div_(const Tensor& a, const Tensor& b) { return in_place<ops::Div>(a, b); }
const Tensor& add_(const Tensor& a, double b) { return in_place<ops::Add>(a, b); }
const Tensor& sub_(const Tensor& a, double b) { return in_place<ops::Sub>(a, b); }
const Tensor& mul_(const Tensor& a, double b) { return in_place<ops::Mul>(a, b); }
const Tensor& div_(const Tensor& a, double b) { return in_place<ops::Div>(a, b); }

std::vector<ElementwiseListing> binary_listing() {
  std::vector<ElementwiseListing> list;
  const auto add = [&]<class O>() { list.push_back(list_elementwise<O>()); };
  ops::ArithmeticOps::for_each(add);
  ops::ComparisonOps::for_each(add);
  return list;
}

std::vector<ElementwiseListing> elementwise_listing() {
  std::vector<ElementwiseListing> list = unary_listing();
  for (ElementwiseListing& entry : binary_listing()) list.push_back(std::move(entry));
  return list;
}

}  // namespace sherd
