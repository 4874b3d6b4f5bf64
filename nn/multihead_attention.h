// Multi-head attention with its projections (Vaswani et al., 2017).
#pragma once

#include "nn/layers.h"

namespace sherd::nn {

/// Whether a position sees only those up to itself.
enum class Causal { no, yes };

/// What attention does not look at. Masks are PyTorch's: true hides a key (in the op `attention` it shows
/// one), or floats in the query's dtype are added to the scores.
struct AttentionMasks {
  Causal causal = Causal::no;
  Tensor attn_mask{};  ///< (Tq, Tk), (B heads, Tq, Tk), or four axes that broadcast to (B, heads, Tq, Tk)
  Tensor key_padding_mask{};  ///< (B, Tk), or none
};
/// The masks that are there, for observers of modules.
template <class F>
void tensors_in(AttentionMasks& masks, F&& visit) {
  for (Tensor* t : {&masks.attn_mask, &masks.key_padding_mask})
    if (t->defined()) visit(*t);
}

/// The rest of them, for compiled modules.
template <class F>
void values_in(const AttentionMasks& masks, F&& visit) {
  visit(masks.causal);
}

/// For `MultiheadAttention`.
struct MultiheadAttentionOptions {
  double dropout = 0;        ///< of attention weights, while training; in [0, 1)
  bool batch_first = false;  ///< inputs (B, T, width) instead of (T, B, width)
  TensorOptions tensor{};
};
/// Attention of `heads` heads with width / heads features each. query (Tq, B, width), key and value (Tk, B,
/// width) to (Tq, B, width). Names, layout and first values are PyTorch's: in_proj_weight (3 width, width)
/// holds the projections of query, key and value and starts Xavier uniform, the biases start at 0. ValueError
/// when heads do not divide width, or for a dropout outside [0, 1); ShapeError for other inputs and masks,
/// DTypeError for masks of other dtypes. A query that bool masks leave no key gets zeros from its heads,
/// where PyTorch has NaN; one that added masks leave none gets NaN.
struct SHERD_API MultiheadAttention final : Layer<MultiheadAttention> {
  Param in_proj_weight, in_proj_bias;
  Linear out_proj;
  std::int64_t heads;
  double dropout;
  bool batch_first;

  MultiheadAttention(std::int64_t width, std::int64_t heads, MultiheadAttentionOptions options = {});
  Tensor forward(const Tensor& query, const Tensor& key, const Tensor& value,
                 Causal causal = Causal::no) const {
    return forward(query, key, value, AttentionMasks{causal});
  }
  Tensor forward(const Tensor& query, const Tensor& key, const Tensor& value,
                 const AttentionMasks& masks) const;
  using Layer::operator();
  /// With masks in braces, whose type the templates cannot know: `layer(q, k, v, {.key_padding_mask = m})`.
  Tensor operator()(const Tensor& query, const Tensor& key, const Tensor& value,
                    const AttentionMasks& masks) const {
    return Layer::operator()(query, key, value, masks);
  }
  void visit(auto&& on) {
    on("in_proj_weight", in_proj_weight);
    on("in_proj_bias", in_proj_bias);
    on("out_proj", out_proj);
  }

 private:
  Tensor project(const Tensor& x, std::int64_t first, std::int64_t count) const;
  AttentionOptions rule(const AttentionMasks& masks, const Shape& scores, DType dtype) const;
};

// Compiled once, in the library.
extern template class Layer<MultiheadAttention>;

}  // namespace sherd::nn
