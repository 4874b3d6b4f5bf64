#include "nn/llama.h"

#include <algorithm>
#include <cmath>

#include "nn/init.h"
#include "nn/most_layers.h"
#include "runtime/dtype.h"
#include "runtime/ops.h"

namespace sherd::nn {
namespace {

LinearOptions linear_of(const LlamaOptions& o, bool bias) {
  return {bias ? Bias::yes : Bias::no, o.tensor, o.products};
}

void check_windows(const LlamaOptions& o) {
  check<ValueError>(!o.sliding_window || *o.sliding_window > 0, "Llama: sliding_window {} must be above 0",
                    o.sliding_window.value_or(0));
  check<ValueError>(o.sliding_window_pattern >= 0, "Llama: sliding_window_pattern {} is below 0; 0 is none",
                    o.sliding_window_pattern);
  check<ValueError>(
      o.layer_types.empty() || o.layer_types.size() == static_cast<std::size_t>(o.num_hidden_layers),
      "Llama: layer_types has {} entries for {} layers", o.layer_types.size(), o.num_hidden_layers);
  check<ValueError>(
      o.sliding_window || std::ranges::find(o.layer_types, Reach::window) == o.layer_types.end(),
      "Llama: layer_types has a layer with a window, and sliding_window is not given");
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
  check<ValueError>(
      o.rotary_width() > 0 && o.rotary_width() % 2 == 0 && o.rotary_width() <= o.head_width(),
      "Llama: a head of width {} of which {} features turn; rotary positions take an even number",
      o.head_width(), o.rotary_width());
  check_windows(o);
  const auto above_zero = [](std::string_view name, std::optional<double> value) {
    check<ValueError>(!value || *value > 0, "Llama: {} {} must be above 0", name, value.value_or(0));
  };
  above_zero("query_pre_attn_scalar", o.query_pre_attn_scalar);
  above_zero("attn_logit_softcapping", o.attn_logit_softcapping);
  above_zero("final_logit_softcapping", o.final_logit_softcapping);
  above_zero("rope_local_base_freq", o.rope_local_base_freq);
  return o;
}

/// c tanh(x / c).
Tensor capped(const Tensor& x, double c) { return mul(tanh(div(x, c)), c); }

/// Heads (B, shared, T, D) as `heads` of them.
Tensor repeated(const Tensor& x, std::int64_t heads) {
  const Shape& s = x.shape();
  if (s[1] == heads) return x;
  return reshape(expand(unsqueeze(x, 2), {s[0], s[1], heads / s[1], s[2], s[3]}), {s[0], heads, s[2], s[3]});
}

/// (T, T), true for keys that are at most `window` - 1 before their query, or behind it.
Tensor near_keys(std::int64_t steps, std::int64_t window, Device device) {
  return triu(ones({steps, steps}, {DType::boolean, device}), 1 - window);
}

/// `attention` by `options`, which are causal, of scores that `cap` caps: the formula, in the dtype that
/// kernels compute in.
Tensor capped_attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options,
                        double cap) {
  const DType wide = compute_dtype(q.dtype());
  const auto of_heads = [&](const Tensor& x) { return to(repeated(x, q.size(1)), wide); };
  const std::int64_t tq = q.size(2), tk = k.size(2);
  Tensor seen = tril(ones({tq, tk}, {DType::boolean, q.device()}), tk - tq);
  if (options.mask.defined()) seen = logical_and(seen, options.mask);
  const Tensor scores = mul(matmul(to(q, wide), transpose(of_heads(k), 2, 3)), *options.scale);
  const Tensor weights = softmax(masked_fill(capped(scores, cap), logical_not(seen), -HUGE_VAL));
  return to(matmul(weights, of_heads(v)), q.dtype());
}

/// `value` in this dtype.
double rounded_to(DType dtype, double value) {
  return with_floating("Llama", dtype, [&]<class T>() {
    return static_cast<double>(static_cast<compute_t<T>>(static_cast<T>(static_cast<compute_t<T>>(value))));
  });
}

LlamaOptions gemma_options() {
  LlamaOptions o{.hidden_size = 2304,
                 .intermediate_size = 9216,
                 .num_hidden_layers = 26,
                 .num_attention_heads = 8,
                 .num_key_value_heads = 4,
                 .head_dim = 256,
                 .tie_word_embeddings = true};
  o.hidden_act = Gate::gelu_tanh;
  o.norms = NormPlaces::before_and_behind;
  o.gain = Gain::one_plus_weight;
  o.embedding_scale = EmbeddingScale::root_of_width;
  o.query_pre_attn_scalar = 256;
  o.sliding_window = 4096;
  return o;
}

}  // namespace

