// A number or a tensor, with the arithmetic that functors use. A gradient functor called with `Expr` instead
// of numbers applies ops, which can be differentiated again; so first and second derivatives come from one
// source.
#pragma once

#include <type_traits>

#include "runtime/math.h"
#include "runtime/number.h"
#include "runtime/tensor.h"

namespace sherd {

/// A number, or a tensor (any dtype and device that the ops take). Operators on two numbers compute in double
/// at once; on tensors they call the op, which broadcasts and throws what it throws.
class SHERD_API Expr {
 public:
  Expr() : Expr(0.0) {}
  template <class T>
    requires std::is_arithmetic_v<T>
  explicit Expr(T value) : value_(value) {}
  explicit Expr(Number value) : value_(value) {}
  explicit Expr(Tensor tensor) : tensor_(std::move(tensor)), dtype_(tensor_.dtype()) {}
  /// The result of a comparison: a bool tensor, and the dtype of the values that were compared.
  Expr(Tensor condition, DType compared) : tensor_(std::move(condition)), dtype_(compared) {}

  bool is_number() const { return !tensor_.defined(); }
  Number number() const { return value_; }
  const Tensor& tensor() const { return tensor_; }
  /// For a tensor: its dtype; for the result of a comparison the dtype of the compared values.
  DType dtype() const { return dtype_; }
  /// The tensor; or the number, expanded to the shape, dtype and device of `like`.
  Tensor materialize(const Spec& like) const;

  friend SHERD_API Expr operator+(const Expr& a, const Expr& b);
  friend SHERD_API Expr operator-(const Expr& a, const Expr& b);
  friend SHERD_API Expr operator*(const Expr& a, const Expr& b);
  friend SHERD_API Expr operator/(const Expr& a, const Expr& b);
  friend SHERD_API Expr operator-(const Expr& a);
  friend SHERD_API Expr operator<(const Expr& a, const Expr& b);
  friend SHERD_API Expr operator>(const Expr& a, const Expr& b);
  friend SHERD_API Expr operator<=(const Expr& a, const Expr& b);
  friend SHERD_API Expr operator>=(const Expr& a, const Expr& b);
  friend SHERD_API Expr operator==(const Expr& a, const Expr& b);
  friend SHERD_API Expr operator!=(const Expr& a, const Expr& b);

 private:
  Number value_ = 0.0;
  Tensor tensor_;
  DType dtype_ = DType::f32;
};

SHERD_API Expr where(const Expr& condition, const Expr& a, const Expr& b);
/// `x` where the condition holds, else 0.
inline Expr only_if(const Expr& condition, const Expr& x) { return where(condition, x, Expr(0.0)); }
/// As two ops, which round twice.
inline Expr fma(const Expr& a, const Expr& b, const Expr& c) { return a * b + c; }
SHERD_API Expr exp(const Expr& x);
SHERD_API Expr log(const Expr& x);
SHERD_API Expr sqrt(const Expr& x);
SHERD_API Expr rsqrt(const Expr& x);
SHERD_API Expr sin(const Expr& x);
SHERD_API Expr cos(const Expr& x);
SHERD_API Expr sinh(const Expr& x);
SHERD_API Expr cosh(const Expr& x);
SHERD_API Expr tanh(const Expr& x);
SHERD_API Expr sigmoid(const Expr& x);
SHERD_API Expr erf(const Expr& x);
SHERD_API Expr round(const Expr& x);
SHERD_API Expr pow(const Expr& x, const Expr& y);
SHERD_API math::Normal<Expr> normal(const Expr& x);

}  // namespace sherd
