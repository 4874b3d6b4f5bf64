#include "nn/low_rank.h"

#include <cmath>

namespace sherd::nn {
namespace {

/// a + b in the wider of their dtypes, given in a's.
Tensor sum(const Tensor& a, const Tensor& b) {
  if (a.dtype() == b.dtype()) return add(a, b);
  const bool alike = size_of(a.dtype()) == size_of(b.dtype());  // f16 and bf16
  const DType wide = alike ? f32 : size_of(a.dtype()) > size_of(b.dtype()) ? a.dtype() : b.dtype();
  return to(add(to(a, wide), to(b, wide)), a.dtype());
}

}  // namespace

double LoraAdapter::scale() const {
  const auto r = static_cast<double>(rank());
  return form.alpha / (form.scaling == LoraScaling::by_rank ? r : std::sqrt(r));
}

Tensor LoraAdapter::added_to(const Tensor& y, const Tensor& x) const {
  Tensor own = to(x, lora_A.weight.tensor().dtype());
  if (lora_A.training() && form.dropout > 0) own = dropout(own, form.dropout);
  const Tensor narrow = mul(lora_A(own), scale());
  return y.dtype() == narrow.dtype() ? lora_B(narrow, y) : sum(y, lora_B(narrow));
}

Tensor LoraAdapter::merged_into(const Tensor& weight) const {
  return sum(weight, mul(matmul(lora_B.weight, lora_A.weight), scale()));
}

template class Layer<LoraFactor>;

}  // namespace sherd::nn