LlamaOptions llama_options(LlamaFamily family) {
  LlamaOptions o{.vocab_size = 32000,
                 .hidden_size = 4096,
                 .intermediate_size = 11008,
                 .num_hidden_layers = 32,
                 .num_attention_heads = 32};
  const auto qwen = [&] {
    o.vocab_size = 151936, o.intermediate_size = 22016, o.max_position_embeddings = 32768;
    o.num_key_value_heads = 32;
  };
  switch (family) {
    case LlamaFamily::llama:
      break;
    case LlamaFamily::mistral:
      o.intermediate_size = 14336, o.max_position_embeddings = 131072;
      o.num_key_value_heads = 8, o.sliding_window = 4096;
      break;
    case LlamaFamily::qwen2:
      qwen();
      o.attention_bias = AttentionBias::inputs;
      break;
    case LlamaFamily::qwen3:
      qwen();
      o.head_dim = 128, o.query_key_norms = true;
      break;
    case LlamaFamily::gemma2:
      o = gemma_options();
      o.vocab_size = 256000, o.max_position_embeddings = 8192;
      o.attn_logit_softcapping = 50, o.final_logit_softcapping = 30;
      o.sliding_window_pattern = 2;
      break;
    case LlamaFamily::gemma3:
      o = gemma_options();
      o.vocab_size = 262208, o.max_position_embeddings = 131072;
      o.query_key_norms = true;
      o.rope_theta = 1e6, o.rope_local_base_freq = 1e4;
      o.sliding_window_pattern = 6;
      break;
    case LlamaFamily::phi3:
      o.vocab_size = 32064, o.hidden_size = 3072, o.intermediate_size = 8192;
      o.max_position_embeddings = 4096, o.rms_norm_eps = 1e-5;
      o.projections = Projections::fused;
      break;
  }
  o.family = family;
  return o;
}

std::int64_t LlamaOptions::rotary_width() const {
  const bool share = partial_rotary_factor > 0 && partial_rotary_factor <= 1;
  return share ? static_cast<std::int64_t>(static_cast<double>(head_width()) * partial_rotary_factor) : 0;
}

std::optional<std::int64_t> LlamaOptions::window_of(std::int64_t layer) const {
  if (layer_types.empty())
    return sliding_window_pattern > 0 && (layer + 1) % sliding_window_pattern == 0 ? std::nullopt
                                                                                   : sliding_window;
  const auto at = static_cast<std::size_t>(layer);
  check<ValueError>(at < layer_types.size(), "Llama: layer {} of {}, which layer_types names", layer,
                    layer_types.size());
  return layer_types[at] == Reach::all ? std::nullopt : sliding_window;
}

RotaryOptions LlamaOptions::rotary_of(std::int64_t layer) const {
  if (rope_local_base_freq && window_of(layer)) return {.base = *rope_local_base_freq};
  RotaryOptions o{.base = rope_theta, .scaling = rope_scaling};
  if (rope_scaling.kind == RotaryKind::dynamic)
    o.scaling.original = static_cast<double>(max_position_embeddings);
  return o;
}

