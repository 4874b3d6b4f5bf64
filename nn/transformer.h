// The encoder-decoder Transformer (Vaswani et al., 2017) with PyTorch's names and layout, so that a state
// dict of torch.nn.Transformer loads.
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
  bool norm_first = false;   ///< what a part takes is normalised, not its sum (Xiong et al., 2020)
  Activation activation = Activation::relu;  ///< between the linear layers
};

/// What a decoder does not look at: `tgt` in its self-attention, `memory` in the encoder's output.
struct DecoderMasks {
  AttentionMasks tgt{}, memory{};
};
/// What a Transformer does not look at, by PyTorch's names `src_mask`, `src_key_padding_mask` and so on: in
/// the encoder's self-attention, the decoder's, and its attention to the encoder's output. A padding of the
/// source is asked for in both `src` and `memory`.
struct TransformerMasks {
  AttentionMasks src{}, tgt{}, memory{};
};
/// The masks that are there, for observers of modules.
template <class F>
void tensors_in(DecoderMasks& masks, F&& visit) {
  tensors_in(masks.tgt, visit);
  tensors_in(masks.memory, visit);
}
template <class F>
void tensors_in(TransformerMasks& masks, F&& visit) {
  for (AttentionMasks* part : {&masks.src, &masks.tgt, &masks.memory}) tensors_in(*part, visit);
}
/// The rest of them, for compiled modules.
template <class F>
void values_in(const DecoderMasks& masks, F&& visit) {
  values_in(masks.tgt, visit);
  values_in(masks.memory, visit);
}
template <class F>
void values_in(const TransformerMasks& masks, F&& visit) {
  for (const AttentionMasks* part : {&masks.src, &masks.tgt, &masks.memory}) values_in(*part, visit);
}

/// Self-attention, then two linear layers with an activation in between; the result of each part, with
/// dropout, is added to its input, and the sum normalised; with `norm_first` the part's input is. src (S, B,
/// width) to the same shape. Masks as for `MultiheadAttention`.
struct SHERD_API TransformerEncoderLayer final : Layer<TransformerEncoderLayer> {
  MultiheadAttention self_attn;
  Linear linear1;
  Dropout dropout;
  Linear linear2;
  LayerNorm norm1, norm2;
  Dropout dropout1, dropout2;
  bool norm_first;
  Activation activation;

  explicit TransformerEncoderLayer(const TransformerOptions& options);
  Tensor forward(const Tensor& src, Causal causal = Causal::no) const {
    return forward(src, AttentionMasks{causal});
  }
  Tensor forward(const Tensor& src, const AttentionMasks& masks) const;
  using Layer::operator();
  /// With masks in braces: `layer(src, {.key_padding_mask = m})`.
  Tensor operator()(const Tensor& src, const AttentionMasks& masks) const {
    return Layer::operator()(src, masks);
  }
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

 private:
  Tensor attended(const Tensor& x, const AttentionMasks& masks) const;
  Tensor fed_forward(const Tensor& x) const;
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
  bool norm_first;
  Activation activation;

  explicit TransformerDecoderLayer(const TransformerOptions& options);
  Tensor forward(const Tensor& tgt, const Tensor& memory, Causal causal = Causal::no) const {
    return forward(tgt, memory, DecoderMasks{.tgt = {causal}});
  }
  Tensor forward(const Tensor& tgt, const Tensor& memory, const DecoderMasks& masks) const;
  using Layer::operator();
  /// With masks in braces: `layer(tgt, memory, {.memory = {.key_padding_mask = m}})`.
  Tensor operator()(const Tensor& tgt, const Tensor& memory, const DecoderMasks& masks) const {
    return Layer::operator()(tgt, memory, masks);
  }
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

 private:
  Tensor attended(const Tensor& x, const AttentionMasks& masks) const;
  Tensor remembered(const Tensor& x, const Tensor& memory, const AttentionMasks& masks) const;
  Tensor fed_forward(const Tensor& x) const;
};

/// Encoder layers, clones of one at first, then a LayerNorm.
struct SHERD_API TransformerEncoder final : Layer<TransformerEncoder> {
  ModuleList<TransformerEncoderLayer> layers;
  LayerNorm norm;

  explicit TransformerEncoder(const TransformerOptions& options);
  Tensor forward(const Tensor& src, Causal causal = Causal::no) const {
    return forward(src, AttentionMasks{causal});
  }
  /// Each layer with the same masks.
  Tensor forward(Tensor src, const AttentionMasks& masks) const;
  using Layer::operator();
  Tensor operator()(const Tensor& src, const AttentionMasks& masks) const {
    return Layer::operator()(src, masks);
  }
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
  Tensor forward(const Tensor& tgt, const Tensor& memory, Causal causal = Causal::no) const {
    return forward(tgt, memory, DecoderMasks{.tgt = {causal}});
  }
  /// Each layer with the same masks.
  Tensor forward(Tensor tgt, const Tensor& memory, const DecoderMasks& masks) const;
  using Layer::operator();
  Tensor operator()(const Tensor& tgt, const Tensor& memory, const DecoderMasks& masks) const {
    return Layer::operator()(tgt, memory, masks);
  }
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
  Tensor forward(const Tensor& src, const Tensor& tgt, Causal causal = Causal::no) const {
    return forward(src, tgt, TransformerMasks{.tgt = {causal}});
  }
  Tensor forward(const Tensor& src, const Tensor& tgt, const TransformerMasks& masks) const;
  using Layer::operator();
  /// With masks in braces: `model(src, tgt, {.tgt = {.causal = Causal::yes}})`.
  Tensor operator()(const Tensor& src, const Tensor& tgt, const TransformerMasks& masks) const {
    return Layer::operator()(src, tgt, masks);
  }
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
