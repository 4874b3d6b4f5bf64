// The public functions of the unary ops.
#include "runtime/elementwise.h"
#include "runtime/given.h"
#include "runtime/ops.h"
#include "runtime/ops/elementwise_list.h"
#include "runtime/ops/listing.h"

namespace sherd {

Tensor neg(const Tensor& x) { return apply(ops::Neg{}, x); }
Tensor abs(const Tensor& x) { return apply(ops::Abs{}, x); }
Tensor exp(const Tensor& x) { return apply(ops::Exp{}, x); }
Tensor log(const Tensor& x) { return apply(ops::Log{}, x); }
Tensor log1p(const Tensor& x) { return apply(ops::Log1p{}, x); }
Tensor sqrt(const Tensor& x) { return apply(ops::Sqrt{}, x); }
Tensor rsqrt(const Tensor& x) { return apply(ops::Rsqrt{}, x); }
Tensor sin(const Tensor& x) { return apply(ops::Sin{}, x); }
Tensor cos(const Tensor& x) { return apply(ops::Cos{}, x); }
Tensor tanh(const Tensor& x) { return apply(ops::Tanh{}, x); }
Tensor sigmoid(const Tensor& x) { return apply(ops::Sigmoid{}, x); }
Tensor erf(const Tensor& x) { return apply(ops::Erf{}, x); }
Tensor relu(const Tensor& x) { return apply(ops::Relu{}, x); }
Tensor gelu(const Tensor& x, GeluForm form) {
  return form == GeluForm::erf ? apply(ops::Gelu{}, x) : apply(ops::GeluTanh{}, x);
}
Tensor silu(const Tensor& x) { return apply(ops::Silu{}, x); }
Tensor leaky_relu(const Tensor& x, double slope) { return apply(ops::LeakyRelu{slope}, x); }
Tensor square(const Tensor& x) { return apply(ops::Square{}, x); }
Tensor reciprocal(const Tensor& x) { return apply(ops::Reciprocal{}, x); }
Tensor floor(const Tensor& x) { return apply(ops::Floor{}, x); }
Tensor clamp(const Tensor& x, Number min, Number max) { return apply(ops::Clamp{min, max}, x); }
Tensor isfinite(const Tensor& x) { return apply(ops::IsFinite{}, x); }
Tensor expm1(const Tensor& x) { return apply(ops::Expm1{}, x); }
Tensor exp2(const Tensor& x) { return apply(ops::Exp2{}, x); }
Tensor log2(const Tensor& x) { return apply(ops::Log2{}, x); }
Tensor log10(const Tensor& x) { return apply(ops::Log10{}, x); }
Tensor tan(const Tensor& x) { return apply(ops::Tan{}, x); }
Tensor asin(const Tensor& x) { return apply(ops::Asin{}, x); }
Tensor acos(const Tensor& x) { return apply(ops::Acos{}, x); }
Tensor atan(const Tensor& x) { return apply(ops::Atan{}, x); }
Tensor sinh(const Tensor& x) { return apply(ops::Sinh{}, x); }
Tensor cosh(const Tensor& x) { return apply(ops::Cosh{}, x); }
Tensor asinh(const Tensor& x) { return apply(ops::Asinh{}, x); }
Tensor acosh(const Tensor& x) { return apply(ops::Acosh{}, x); }
Tensor atanh(const Tensor& x) { return apply(ops::Atanh{}, x); }
Tensor softplus(const Tensor& x) { return apply(ops::Softplus{}, x); }
Tensor ceil(const Tensor& x) { return apply(ops::Ceil{}, x); }
Tensor trunc(const Tensor& x) { return apply(ops::Trunc{}, x); }
Tensor round(const Tensor& x) { return apply(ops::Round{}, x); }
Tensor sign(const Tensor& x) { return apply(ops::Sign{}, x); }
Tensor isnan(const Tensor& x) { return apply(ops::IsNan{}, x); }
Tensor isinf(const Tensor& x) { return apply(ops::IsInf{}, x); }
Tensor elu(const Tensor& x, double alpha) { return apply(ops::Elu{alpha}, x); }
Tensor selu(const Tensor& x) {
  detail::check_given("selu", x);
  return apply(ops::Elu{1.6732632423543772, 1.0507009873554805}, x);
}
Tensor logical_not(const Tensor& x) { return apply(ops::LogicalNot{}, x); }

Tensor relu_(const Tensor& x) { return apply(InPlace<ops::Relu>{}, x); }
Tensor exp_(const Tensor& x) { return apply(InPlace<ops::Exp>{}, x); }

std::vector<ElementwiseListing> unary_listing() {
  std::vector<ElementwiseListing> list;
  ops::UnaryOps::for_each([&]<class O>() { list.push_back(list_elementwise<O>()); });
  return list;
}

}  // namespace sherd
