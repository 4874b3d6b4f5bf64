// The one list of elementwise ops. Kernels of every device, tests and docs iterate it. Safe to include in
// device code.
#pragma once

#include "runtime/ops/abs.h"
#include "runtime/ops/absolute_error.h"
#include "runtime/ops/arithmetic.h"
#include "runtime/ops/atan2.h"
#include "runtime/ops/bce.h"
#include "runtime/ops/bce_with_logits.h"
#include "runtime/ops/clamp.h"
#include "runtime/ops/comparison.h"
#include "runtime/ops/elu.h"
#include "runtime/ops/erf.h"
#include "runtime/ops/exponential.h"
#include "runtime/ops/floor_divide.h"
#include "runtime/ops/gelu.h"
#include "runtime/ops/gelu_tanh.h"
#include "runtime/ops/huber.h"
#include "runtime/ops/hyperbolic.h"
#include "runtime/ops/leaky_relu.h"
#include "runtime/ops/maximum.h"
#include "runtime/ops/minimum.h"
#include "runtime/ops/pow.h"
#include "runtime/ops/power.h"
#include "runtime/ops/relu.h"
#include "runtime/ops/remainder.h"
#include "runtime/ops/rounding.h"
#include "runtime/ops/sigmoid.h"
#include "runtime/ops/silu.h"
#include "runtime/ops/softplus.h"
#include "runtime/ops/squared_error.h"
#include "runtime/ops/swiglu.h"
#include "runtime/ops/trigonometry.h"
#include "runtime/ops/where.h"

namespace sherd::ops {

using UnaryOps = OpList<Neg, Abs, Exp, Log, Log1p, Sqrt, Root, Rsqrt, Sin, Cos, Tanh, Sigmoid, Erf, Relu,
                        Gelu, GeluTanh, Silu, LeakyRelu, Square, Reciprocal, Clamp, Floor, IsFinite,
                        LogicalNot, Tan, Asin, Acos, Atan, Sinh, Cosh, Asinh, Acosh, Atanh, Exp2, Expm1, Log2,
                        Log10, Sign, Round, Trunc, Ceil, IsNan, IsInf, Softplus, Elu>;
using ArithmeticOps = OpList<Add, Sub, Mul, Div, Pow, Maximum, Minimum, SquaredError, AbsoluteError, Huber,
                             Bce, BceWithLogits, Atan2, Remainder, FloorDivide, Swiglu>;
using ComparisonOps = OpList<Equal, NotEqual, Less, LessEqual, Greater, GreaterEqual, LogicalAnd, LogicalOr>;
/// Those of an input and a target whose mean and sum over all elements are ops too.
using SummedLosses = OpList<SquaredError, AbsoluteError, Huber, Bce, BceWithLogits>;
/// Binary ops whose second, or first, input may be a number.
using BoundRight = OpList<Add, Sub, Mul, Div, Pow, Maximum, Minimum, Equal, NotEqual, Less, LessEqual,
                          Greater, GreaterEqual, Remainder, FloorDivide>;
using BoundLeft = OpList<Sub, Div>;

}  // namespace sherd::ops
