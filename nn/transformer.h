// The encoder-decoder Transformer (Vaswani et al., 2017): post-norm, ReLU, with PyTorch's names and layout,
// so that a state dict of torch.nn.Transformer loads.
#pragma once

#include "nn/multihead_attention.h"

namespace sherd::nn {

/// Sizes of a Transformer. ValueError for a negative number of layers, a dropout outside [0, 1) and heads
/// that do not divide width.
struct TransformerOptions {
  std::int64_t width = 512, heads = 8, encoder_layers = 6, decoder_layers = 6, feedforward = 2048;
  double dropout = 0.1;
  double eps = 1e-5;
  bool batch_first = false;  ///< (B, T, width) instead of (T, B, width)
};

/// Self-attention, then two linear layers with a ReLU in between; the result of each part, with dropout, is
/// added to its input, and the sum normalised. src (S, B, width) to the same shape.
struct SHERD_API TransformerEncoderLayer final : Layer<TransformerEncoderLayer> {
  MultiheadAttention self_attn;
  Linear linear1;
  Dropout dropout;
  Linear linear2;
  LayerNorm norm1, norm2;
  Dropout dropout1, dropout2;

  explicit TransformerEncoderLayer(const TransformerOptions& options);
  Tensor forward(const Tensor& src, Causal causal = Causal::no) const;
  void visit(auto&& on) {
    on("self_attn", self_attn);
    on("linear1", linear1);
    on("dropout", dropout);
    on("linear2", linear2);
    on("norm1", norm1);
    on("norm2", norm2);
    on("dropout1", dropout1);
    on("dropout2", dropout2);
  }
};

/// Self-attention over tgt (T, B, width), attention to the encoder's output `memory` (S, B, width), then two
/// linear layers, each as in the encoder's layer. `causal` is for the self-attention.
struct SHERD_API TransformerDecoderLayer final : Layer<TransformerDecoderLayer> {
  MultiheadAttention self_attn, multihead_attn;
  Linear linear1;
  Dropout dropout;
  Linear linear2;
  LayerNorm norm1, norm2, norm3;
  Dropout dropout1, dropout2, dropout3;

  explicit TransformerDecoderLayer(const TransformerOptions& options);
  Tensor forward(const Tensor& tgt, const Tensor& memory, Causal causal = Causal::no) const;
  void visit(auto&& on) {
    on("self_attn", self_attn);
    on("multihead_attn", multihead_attn);
    on("linear1", linear1);
    on("dropout", dropout);
    on("linear2", linear2);
    on("norm1", norm1);
    on("norm2", norm2);
    on("norm3", norm3);
    on("dropout1", dropout1);
    on("dropout2", dropout2);
    on("dropout3", dropout3);
  }
};

/// Encoder layers, clones of one at first, then a LayerNorm.
struct SHERD_API TransformerEncoder final : Layer<TransformerEncoder> {
  ModuleList<TransformerEncoderLayer> layers;
  LayerNorm norm;

  explicit TransformerEncoder(const TransformerOptions& options);
  Tensor forward(Tensor src, Causal causal = Causal::no) const;
  void visit(auto&& on) {
    on("layers", layers);
    on("norm", norm);
  }
};

/// Decoder layers, clones of one at first, then a LayerNorm.
struct SHERD_API TransformerDecoder final : Layer<TransformerDecoder> {
  ModuleList<TransformerDecoderLayer> layers;
  LayerNorm norm;

  explicit TransformerDecoder(const TransformerOptions& options);
  Tensor forward(Tensor tgt, const Tensor& memory, Causal causal = Causal::no) const;
  void visit(auto&& on) {
    on("layers", layers);
    on("norm", norm);
  }
};

/// src (S, B, width) and tgt (T, B, width) to (T, B, width); batch_first swaps the first two axes of each.
/// Matrices start Xavier uniform, each drawn for itself.
struct SHERD_API Transformer final : Layer<Transformer> {
  TransformerEncoder encoder;
  TransformerDecoder decoder;

  explicit Transformer(const TransformerOptions& options = {});
  /// `causal` masks the self-attention over tgt only.
  Tensor forward(const Tensor& src, const Tensor& tgt, Causal causal = Causal::no) const;
  void visit(auto&& on) {
    on("encoder", encoder);
    on("decoder", decoder);
  }
};

// Compiled once, in the library.
extern template class Layer<TransformerEncoderLayer>;
extern template class Layer<TransformerDecoderLayer>;
extern template class Layer<TransformerEncoder>;
extern template class Layer<TransformerDecoder>;
extern template class Layer<Transformer>;

}  // namespace sherd::nn
