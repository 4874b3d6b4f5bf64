// A decoder-only Transformer in the manner of Llama (Touvron et al., 2023), with the names of Hugging Face's
// files.
#pragma once

#include <optional>

#include "nn/gpt.h"

namespace sherd::nn {

/// down_proj(silu(gate_proj(x)) up_proj(x)) (Shazeer, 2020), x (..., width), with `hidden` features between.
struct SHERD_API SwiGlu final : Layer<SwiGlu> {
  Linear gate_proj, up_proj, down_proj;
  SwiGlu(std::int64_t width, std::int64_t hidden, LinearOptions options = {.bias = Bias::no});
  Tensor forward(const Tensor& x) const;
  /// The same plus `residual`.
  Tensor forward(const Tensor& x, const Tensor& residual) const;
  void visit(auto&& on) {
    on("gate_proj", gate_proj);
    on("up_proj", up_proj);
    on("down_proj", down_proj);
  }
};

/// Sizes of a Llama, named as in Hugging Face's config.json. ValueError for sizes below 1, heads that do not
/// divide into groups, and a head of odd width.
struct LlamaOptions {
  std::int64_t vocab_size = 256, hidden_size = 128, intermediate_size = 352, num_hidden_layers = 4;
  std::int64_t num_attention_heads = 4;
  std::optional<std::int64_t> num_key_value_heads{};  ///< as many as the others if not given
  std::optional<std::int64_t> head_dim{};             ///< hidden_size / num_attention_heads if not given
  std::int64_t max_position_embeddings = 2048;
  double rms_norm_eps = 1e-6, rope_theta = 10000;
  RotaryScaling rope_scaling{};
  bool tie_word_embeddings = false, attention_bias = false, mlp_bias = false;
  TensorOptions tensor{};                  ///< of all parameters
  Products products = Products::as_given;  ///< of the blocks' linear layers, not of the head

  std::int64_t key_value_heads() const { return num_key_value_heads.value_or(num_attention_heads); }
  std::int64_t head_width() const { return head_dim.value_or(hidden_size / num_attention_heads); }
};

/// Causal attention whose queries and keys are turned by their positions, and whose heads share keys and
/// values in groups (Ainslie et al., 2023).
struct SHERD_API LlamaAttention final : Layer<LlamaAttention> {
  Linear q_proj, k_proj, v_proj, o_proj;
  std::int64_t head_width;
  RotaryOptions rotary;

  explicit LlamaAttention(const LlamaOptions& options);
  /// x (B, T, hidden_size), plus `residual`. With a cache x holds the newest positions only.
  Tensor forward(const Tensor& x, const Tensor& residual, KeyValues* cache = nullptr) const;
  void visit(auto&& on) {
    on("q_proj", q_proj);
    on("k_proj", k_proj);
    on("v_proj", v_proj);
    on("o_proj", o_proj);
  }
};

/// h = x + self_attn(input_layernorm(x)), then h + mlp(post_attention_layernorm(h)).
struct SHERD_API LlamaBlock final : Layer<LlamaBlock> {
  LlamaAttention self_attn;
  SwiGlu mlp;
  RmsNorm input_layernorm, post_attention_layernorm;

  explicit LlamaBlock(const LlamaOptions& options);
  Tensor forward(const Tensor& x, KeyValues* cache = nullptr) const;
  void visit(auto&& on) {
    on("self_attn", self_attn);
    on("mlp", mlp);
    on("input_layernorm", input_layernorm);
    on("post_attention_layernorm", post_attention_layernorm);
  }
};

/// What is below the head: tokens (B, T) -> (B, T, hidden_size).
struct SHERD_API LlamaTrunk final : Layer<LlamaTrunk> {
  Embedding embed_tokens;
  ModuleList<LlamaBlock> layers;
  RmsNorm norm;

  explicit LlamaTrunk(const LlamaOptions& options);
  Tensor forward(const Tensor& tokens, KeyValueCache* cache = nullptr) const;
  void visit(auto&& on) {
    on("embed_tokens", embed_tokens);
    on("layers", layers);
    on("norm", norm);
  }
};

/// tokens (B, T) i64 -> logits (B, T, vocab_size). ShapeError unless tokens have two axes and, with the
/// cached positions, T is at most max_position_embeddings. Matrices start normal with deviation 0.02.
struct SHERD_API Llama final : Layer<Llama> {
  LlamaOptions options;
  LlamaTrunk model;
  Linear lm_head;

  explicit Llama(const LlamaOptions& options);
  Tensor forward(const Tensor& tokens) const;
  /// Logits of the newest tokens (B, T), which follow the positions already in the cache.
  Tensor forward(const Tensor& tokens, KeyValueCache& cache) const;
  void visit(auto&& on) {
    on("model", model);
    on("lm_head", lm_head);
  }

 private:
  void check_tokens(const Tensor& tokens, std::int64_t before) const;
};

// Compiled once, in the library.
extern template class Layer<SwiGlu>;
extern template class Layer<LlamaAttention>;
extern template class Layer<LlamaBlock>;
extern template class Layer<LlamaTrunk>;
extern template class Layer<Llama>;

}  // namespace sherd::nn
