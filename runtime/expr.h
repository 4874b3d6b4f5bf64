// A number or a tensor, with the arithmetic that functors use: instantiated with `Expr`, a gradient functor
// builds ops, which the tape records. This is how second derivatives come from the same source as first ones.
#pragma once

#include <type_traits>

#include "runtime/number.h"
#include "runtime/tensor.h"

namespace sherd {

class SHERD_API Expr {
 public:
  Expr() : Expr(0.0) {}
  template <class T>
  requires std::is_arithmetic_v<T>
  explicit Expr(T value) : value_(value) {}
  explicit Expr(Number value) : value_(value) {}
  explicit Expr(Tensor tensor) : tensor_(std::move(tensor)), dtype_(tensor_.dtype()) {}
  /// The answer of a comparison of values of `compared`.
  Expr(Tensor condition, DType compared) : tensor_(std::move(condition)), dtype_(compared) {}

  bool is_number() const { return !tensor_.defined(); }
  Number number() const { return value_; }
  const Tensor& tensor() const { return tensor_; }
  /// Of a tensor: the dtype that its numbers are, also where it is the bool answer of a comparison of them.
  DType dtype() const { return dtype_; }
  /// The tensor, or the number as a 0-d tensor like `like`.
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
SHERD_API Expr exp(const Expr& x);
SHERD_API Expr log(const Expr& x);
SHERD_API Expr sqrt(const Expr& x);
SHERD_API Expr rsqrt(const Expr& x);
SHERD_API Expr sin(const Expr& x);
SHERD_API Expr cos(const Expr& x);
SHERD_API Expr tanh(const Expr& x);
SHERD_API Expr sigmoid(const Expr& x);
SHERD_API Expr erf(const Expr& x);
SHERD_API Expr pow(const Expr& x, const Expr& y);

}  // namespace sherd
