#include "nn/llama.h"

#include "nn/init.h"
#include "nn/most_layers.h"

namespace sherd::nn {
namespace {

LinearOptions linear_of(const LlamaOptions& o, bool bias) {
  return {bias ? Bias::yes : Bias::no, o.tensor, o.products};
}

/// The members are made of the options, so these are looked at first.
const LlamaOptions& checked(const LlamaOptions& o) {
  check<ValueError>(
      o.vocab_size > 0 && o.hidden_size > 0 && o.intermediate_size > 0 && o.num_hidden_layers > 0 &&
          o.num_attention_heads > 0 && o.key_value_heads() > 0 && o.max_position_embeddings > 0,
      "Llama: sizes must be at least 1, got vocab_size {}, hidden_size {}, intermediate_size {}, "
      "num_hidden_layers {}, num_attention_heads {}, num_key_value_heads {}, "
      "max_position_embeddings {}",
      o.vocab_size, o.hidden_size, o.intermediate_size, o.num_hidden_layers, o.num_attention_heads,
      o.key_value_heads(), o.max_position_embeddings);
  check<ValueError>(o.num_hidden_layers <= most_layers,
                    "Llama: num_hidden_layers {}, at most {} are supported; give fewer", o.num_hidden_layers,
                    most_layers);
  check<ValueError>(o.num_attention_heads % o.key_value_heads() == 0,
                    "Llama: {} heads do not divide into groups for {} of keys and values",
                    o.num_attention_heads, o.key_value_heads());
  check<ValueError>(o.head_dim.has_value() || o.hidden_size % o.num_attention_heads == 0,
                    "Llama: hidden_size {} does not divide into {} heads; give head_dim", o.hidden_size,
                    o.num_attention_heads);
  check<ValueError>(o.head_width() > 0 && o.head_width() % 2 == 0,
                    "Llama: a head of width {}; rotary positions take an even one", o.head_width());
  return o;
}

}  // namespace

SwiGlu::SwiGlu(std::int64_t width, std::int64_t hidden, LinearOptions options)
    : gate_proj(width, hidden, options), up_proj(width, hidden, options), down_proj(hidden, width, options) {}

Tensor SwiGlu::forward(const Tensor& x) const { return down_proj(swiglu(gate_proj(x), up_proj(x))); }
Tensor SwiGlu::forward(const Tensor& x, const Tensor& residual) const {
  return down_proj(swiglu(gate_proj(x), up_proj(x)), residual);
}

LlamaAttention::LlamaAttention(const LlamaOptions& o)
    : q_proj(o.hidden_size, o.num_attention_heads * o.head_width(), linear_of(o, o.attention_bias)),
      k_proj(o.hidden_size, o.key_value_heads() * o.head_width(), linear_of(o, o.attention_bias)),
      v_proj(o.hidden_size, o.key_value_heads() * o.head_width(), linear_of(o, o.attention_bias)),
      o_proj(o.num_attention_heads * o.head_width(), o.hidden_size, linear_of(o, o.attention_bias)),
      head_width(o.head_width()),
      rotary{.base = o.rope_theta, .scaling = o.rope_scaling} {}

Tensor LlamaAttention::forward(const Tensor& x, const Tensor& residual, KeyValues* cache) const {
  const std::int64_t b = x.size(0), t = x.size(1);
  const auto heads = [&](const Tensor& y) { return transpose(reshape(y, {b, t, -1, head_width}), 1, 2); };
  RotaryOptions here = rotary;
  if (cache != nullptr && cache->keys.defined()) here.first = cache->keys.size(2);
  const Tensor q = sherd::rotary(heads(q_proj(x)), here);
  Tensor k = sherd::rotary(heads(k_proj(x)), here), v = heads(v_proj(x));
  if (cache != nullptr) {
    cache->keys = k = cache->keys.defined() ? cat({cache->keys, k}, 2) : contiguous(k);
    cache->values = v = cache->values.defined() ? cat({cache->values, v}, 2) : contiguous(v);
  }
  const Tensor mixed = attention(q, k, v, {.causal = true});
  return o_proj(reshape(transpose(mixed, 1, 2), {b, t, -1}), residual);
}

LlamaBlock::LlamaBlock(const LlamaOptions& o)
    : self_attn(o),
      mlp(o.hidden_size, o.intermediate_size, linear_of(o, o.mlp_bias)),
      input_layernorm(o.hidden_size, o.rms_norm_eps, o.tensor),
      post_attention_layernorm(o.hidden_size, o.rms_norm_eps, o.tensor) {}

Tensor LlamaBlock::forward(const Tensor& x, KeyValues* cache) const {
  const Tensor h = self_attn(input_layernorm(x), x, cache);
  return mlp(post_attention_layernorm(h), h);
}

LlamaTrunk::LlamaTrunk(const LlamaOptions& o)
    : embed_tokens(o.vocab_size, o.hidden_size, o.tensor), norm(o.hidden_size, o.rms_norm_eps, o.tensor) {
  for (std::int64_t i = 0; i < o.num_hidden_layers; ++i) layers.emplace_back(o);
}

Tensor LlamaTrunk::forward(const Tensor& tokens, KeyValueCache* cache) const {
  Tensor x = embed_tokens(tokens);
  for (std::size_t i = 0; i < layers.size(); ++i) x = layers[i](x, cache == nullptr ? nullptr : &(*cache)[i]);
  return norm(x);
}

Llama::Llama(const LlamaOptions& o)
    : options(checked(o)), model(o), lm_head(o.hidden_size, o.vocab_size, {Bias::no, o.tensor}) {
  if (o.tie_word_embeddings) tie(model.embed_tokens.weight, lm_head.weight);
  for (NamedParameter& p : named_parameters())
    if (p.parameter.shape().rank() == 2)
      init::normal_(p.parameter, 0, 0.02);
    else if (p.name.ends_with("bias"))
      init::constant_(p.parameter, 0);
}

void Llama::check_tokens(const Tensor& tokens, std::int64_t before) const {
  check<ShapeError>(tokens.rank() == 2, "Llama: tokens (B, T), got shape {}", tokens.shape());
  check<ShapeError>(before + tokens.size(1) <= options.max_position_embeddings,
                    "Llama: position {} is beyond max_position_embeddings {}", before + tokens.size(1) - 1,
                    options.max_position_embeddings);
}

Tensor Llama::forward(const Tensor& tokens) const {
  check_tokens(tokens, 0);
  return lm_head(model(tokens));
}

Tensor Llama::forward(const Tensor& tokens, KeyValueCache& cache) const {
  cache.resize(model.layers.size());
  check_tokens(tokens, cache[0].keys.defined() ? cache[0].keys.size(2) : 0);
  return lm_head(model(tokens, &cache));
}

template class Layer<SwiGlu>;
template class Layer<LlamaAttention>;
template class Layer<LlamaBlock>;
template class Layer<LlamaTrunk>;
template class Layer<Llama>;

}  // namespace sherd::nn
