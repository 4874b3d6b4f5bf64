// The public functions of the binary ops and of `where`.
#include "runtime/elementwise.h"
#include "runtime/given.h"
#include "runtime/ops.h"
#include "runtime/ops/elementwise_list.h"
#include "runtime/ops/index.h"
#include "runtime/ops/listing.h"

namespace sherd {
namespace {

template <class O>
Tensor in_place(const Tensor& a, const Tensor& b) {
  const bool widens = a.defined() && b.defined() && is_floating(a.dtype()) && is_floating(b.dtype()) &&
                      size_of(b.dtype()) < size_of(a.dtype());
  return apply(InPlace<O>{}, a, widens ? to(b, a.dtype()) : b);
}

template <class O>
Tensor in_place(const Tensor& a, Number b) {
  return apply(InPlace<WithScalar<O>>{{b}}, a);
}

/// The number as what it is in the tensor's 16 bits: so it is compared, and so it divides where that decides
/// about a step.
template <class O>
Tensor with_rounded(const Tensor& a, Number b) {
  const DType dtype = a.defined() ? a.dtype() : DType::f32;
  if (dtype == DType::f16) b = static_cast<float>(b.element<Half>());
  if (dtype == DType::bf16) b = static_cast<float>(b.element<BFloat16>());
  return apply(WithScalar<O>{b}, a);
}

}  // namespace

Tensor add(const Tensor& a, const Tensor& b) { return apply(ops::Add{}, a, b); }
Tensor sub(const Tensor& a, const Tensor& b) { return apply(ops::Sub{}, a, b); }
Tensor mul(const Tensor& a, const Tensor& b) { return apply(ops::Mul{}, a, b); }
Tensor div(const Tensor& a, const Tensor& b) { return apply(ops::Div{}, a, b); }
Tensor pow(const Tensor& a, const Tensor& b) { return apply(ops::Pow{}, a, b); }
Tensor maximum(const Tensor& a, const Tensor& b) { return apply(ops::Maximum{}, a, b); }
Tensor minimum(const Tensor& a, const Tensor& b) { return apply(ops::Minimum{}, a, b); }
Tensor atan2(const Tensor& a, const Tensor& b) { return apply(ops::Atan2{}, a, b); }
Tensor swiglu(const Tensor& gate, const Tensor& x) { return apply(ops::Swiglu{}, gate, x); }
Tensor remainder(const Tensor& a, const Tensor& b) { return apply(ops::Remainder{}, a, b); }
Tensor floor_divide(const Tensor& a, const Tensor& b) { return apply(ops::FloorDivide{}, a, b); }
Tensor add(const Tensor& a, Number b) { return apply(WithScalar<ops::Add>{b}, a); }
Tensor sub(const Tensor& a, Number b) { return apply(WithScalar<ops::Sub>{b}, a); }
Tensor sub(Number a, const Tensor& b) { return apply(ScalarWith<ops::Sub>{a}, b); }
Tensor mul(const Tensor& a, Number b) { return apply(WithScalar<ops::Mul>{b}, a); }
Tensor div(const Tensor& a, Number b) { return apply(WithScalar<ops::Div>{b}, a); }
Tensor div(Number a, const Tensor& b) { return apply(ScalarWith<ops::Div>{a}, b); }
Tensor pow(const Tensor& a, Number b) {
  if (b.as<double>() == 2 && a.defined() && is_floating(a.dtype())) return apply(ops::Square{}, a);
  return apply(WithScalar<ops::Pow>{b}, a);
}
Tensor pow(Number a, const Tensor& b) { return pow(Tensor::scalar(a, {b.dtype(), b.device()}), b); }
Tensor maximum(const Tensor& a, Number b) { return apply(WithScalar<ops::Maximum>{b}, a); }
Tensor minimum(const Tensor& a, Number b) { return apply(WithScalar<ops::Minimum>{b}, a); }
Tensor remainder(const Tensor& a, Number b) { return with_rounded<ops::Remainder>(a, b); }
Tensor floor_divide(const Tensor& a, Number b) { return apply(WithScalar<ops::FloorDivide>{b}, a); }

Tensor equal(const Tensor& a, const Tensor& b) { return apply(ops::Equal{}, a, b); }
Tensor not_equal(const Tensor& a, const Tensor& b) { return apply(ops::NotEqual{}, a, b); }
Tensor less(const Tensor& a, const Tensor& b) { return apply(ops::Less{}, a, b); }
Tensor less_equal(const Tensor& a, const Tensor& b) { return apply(ops::LessEqual{}, a, b); }
Tensor greater(const Tensor& a, const Tensor& b) { return apply(ops::Greater{}, a, b); }
Tensor greater_equal(const Tensor& a, const Tensor& b) { return apply(ops::GreaterEqual{}, a, b); }
Tensor equal(const Tensor& a, Number b) { return with_rounded<ops::Equal>(a, b); }
Tensor not_equal(const Tensor& a, Number b) { return with_rounded<ops::NotEqual>(a, b); }
Tensor less(const Tensor& a, Number b) { return with_rounded<ops::Less>(a, b); }
Tensor less_equal(const Tensor& a, Number b) { return with_rounded<ops::LessEqual>(a, b); }
Tensor greater(const Tensor& a, Number b) { return with_rounded<ops::Greater>(a, b); }
Tensor greater_equal(const Tensor& a, Number b) { return with_rounded<ops::GreaterEqual>(a, b); }
Tensor logical_and(const Tensor& a, const Tensor& b) { return apply(ops::LogicalAnd{}, a, b); }
Tensor logical_or(const Tensor& a, const Tensor& b) { return apply(ops::LogicalOr{}, a, b); }

Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b) {
  return apply(ops::Where{}, condition, a, b);
}
Tensor where(const Tensor& condition, const Tensor& a, Number b) {
  return where(condition, a, Tensor::scalar(b, {a.dtype(), a.device()}));
}
Tensor where(const Tensor& condition, Number a, const Tensor& b) {
  return where(condition, Tensor::scalar(a, {b.dtype(), b.device()}), b);
}
Tensor where(const Tensor& condition, Number a, Number b) {
  const bool whole = !a.is_floating() && !b.is_floating();
  const TensorOptions options{whole ? DType::i64 : default_dtype(), condition.device()};
  return where(condition, Tensor::scalar(a, options), Tensor::scalar(b, options));
}
Tensor masked_fill(const Tensor& x, const Tensor& mask, Number value) {
  detail::check_given("masked_fill", x, mask);
  return where(mask, value, x);
}
Tensor masked_fill(const Tensor& x, const Tensor& mask, const Tensor& value) {
  detail::check_given("masked_fill", x, mask, value);
  return where(mask, value, x);
}
Tensor masked_fill_(const Tensor& x, const Tensor& mask, Number value) {
  detail::check_given("masked_fill_", x, mask);
  const Tensor number = Tensor::scalar(value, {x.dtype(), x.device()});
  const bool shared = mask.defined() && mask.storage().id() == x.storage().id();  // as it is before the write
  return apply(ops::FillWhere{}, x, shared ? clone(mask) : mask, number);
}