std::int64_t LlamaOptions::context() const {
  const RotaryScaling& s = rope_scaling;
  const auto trained = static_cast<double>(max_position_embeddings);
  constexpr double most = 1e15;
  double positions = trained;
  if (s.kind == RotaryKind::linear || s.kind == RotaryKind::dynamic) positions = s.factor * trained;
  if (s.kind == RotaryKind::yarn || s.kind == RotaryKind::yarn_fractional)
    positions = std::max(s.factor * s.original, trained);
  return static_cast<std::int64_t>(std::min(positions, most));
}

GatedMlp::GatedMlp(std::int64_t width, std::int64_t hidden, LinearOptions options, Gate gate,
                   Projections projections)
    : down_proj(hidden, width, options), gate(gate) {
  if (projections == Projections::fused) {
    gate_up_proj.emplace(width, 2 * hidden, options);
  } else {
    gate_proj.emplace(width, hidden, options);
    up_proj.emplace(width, hidden, options);
  }
}

Tensor GatedMlp::hidden(const Tensor& x) const {
  Tensor g, up;
  if (gate_up_proj) {
    const Tensor both = (*gate_up_proj)(x);
    const std::int64_t half = both.size(-1) / 2;
    g = narrow(both, -1, 0, half), up = narrow(both, -1, half, half);
  } else {
    g = (*gate_proj)(x), up = (*up_proj)(x);
  }
  if (gate == Gate::silu) return swiglu(g, up);
  return mul(gelu(g, gate == Gate::gelu ? GeluForm::erf : GeluForm::tanh), up);
}

Tensor GatedMlp::forward(const Tensor& x) const { return down_proj(hidden(x)); }
Tensor GatedMlp::forward(const Tensor& x, const Tensor& residual) const {
  return down_proj(hidden(x), residual);
}

LlamaAttention::LlamaAttention(const LlamaOptions& o, std::int64_t layer)
    : o_proj(o.num_attention_heads * o.head_width(), o.hidden_size,
             linear_of(o, o.attention_bias == AttentionBias::all)),
      heads(o.num_attention_heads),
      shared_heads(o.key_value_heads()),
      head_width(o.head_width()),
      rotary_width(o.rotary_width()),
      rotary(o.rotary_of(layer)),
      scale(1 / std::sqrt(o.query_pre_attn_scalar.value_or(static_cast<double>(head_width)))),
      soft_cap(o.attn_logit_softcapping),
      window(o.window_of(layer)) {
  const auto projection = [&](std::optional<Linear>& linear, std::int64_t features) {
    linear.emplace(o.hidden_size, features, linear_of(o, o.attention_bias != AttentionBias::none));
  };
  if (o.projections == Projections::fused) {
    projection(qkv_proj, (heads + 2 * shared_heads) * head_width);
  } else {
    projection(q_proj, heads * head_width);
    projection(k_proj, shared_heads * head_width);
    projection(v_proj, shared_heads * head_width);
  }
  if (!o.query_key_norms) return;
  q_norm.emplace(head_width, o.rms_norm_eps, o.tensor, o.gain);
  k_norm.emplace(head_width, o.rms_norm_eps, o.tensor, o.gain);
}

/// Heads x (B, T, H, D) as (B, H, T, D), the first features turned: by rows for T, or for B T of rows that
/// are at unlike positions.
Tensor LlamaAttention::turned(const Tensor& x, const RotaryTurns& turns) const {
  const auto by_rows = [&](const Tensor& y) {
    if (turns.cosines.size(0) == y.size(1)) return sherd::rotary(transpose(y, 1, 2), turns);
    const Tensor rows = transpose(reshape(y, {y.size(0) * y.size(1), y.size(2), y.size(3)}), 0, 1);
    return transpose(reshape(transpose(sherd::rotary(rows, turns), 0, 1), y.shape()), 1, 2);
  };
  if (rotary_width == head_width) return by_rows(x);
  return cat({by_rows(narrow(x, -1, 0, rotary_width)),
              transpose(narrow(x, -1, rotary_width, head_width - rotary_width), 1, 2)},
             -1);
}

