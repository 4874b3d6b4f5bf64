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
      dropout2(o.dropout) {}

Tensor TransformerEncoderLayer::forward(const Tensor& src, Causal causal) const {
  const Tensor x = norm1(add(src, dropout1(self_attn(src, src, src, causal))));
  return norm2(add(x, dropout2(linear2(dropout(relu(linear1(x)))))));
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
      dropout3(o.dropout) {}

Tensor TransformerDecoderLayer::forward(const Tensor& tgt, const Tensor& memory, Causal causal) const {
  Tensor x = norm1(add(tgt, dropout1(self_attn(tgt, tgt, tgt, causal))));
  x = norm2(add(x, dropout2(multihead_attn(x, memory, memory))));
  return norm3(add(x, dropout3(linear2(dropout(relu(linear1(x)))))));
}

TransformerEncoder::TransformerEncoder(const TransformerOptions& o)
    : layers(stack_of(TransformerEncoderLayer(o), o.encoder_layers)), norm(o.width, o.eps) {}

Tensor TransformerEncoder::forward(Tensor src, Causal causal) const {
  for (const TransformerEncoderLayer& layer : layers) src = layer(src, causal);
  return norm(src);
}

TransformerDecoder::TransformerDecoder(const TransformerOptions& o)
    : layers(stack_of(TransformerDecoderLayer(o), o.decoder_layers)), norm(o.width, o.eps) {}

Tensor TransformerDecoder::forward(Tensor tgt, const Tensor& memory, Causal causal) const {
  for (const TransformerDecoderLayer& layer : layers) tgt = layer(tgt, memory, causal);
  return norm(tgt);
}

Transformer::Transformer(const TransformerOptions& options) : encoder(options), decoder(options) {
  for (const Parameter& p : parameters())
    if (p.shape().rank() > 1) init::xavier_uniform_(p);
}

Tensor Transformer::forward(const Tensor& src, const Tensor& tgt, Causal causal) const {
  return decoder(tgt, encoder(src), causal);
}

template class Layer<TransformerEncoderLayer>;
template class Layer<TransformerDecoderLayer>;
template class Layer<TransformerEncoder>;
template class Layer<TransformerDecoder>;
template class Layer<Transformer>;

}  // namespace sherd::nn
