#include "nn/transformer.h"

#include "nn/init.h"
#include "nn/most_layers.h"

namespace sherd::nn {
namespace {

MultiheadAttention attention_of(const TransformerOptions& o) {
  return {o.width, o.heads, {o.dropout, o.batch_first, {}}};
}

/// `count` clones of one prototype.
template <class M>
ModuleList<M> stack_of(const M& prototype, std::int64_t count) {
  check<ValueError>(count >= 0, "Transformer: {} layers", count);
  check<ValueError>(count <= most_layers, "Transformer: {} layers, at most {} are supported; give fewer",
                    count, most_layers);
  ModuleList<M> layers;
  for (std::int64_t i = 0; i < count; ++i) layers.emplace_back(prototype.clone());
  return layers;
}

}  // namespace

TransformerEncoderLayer::TransformerEncoderLayer(const TransformerOptions& o)
    : self_attn(attention_of(o)),
      linear1(o.width, o.feedforward),
      dropout(o.dropout),
      linear2(o.feedforward, o.width),
      norm1(o.width, o.eps),
      norm2(o.width, o.eps),
      dropout1(o.dropout),
      dropout2(o.dropout),
      norm_first(o.norm_first),
      activation(o.activation) {}

Tensor TransformerEncoderLayer::attended(const Tensor& x, const AttentionMasks& masks) const {
  return dropout1(self_attn(x, x, x, masks));
}

Tensor TransformerEncoderLayer::fed_forward(const Tensor& x) const {
  return dropout2(linear2(dropout(linear1(x, activation))));
}

Tensor TransformerEncoderLayer::forward(const Tensor& src, const AttentionMasks& masks) const {
  if (norm_first) {
    const Tensor x = add(src, attended(norm1(src), masks));
    return add(x, fed_forward(norm2(x)));
  }
  const Tensor x = norm1(add(src, attended(src, masks)));
  return norm2(add(x, fed_forward(x)));
}

TransformerDecoderLayer::TransformerDecoderLayer(const TransformerOptions& o)
    : self_attn(attention_of(o)),
      multihead_attn(attention_of(o)),
      linear1(o.width, o.feedforward),
      dropout(o.dropout),
      linear2(o.feedforward, o.width),
      norm1(o.width, o.eps),
      norm2(o.width, o.eps),
      norm3(o.width, o.eps),
      dropout1(o.dropout),
      dropout2(o.dropout),
      dropout3(o.dropout),
      norm_first(o.norm_first),
      activation(o.activation) {}

Tensor TransformerDecoderLayer::attended(const Tensor& x, const AttentionMasks& masks) const {
  return dropout1(self_attn(x, x, x, masks));
}

Tensor TransformerDecoderLayer::remembered(const Tensor& x, const Tensor& memory,
                                           const AttentionMasks& masks) const {
  return dropout2(multihead_attn(x, memory, memory, masks));
}

Tensor TransformerDecoderLayer::fed_forward(const Tensor& x) const {
  return dropout3(linear2(dropout(linear1(x, activation))));
}

Tensor TransformerDecoderLayer::forward(const Tensor& tgt, const Tensor& memory,
                                        const DecoderMasks& masks) const {
  if (norm_first) {
    Tensor x = add(tgt, attended(norm1(tgt), masks.tgt));
    x = add(x, remembered(norm2(x), memory, masks.memory));
    return add(x, fed_forward(norm3(x)));
  }
  Tensor x = norm1(add(tgt, attended(tgt, masks.tgt)));
  x = norm2(add(x, remembered(x, memory, masks.memory)));
  return norm3(add(x, fed_forward(x)));
}

TransformerEncoder::TransformerEncoder(const TransformerOptions& o)
    : layers(stack_of(TransformerEncoderLayer(o), o.encoder_layers)), norm(o.width, o.eps) {}

Tensor TransformerEncoder::forward(Tensor src, const AttentionMasks& masks) const {
  for (const TransformerEncoderLayer& layer : layers) src = layer(src, masks);
  return norm(src);
}

TransformerDecoder::TransformerDecoder(const TransformerOptions& o)
    : layers(stack_of(TransformerDecoderLayer(o), o.decoder_layers)), norm(o.width, o.eps) {}

Tensor TransformerDecoder::forward(Tensor tgt, const Tensor& memory, const DecoderMasks& masks) const {
  for (const TransformerDecoderLayer& layer : layers) tgt = layer(tgt, memory, masks);
  return norm(tgt);
}

Transformer::Transformer(const TransformerOptions& options) : encoder(options), decoder(options) {
  for (const Parameter& p : parameters())
    if (p.shape().rank() > 1) init::xavier_uniform_(p);
}

Tensor Transformer::forward(const Tensor& src, const Tensor& tgt, const TransformerMasks& masks) const {
  return decoder(tgt, encoder(src, masks.src), DecoderMasks{masks.tgt, masks.memory});
}

template class Layer<TransformerEncoderLayer>;
template class Layer<TransformerDecoderLayer>;
template class Layer<TransformerEncoder>;
template class Layer<TransformerDecoder>;
template class Layer<Transformer>;

}  // namespace sherd::nn
