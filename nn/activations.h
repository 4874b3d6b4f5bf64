// Layers without parameters: activations, shapes, and any function of a tensor.
#pragma once

#include <functional>

#include "nn/module.h"
#include "runtime/ops.h"

namespace sherd::nn {

/// x Phi(x), or its approximation by tanh (Hendrycks and Gimpel, 2016).
struct SHERD_API Gelu final : Layer<Gelu> {
  GeluForm form;
  explicit Gelu(GeluForm form = GeluForm::erf) : form(form) {}
  Tensor forward(const Tensor& x) const { return gelu(x, form); }
  void visit(auto&&) {}
};
/// max(x, 0).
struct SHERD_API Relu final : Layer<Relu> {
  Tensor forward(const Tensor& x) const { return relu(x); }
  void visit(auto&&) {}
};
/// x, times `slope` below 0.
struct SHERD_API LeakyRelu final : Layer<LeakyRelu> {
  double slope;
  explicit LeakyRelu(double slope = 0.01) : slope(slope) {}
  Tensor forward(const Tensor& x) const { return leaky_relu(x, slope); }
  void visit(auto&&) {}
};
/// x where positive, alpha (e^x - 1) elsewhere.
struct SHERD_API Elu final : Layer<Elu> {
  double alpha;
  explicit Elu(double alpha = 1) : alpha(alpha) {}
  Tensor forward(const Tensor& x) const { return elu(x, alpha); }
  void visit(auto&&) {}
};
struct SHERD_API Selu final : Layer<Selu> {
  Tensor forward(const Tensor& x) const { return selu(x); }
  void visit(auto&&) {}
};
/// log(1 + e^x).
struct SHERD_API Softplus final : Layer<Softplus> {
  Tensor forward(const Tensor& x) const { return softplus(x); }
  void visit(auto&&) {}
};
/// x sigmoid(x).
struct SHERD_API Silu final : Layer<Silu> {
  Tensor forward(const Tensor& x) const { return silu(x); }
  void visit(auto&&) {}
};
struct SHERD_API Sigmoid final : Layer<Sigmoid> {
  Tensor forward(const Tensor& x) const { return sigmoid(x); }
  void visit(auto&&) {}
};
struct SHERD_API Tanh final : Layer<Tanh> {
  Tensor forward(const Tensor& x) const { return tanh(x); }
  void visit(auto&&) {}
};
struct SHERD_API Softmax final : Layer<Softmax> {
  std::int64_t axis;
  explicit Softmax(std::int64_t axis = -1) : axis(axis) {}
  Tensor forward(const Tensor& x) const { return softmax(x, axis); }
  void visit(auto&&) {}
};
/// x as it came: in the place of a layer that is left out.
struct SHERD_API Identity final : Layer<Identity> {
  Tensor forward(const Tensor& x) const { return x; }
  void visit(auto&&) {}
};
/// The axes from `first` to `last` as one.
struct SHERD_API Flatten final : Layer<Flatten> {
  std::int64_t first, last;
  explicit Flatten(std::int64_t first = 1, std::int64_t last = -1) : first(first), last(last) {}
  Tensor forward(const Tensor& x) const { return flatten(x, first, last); }
  void visit(auto&&) {}
};
/// Any function of one tensor. What it captures is neither saved nor moved, and clones share it.
struct SHERD_API Function final : Layer<Function> {
  std::function<Tensor(const Tensor&)> function;
  explicit Function(std::function<Tensor(const Tensor&)> function) : function(std::move(function)) {}
  Tensor forward(const Tensor& x) const { return function(x); }
  void visit(auto&&) {}
};

// Compiled once, in the library.
extern template class Layer<Gelu>;
extern template class Layer<Relu>;
extern template class Layer<LeakyRelu>;
extern template class Layer<Elu>;
extern template class Layer<Selu>;
extern template class Layer<Softplus>;
extern template class Layer<Silu>;
extern template class Layer<Sigmoid>;
extern template class Layer<Tanh>;
extern template class Layer<Softmax>;
extern template class Layer<Identity>;
extern template class Layer<Flatten>;
extern template class Layer<Function>;

}  // namespace sherd::nn
