// Multi-head attention with its projections (Vaswani et al., 2017).
#pragma once

#include "nn/layers.h"

namespace sherd::nn {

/// Whether a position sees only those up to itself.
enum class Causal { no, yes };

/// For `MultiheadAttention`.
struct MultiheadAttentionOptions {
  double dropout = 0;        ///< of attention weights, while training; in [0, 1)
  bool batch_first = false;  ///< inputs (B, T, width) instead of (T, B, width)
  TensorOptions tensor{};
};
/// Attention of `heads` heads with width / heads features each. query (Tq, B, width), key and value (Tk, B,
/// width) to (Tq, B, width). Names, layout and first values are PyTorch's: in_proj_weight (3 width, width)
/// holds the projections of query, key and value and starts Xavier uniform, the biases start at 0. ValueError
/// when heads do not divide width, or for a dropout outside [0, 1); ShapeError for other inputs.
struct SHERD_API MultiheadAttention final : Layer<MultiheadAttention> {
  Param in_proj_weight, in_proj_bias;
  Linear out_proj;
  std::int64_t heads;
  double dropout;
  bool batch_first;

  MultiheadAttention(std::int64_t width, std::int64_t heads, MultiheadAttentionOptions options = {});
  Tensor forward(const Tensor& query, const Tensor& key, const Tensor& value,
                 Causal causal = Causal::no) const;
  void visit(auto&& on) {
    on("in_proj_weight", in_proj_weight);
    on("in_proj_bias", in_proj_bias);
    on("out_proj", out_proj);
  }

 private:
  Tensor project(const Tensor& x, std::int64_t first, std::int64_t count) const;
};

}  // namespace sherd::nn