/// Heads (B, T, H, D), not yet turned.
LlamaAttention::Heads LlamaAttention::projected(const Tensor& x) const {
  const std::int64_t b = x.size(0), t = x.size(1);
  const auto split = [&](const Tensor& y) { return reshape(y, {b, t, y.size(-1) / head_width, head_width}); };
  Tensor q, k, v;
  if (qkv_proj) {
    const Tensor all = split((*qkv_proj)(x));
    q = narrow(all, 2, 0, heads), k = narrow(all, 2, heads, shared_heads);
    v = narrow(all, 2, heads + shared_heads, shared_heads);
  } else {
    q = split((*q_proj)(x)), k = split((*k_proj)(x)), v = split((*v_proj)(x));
  }
  if (q_norm) q = (*q_norm)(q), k = (*k_norm)(k);
  return {q, k, v};
}

/// What the heads take from the values, (B, T, H D).
Tensor LlamaAttention::attended(Heads given, KeyValues* cache) const {
  auto& [q, k, v] = given;
  const std::int64_t b = q.size(0), t = q.size(1);
  const TensorOptions like{q.dtype(), q.device()};
  const RotaryTurns turns = cache == nullptr ? rotary_turns(t, rotary_width, rotary, like)
                                             : cache->turns(rotary, rotary_width, t, like);
  q = turned(q, turns), k = turned(k, turns), v = transpose(v, 1, 2);
  AttentionOptions options{.causal = true, .scale = scale};
  if (cache != nullptr) {
    cache->append(k, v, window);
    k = cache->keys(), v = cache->values();
    options.mask = cache->mask(t, window);
  } else if (window && t > *window) {
    options.mask = near_keys(t, *window, q.device());
  }
  const Tensor y = soft_cap ? capped_attention(q, k, v, options, *soft_cap) : attention(q, k, v, options);
  return reshape(transpose(y, 1, 2), {b, t, heads * head_width});
}

Tensor LlamaAttention::mixed(const Tensor& x, KeyValues* cache) const {
  return attended(projected(x), cache);
}

Tensor LlamaAttention::mixed(const Tensor& x, const Documents& documents) const {
  const Heads all = projected(x);
  const auto row = [&](const Tensor& y) {
    return reshape(y, {1, y.size(0) * y.size(1), y.size(2), head_width});
  };
  const Tensor y = by_document(
      documents, {row(all.q), row(all.k), row(all.v)},
      [&](const std::vector<Tensor>& parts) { return attended({parts[0], parts[1], parts[2]}, nullptr); });
  return reshape(y, {x.size(0), x.size(1), heads * head_width});
}

Tensor LlamaAttention::forward(const Tensor& x, KeyValues* cache) const { return o_proj(mixed(x, cache)); }
Tensor LlamaAttention::forward(const Tensor& x, const Tensor& residual, KeyValues* cache) const {
  return o_proj(mixed(x, cache), residual);
}
Tensor LlamaAttention::forward(const Tensor& x, const Documents& documents) const {
  return o_proj(mixed(x, documents));
}
Tensor LlamaAttention::forward(const Tensor& x, const Tensor& residual, const Documents& documents) const {
  return o_proj(mixed(x, documents), residual);
}

LlamaBlock::LlamaBlock(const LlamaOptions& o, std::int64_t layer)
    : self_attn(o, layer),
      mlp(o.hidden_size, o.intermediate_size, linear_of(o, o.mlp_bias), o.hidden_act, o.projections),
      input_layernorm(o.hidden_size, o.rms_norm_eps, o.tensor, o.gain),
      post_attention_layernorm(o.hidden_size, o.rms_norm_eps, o.tensor, o.gain) {
  if (o.norms == NormPlaces::before) return;
  pre_feedforward_layernorm.emplace(o.hidden_size, o.rms_norm_eps, o.tensor, o.gain);
  post_feedforward_layernorm.emplace(o.hidden_size, o.rms_norm_eps, o.tensor, o.gain);
}