Tensors ops::Where::grad(const GradArgs& args) const {
  const Tensor& gy = args.gy[0];
  const Tensor zero = Tensor::scalar(0, {gy.dtype(), gy.device()});
  Tensors grads(3);
  if (args.need(1)) grads[1] = detail::sum_to(where(args.inputs[0], gy, zero), args.specs[1].shape);
  if (args.need(2)) grads[2] = detail::sum_to(where(args.inputs[0], zero, gy), args.specs[2].shape);
  return grads;
}

Tensor add_(const Tensor& a, const Tensor& b) { return in_place<ops::Add>(a, b); }
Tensor sub_(const Tensor& a, const Tensor& b) { return in_place<ops::Sub>(a, b); }
Tensor mul_(const Tensor& a, const Tensor& b) { return in_place<ops::Mul>(a, b); }
Tensor div_(const Tensor& a, const Tensor& b) { return in_place<ops::Div>(a, b); }
Tensor add_(const Tensor& a, Number b) { return in_place<ops::Add>(a, b); }
Tensor sub_(const Tensor& a, Number b) { return in_place<ops::Sub>(a, b); }
Tensor mul_(const Tensor& a, Number b) { return in_place<ops::Mul>(a, b); }
Tensor div_(const Tensor& a, Number b) { return in_place<ops::Div>(a, b); }

namespace {
void check_bools(std::string_view sign, const Tensor& a) {
  check<DTypeError>(
      a.dtype() == DType::boolean,
      "operator{}: joins bool tensors, got {}; compare it first, or call logical_and, logical_or or "
      "logical_not, for which anything but 0 is true",
      sign, name_of(a.dtype()));
}
}  // namespace

Tensor operator&(const Tensor& a, const Tensor& b) {
  check_bools("&", a), check_bools("&", b);
  return logical_and(a, b);
}
Tensor operator|(const Tensor& a, const Tensor& b) {
  check_bools("|", a), check_bools("|", b);
  return logical_or(a, b);
}
Tensor operator~(const Tensor& a) {
  check_bools("~", a);
  return logical_not(a);
}

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
