// What LoRA (Hu et al., 2021) adds to a linear layer: two narrow factors. nn/lora.h gives them to a model's
// layers, saves them and merges them.
#pragma once

#include <cstdint>

#include "nn/module.h"
#include "runtime/ops.h"

namespace sherd::nn {

/// Half of an adapter: y = x weight^T, plus a residual unless it is none.
struct SHERD_API LoraFactor final : Layer<LoraFactor> {
  Param weight;
  explicit LoraFactor(Tensor values) : weight(std::move(values)) {}
  Tensor forward(const Tensor& x, const Tensor& residual = {}) const {
    return linear(x, weight, {}, residual);
  }
  void visit(auto&& on) { on("weight", weight); }
};

/// What `alpha` is divided by: the rank, or its root (rsLoRA; Kalajdzievski, 2023).
enum class LoraScaling { by_rank, by_root_of_rank };

/// The part of an adapter that is no parameter, alike in all layers of a model that is saved.
struct LoraForm {
  double alpha = 8, dropout = 0;
  LoraScaling scaling = LoraScaling::by_rank;
  bool operator==(const LoraForm&) const = default;
};

/// The adapter of a linear layer, whose members `lora_A` (rank, in) and `lora_B` (out, rank) become.
struct SHERD_API LoraAdapter {
  LoraFactor lora_A, lora_B;
  LoraForm form;

  std::int64_t rank() const { return lora_A.weight.shape()[0]; }
  /// alpha / rank, or alpha / sqrt(rank).
  double scale() const;
  /// y + scale lora_B(lora_A(dropout(x))), of the adapter's products in its own dtype and the sum in the
  /// wider of both, in y's, and where they are one dtype added before the product is rounded; dropout in
  /// training alone.
  Tensor added_to(const Tensor& y, const Tensor& x) const;
  /// weight + scale lora_B.weight lora_A.weight, summed and given in the same dtypes.
  Tensor merged_into(const Tensor& weight) const;
};

// Compiled once, in the library.
extern template class Layer<LoraFactor>;

}  // namespace sherd::nn