template <class Context>
Tensor LlamaBlock::with_branches(const Tensor& x, Context& context) const {
  if (!pre_feedforward_layernorm) {
    const Tensor h = self_attn(input_layernorm(x), x, context);
    return mlp(post_attention_layernorm(h), h);
  }
  const Tensor h = add(x, post_attention_layernorm(self_attn(input_layernorm(x), context)));
  return add(h, (*post_feedforward_layernorm)(mlp((*pre_feedforward_layernorm)(h))));
}

Tensor LlamaBlock::forward(const Tensor& x, KeyValues* cache) const { return with_branches(x, cache); }
Tensor LlamaBlock::forward(const Tensor& x, const Documents& documents) const {
  return with_branches(x, documents);
}

LlamaTrunk::LlamaTrunk(const LlamaOptions& o)
    : embed_tokens(o.vocab_size, o.hidden_size, o.tensor),
      norm(o.hidden_size, o.rms_norm_eps, o.tensor, o.gain),
      embedding_scale(o.embedding_scale) {
  for (std::int64_t i = 0; i < o.num_hidden_layers; ++i) layers.emplace_back(o, i);
}

Tensor LlamaTrunk::embedded(const Tensor& tokens) const {
  const Tensor x = embed_tokens(tokens);
  if (embedding_scale == EmbeddingScale::one) return x;
  return mul(x, rounded_to(x.dtype(), std::sqrt(static_cast<double>(x.size(-1)))));
}

Tensor LlamaTrunk::forward(const Tensor& tokens, const Documents& documents) const {
  Tensor x = embedded(tokens);
  for (const LlamaBlock& layer : layers) x = layer(x, documents);
  return norm(x);
}

Tensor LlamaTrunk::forward(const Tensor& tokens, KeyValueCache* cache) const {
  Tensor x = embedded(tokens);
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
  check<ShapeError>(
      before + tokens.size(1) <= options.context(),
      "Llama: {} positions, the model takes {} (max_position_embeddings {}, scaled by {}); give "
      "fewer tokens, or scale further (rope_scaling)",
      before + tokens.size(1), options.context(), options.max_position_embeddings,
      options.rope_scaling.factor);
}

Tensor Llama::logits(const Tensor& x) const {
  const Tensor y = lm_head(x);
  return options.final_logit_softcapping ? capped(y, *options.final_logit_softcapping) : y;
}

Tensor Llama::loss(const Tensor& x, const ClassTargets& targets) const {
  return options.final_logit_softcapping ? detail::loss_of_logits(logits(x), targets) : lm_head(x, targets);
}

Tensor Llama::forward(const Tensor& tokens) const {
  check_tokens(tokens, 0);
  return logits(model(tokens));
}

Tensor Llama::forward(const Tensor& tokens, const ClassTargets& targets) const {
  check_tokens(tokens, 0);
  return loss(model(tokens), targets);
}

Tensor Llama::forward(const Tensor& tokens, KeyValueCache& cache, Logits of) const {
  cache.resize(model.layers.size());
  check_tokens(tokens, cache[0].seen());
  const Tensor x = model(tokens, &cache);
  return logits(of == Logits::last ? narrow(x, 1, x.size(1) - 1, 1) : x);
}

Tensor Llama::features(const Tensor& tokens, const Documents& documents) const {
  check<ShapeError>(tokens.rank() == 2, "Llama: tokens (B, T), got shape {}", tokens.shape());
  check_documents("Llama", documents, tokens.numel(), options.context());
  return model(tokens, documents);
}

Tensor Llama::forward(const Tensor& tokens, const Documents& documents) const {
  return logits(features(tokens, documents));
}

Tensor Llama::forward(const Tensor& tokens, const Documents& documents, const ClassTargets& targets) const {
  return loss(features(tokens, documents), targets);
}

template class Layer<GatedMlp>;
template class Layer<LlamaAttention>;
template class Layer<LlamaBlock>;
template class Layer<LlamaTrunk>;
template class Layer<Llama>;

}  // namespace sherd::nn
