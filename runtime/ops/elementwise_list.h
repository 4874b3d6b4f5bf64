// The one list of elementwise ops. Kernels of every device, tests and docs iterate it. Safe to include in
// device code.
#pragma once

#include "runtime/ops/abs.h"
#include "runtime/ops/absolute_error.h"
#include "runtime/ops/acos.h"
#include "runtime/ops/acosh.h"
#include "runtime/ops/add.h"
#include "runtime/ops/asin.h"
#include "runtime/ops/asinh.h"
#include "runtime/ops/atan.h"
#include "runtime/ops/atan2.h"
#include "runtime/ops/atanh.h"
#include "runtime/ops/bce.h"
#include "runtime/ops/bce_with_logits.h"
#include "runtime/ops/ceil.h"
#include "runtime/ops/clamp.h"
#include "runtime/ops/cos.h"
#include "runtime/ops/cosh.h"
#include "runtime/ops/div.h"
#include "runtime/ops/elu.h"
#include "runtime/ops/equal.h"
#include "runtime/ops/erf.h"
#include "runtime/ops/exp.h"
#include "runtime/ops/exp2.h"
#include "runtime/ops/expm1.h"
#include "runtime/ops/floor.h"
#include "runtime/ops/floor_divide.h"
#include "runtime/ops/gelu.h"
#include "runtime/ops/gelu_tanh.h"
#include "runtime/ops/greater.h"
#include "runtime/ops/greater_equal.h"
#include "runtime/ops/huber.h"
#include "runtime/ops/isfinite.h"
#include "runtime/ops/isinf.h"
#include "runtime/ops/isnan.h"
#include "runtime/ops/leaky_relu.h"
#include "runtime/ops/less.h"
#include "runtime/ops/less_equal.h"
#include "runtime/ops/log.h"
#include "runtime/ops/log10.h"
#include "runtime/ops/log1p.h"
#include "runtime/ops/log2.h"
#include "runtime/ops/logical_and.h"
#include "runtime/ops/logical_not.h"
#include "runtime/ops/logical_or.h"
#include "runtime/ops/maximum.h"
#include "runtime/ops/minimum.h"
#include "runtime/ops/mul.h"
#include "runtime/ops/neg.h"
#include "runtime/ops/not_equal.h"
#include "runtime/ops/pow.h"
#include "runtime/ops/reciprocal.h"
#include "runtime/ops/relu.h"
#include "runtime/ops/remainder.h"
#include "runtime/ops/round.h"
#include "runtime/ops/rsqrt.h"
#include "runtime/ops/sigmoid.h"
#include "runtime/ops/sign.h"
#include "runtime/ops/silu.h"
#include "runtime/ops/sin.h"
#include "runtime/ops/sinh.h"
#include "runtime/ops/softplus.h"
#include "runtime/ops/sqrt.h"
#include "runtime/ops/square.h"
#include "runtime/ops/squared_error.h"
#include "runtime/ops/sub.h"
#include "runtime/ops/tan.h"
#include "runtime/ops/tanh.h"
#include "runtime/ops/trunc.h"
#include "runtime/ops/where.h"

namespace sherd::ops {

using UnaryOps = OpList<Neg, Abs, Exp, Log, Log1p, Sqrt, Rsqrt, Sin, Cos, Tanh, Sigmoid, Erf, Relu, Gelu,
                        GeluTanh, Silu, LeakyRelu, Square, Reciprocal, Clamp, Floor, IsFinite, LogicalNot,
                        Tan, Asin, Acos, Atan, Sinh, Cosh, Asinh, Acosh, Atanh, Exp2, Expm1, Log2, Log10,
                        Sign, Round, Trunc, Ceil, IsNan, IsInf, Softplus, Elu>;
using ArithmeticOps = OpList<Add, Sub, Mul, Div, Pow, Maximum, Minimum, SquaredError, AbsoluteError, Huber,
                             Bce, BceWithLogits, Atan2, Remainder, FloorDivide>;
using ComparisonOps = OpList<Equal, NotEqual, Less, LessEqual, Greater, GreaterEqual, LogicalAnd, LogicalOr>;
/// Binary ops whose second, or first, input may be a number.
using BoundRight = OpList<Add, Sub, Mul, Div, Pow, Maximum, Minimum, Equal, NotEqual, Less, LessEqual,
                          Greater, GreaterEqual, Remainder, FloorDivide>;
using BoundLeft = OpList<Sub, Div>;

}  // namespace sherd::ops
