#include "runtime/expr.h"

#include <cmath>
#include <functional>

#include "runtime/elementary.h"
#include "runtime/ops.h"

namespace sherd {
namespace {

/// `op` on tensors, on a tensor and a number, or on two numbers.
template <class F, class Number>
Expr combine(const Expr& a, const Expr& b, F&& op, Number&& number) {
  if (a.is_number() && b.is_number())
    return Expr(static_cast<double>(number(a.number().as<double>(), b.number().as<double>())));
  if (b.is_number()) return Expr(op(a.tensor(), b.number()));
  if (a.is_number())
    return Expr(op(Tensor::scalar(a.number(), {b.tensor().dtype(), b.tensor().device()}), b.tensor()));
  return Expr(op(a.tensor(), b.tensor()));
}

template <class F, class Number>
Expr map(const Expr& x, F&& op, Number&& number) {
  return x.is_number() ? Expr(static_cast<double>(number(x.number().as<double>()))) : Expr(op(x.tensor()));
}

/// A comparison, which remembers the dtype of what it compared.
template <class F, class Number>
Expr compare(const Expr& a, const Expr& b, F&& op, Number&& number) {
  const Expr answer = combine(a, b, op, number);
  return answer.is_number() ? answer : Expr(answer.tensor(), a.is_number() ? b.dtype() : a.dtype());
}

}  // namespace

Tensor Expr::materialize(const Spec& like) const {
  return is_number() ? expand(Tensor::scalar(value_, {like.dtype, like.device}), like.shape) : tensor_;
}

Expr operator+(const Expr& a, const Expr& b) {
  return combine(a, b, [](const Tensor& x, const auto& y) { return add(x, y); }, std::plus<>{});
}
Expr operator-(const Expr& a, const Expr& b) {
  if (a.is_number() && !b.is_number()) return Expr(sub(a.number(), b.tensor()));
  return combine(a, b, [](const Tensor& x, const auto& y) { return sub(x, y); }, std::minus<>{});
}
Expr operator*(const Expr& a, const Expr& b) {
  return combine(a, b, [](const Tensor& x, const auto& y) { return mul(x, y); }, std::multiplies<>{});
}
Expr operator/(const Expr& a, const Expr& b) {
  if (a.is_number() && !b.is_number()) return Expr(div(a.number(), b.tensor()));
  return combine(a, b, [](const Tensor& x, const auto& y) { return div(x, y); }, std::divides<>{});
}
Expr operator-(const Expr& a) {
  return map(a, [](const Tensor& x) { return neg(x); }, std::negate<>{});
}
Expr operator<(const Expr& a, const Expr& b) {
  return compare(a, b, [](const Tensor& x, const auto& y) { return less(x, y); }, std::less<>{});
}
Expr operator>(const Expr& a, const Expr& b) {
  return compare(a, b, [](const Tensor& x, const auto& y) { return greater(x, y); }, std::greater<>{});
}
Expr operator<=(const Expr& a, const Expr& b) {
  return compare(a, b, [](const Tensor& x, const auto& y) { return less_equal(x, y); }, std::less_equal<>{});
}
Expr operator>=(const Expr& a, const Expr& b) {
  return compare(
      a, b, [](const Tensor& x, const auto& y) { return greater_equal(x, y); }, std::greater_equal<>{});
}
Expr operator==(const Expr& a, const Expr& b) {
  return compare(a, b, [](const Tensor& x, const auto& y) { return equal(x, y); }, std::equal_to<>{});
}
Expr operator!=(const Expr& a, const Expr& b) {
  return compare(a, b, [](const Tensor& x, const auto& y) { return not_equal(x, y); }, std::not_equal_to<>{});
}

Expr where(const Expr& condition, const Expr& a, const Expr& b) {
  if (condition.is_number()) return condition.number().as<double>() != 0 ? a : b;
  const DType dtype = (!a.is_number() ? a : !b.is_number() ? b : condition).dtype();
  const Spec scalar{{}, dtype, condition.tensor().device()};
  return Expr(where(condition.tensor(), a.materialize(scalar), b.materialize(scalar)));
}

Expr exp(const Expr& x) {
  return map(x, [](const Tensor& t) { return exp(t); }, [](double v) { return math::exp(v); });
}
Expr log(const Expr& x) {
  return map(x, [](const Tensor& t) { return log(t); }, [](double v) { return math::log(v); });
}
Expr sqrt(const Expr& x) {
  return map(x, [](const Tensor& t) { return sqrt(t); }, [](double v) { return std::sqrt(v); });
}
Expr rsqrt(const Expr& x) {
  return map(x, [](const Tensor& t) { return rsqrt(t); }, [](double v) { return 1 / std::sqrt(v); });
}
Expr sin(const Expr& x) {
  return map(x, [](const Tensor& t) { return sin(t); }, [](double v) { return math::sin(v); });
}
Expr cos(const Expr& x) {
  return map(x, [](const Tensor& t) { return cos(t); }, [](double v) { return math::cos(v); });
}
Expr sinh(const Expr& x) {
  return map(x, [](const Tensor& t) { return sinh(t); }, [](double v) { return math::sinh(v); });
}
Expr cosh(const Expr& x) {
  return map(x, [](const Tensor& t) { return cosh(t); }, [](double v) { return math::cosh(v); });
}
Expr tanh(const Expr& x) {
  return map(x, [](const Tensor& t) { return tanh(t); }, [](double v) { return math::tanh(v); });
}
Expr sigmoid(const Expr& x) {
  return map(x, [](const Tensor& t) { return sigmoid(t); }, [](double v) { return math::sigmoid(v); });
}
Expr erf(const Expr& x) {
  return map(x, [](const Tensor& t) { return erf(t); }, [](double v) { return math::erf(v); });
}
Expr round(const Expr& x) {
  return map(x, [](const Tensor& t) { return round(t); }, [](double v) { return std::rint(v); });
}
Expr pow(const Expr& x, const Expr& y) {
  return combine(
      x, y, [](const Tensor& a, const auto& b) { return pow(a, b); },
      [](double a, double b) { return math::pow(a, b); });
}

math::Normal<Expr> normal(const Expr& x) {
  return {exp(Expr(-0.5) * x * x), Expr(0.5) * (Expr(1.0) + erf(x * Expr(0.7071067811865476)))};
}

}  // namespace sherd
