// Decoder-only Transformers in the manner of Llama (Touvron et al., 2023): one module whose options say what
// Llama, Mistral, Qwen, Gemma and Phi differ in, with the names of Hugging Face's files.
#pragma once

#include <optional>
#include <vector>

#include "nn/gpt.h"

namespace sherd::nn {

/// What the gate of a feed-forward layer goes through: silu, gelu, or gelu by tanh.
enum class Gate { silu, gelu, gelu_tanh };
/// Whether what is projected of one input is a layer each, or one for all (`qkv_proj`, `gate_up_proj`).
enum class Projections { apart, fused };

/// down_proj(gate(gate_proj(x)) up_proj(x)) (Shazeer, 2020), x (..., width), with `hidden` features between.
struct SHERD_API GatedMlp final : Layer<GatedMlp> {
  std::optional<Linear> gate_proj, up_proj;
  std::optional<Linear> gate_up_proj;  ///< in place of both, the gate's features first
  Linear down_proj;
  Gate gate;
  GatedMlp(std::int64_t width, std::int64_t hidden, LinearOptions options = {.bias = Bias::no},
           Gate gate = Gate::silu, Projections projections = Projections::apart);
  Tensor forward(const Tensor& x) const;
  /// The same plus `residual`.
  Tensor forward(const Tensor& x, const Tensor& residual) const;
  void visit(auto&& on) {
    if (gate_proj) on("gate_proj", *gate_proj);
    if (up_proj) on("up_proj", *up_proj);
    if (gate_up_proj) on("gate_up_proj", *gate_up_proj);
    on("down_proj", down_proj);
  }

 private:
  Tensor hidden(const Tensor& x) const;
};

/// Whose config.json a model has; see `llama_options`.
enum class LlamaFamily { llama, mistral, qwen2, qwen3, gemma2, gemma3, phi3 };
/// Which projections of attention have a bias: none, those of queries, keys and values, or that of the result
/// too.
enum class AttentionBias { none, inputs, all };
/// Whether attention and feed-forward layer have a norm before them, or one behind them too.
enum class NormPlaces { before, before_and_behind };
/// What embeddings are multiplied by: nothing, or the root of their width, rounded to their dtype.
enum class EmbeddingScale { one, root_of_width };
/// Which keys queries see: all up to their own, or the last `sliding_window` of these.
enum class Reach { all, window };

/// Sizes and parts of a Llama, named as in Hugging Face's config.json. ValueError for sizes below 1, heads
/// that do not divide into groups, a head that turns an odd number of features, and parts that do not go
/// together.
struct SHERD_API LlamaOptions {
  std::int64_t vocab_size = 256, hidden_size = 128, intermediate_size = 352, num_hidden_layers = 4;
  std::int64_t num_attention_heads = 4;
  std::optional<std::int64_t> num_key_value_heads{};  ///< as many as the others if not given
  std::optional<std::int64_t> head_dim{};             ///< hidden_size / num_attention_heads if not given
  std::int64_t max_position_embeddings = 2048;
  double rms_norm_eps = 1e-6, rope_theta = 10000;
  RotaryScaling rope_scaling{};  ///< `dynamic` scales beyond max_position_embeddings, whatever its `original`
  bool tie_word_embeddings = false;
  AttentionBias attention_bias = AttentionBias::none;
  bool mlp_bias = false;
  TensorOptions tensor{};                  ///< of all parameters
  Products products = Products::as_given;  ///< of the blocks' linear layers, not of the head

  LlamaFamily family = LlamaFamily::llama;  ///< what `save_pretrained` calls the model; of no other effect
  Gate hidden_act = Gate::silu;
  NormPlaces norms = NormPlaces::before;
  Gain gain = Gain::weight;      ///< of all norms
  bool query_key_norms = false;  ///< of each head, before its features are turned
  Projections projections = Projections::apart;
  EmbeddingScale embedding_scale = EmbeddingScale::one;
  std::optional<double> query_pre_attn_scalar{};    ///< scores are divided by its root; head_dim if not given
  std::optional<double> attn_logit_softcapping{};   ///< c tanh(s / c) for scores s, which are then stored
  std::optional<double> final_logit_softcapping{};  ///< the same of logits
  std::optional<std::int64_t> sliding_window{};
  std::int64_t sliding_window_pattern = 0;  ///< the last of every so many layers has none; 0: all have one
  std::vector<Reach> layer_types{};         ///< by layer, in place of the pattern
  std::optional<double> rope_local_base_freq{};  ///< rope_theta of layers with a window, which scale nothing
  double partial_rotary_factor = 1;  ///< the share of a head's features, the first ones, that turn

  std::int64_t key_value_heads() const { return num_key_value_heads.value_or(num_attention_heads); }
  std::int64_t head_width() const { return head_dim.value_or(hidden_size / num_attention_heads); }
  /// Features of a head that turn.
  std::int64_t rotary_width() const;
  /// How many keys the queries of a layer see, if not all.
  std::optional<std::int64_t> window_of(std::int64_t layer) const;
  /// How positions turn queries and keys of a layer.
  RotaryOptions rotary_of(std::int64_t layer) const;
  /// Positions that the model takes: max_position_embeddings, with `linear` and `dynamic` scaling `factor`
  /// times as many, with yarn at least `factor` times the scaling's `original`.
  std::int64_t context() const;
};

/// The parts of a family's models, with the sizes that its config.json means where it names none.
SHERD_API LlamaOptions llama_options(LlamaFamily family);

/// Causal attention whose queries and keys are turned by their positions, and whose heads share keys and
/// values in groups (Ainslie et al., 2023). With a window it keeps the keys of that alone in a cache; with a
/// soft cap it stores all scores.
struct SHERD_API LlamaAttention final : Layer<LlamaAttention> {
  std::optional<Linear> q_proj, k_proj, v_proj;
  std::optional<Linear> qkv_proj;  ///< in place of the three
  Linear o_proj;
  std::optional<RmsNorm> q_norm, k_norm;
  std::int64_t heads, shared_heads, head_width, rotary_width;
  RotaryOptions rotary;
  double scale;  ///< of scores
  std::optional<double> soft_cap;
  std::optional<std::int64_t> window;

  explicit LlamaAttention(const LlamaOptions& options, std::int64_t layer = 0);
  /// x (B, T, hidden_size) to the same shape. With a cache x holds the newest positions only.
  Tensor forward(const Tensor& x, KeyValues* cache = nullptr) const;
  /// The same plus `residual`.
  Tensor forward(const Tensor& x, const Tensor& residual, KeyValues* cache = nullptr) const;
  /// Both of documents that x holds.
  Tensor forward(const Tensor& x, const Documents& documents) const;
  Tensor forward(const Tensor& x, const Tensor& residual, const Documents& documents) const;
  void visit(auto&& on) {
    if (q_proj) on("q_proj", *q_proj);
    if (k_proj) on("k_proj", *k_proj);
    if (v_proj) on("v_proj", *v_proj);
    if (qkv_proj) on("qkv_proj", *qkv_proj);
    on("o_proj", o_proj);
    if (q_norm) on("q_norm", *q_norm);
    if (k_norm) on("k_norm", *k_norm);
  }

 private:
  struct Heads {
    Tensor q, k, v;
  };
  Heads projected(const Tensor& x) const;
  Tensor attended(Heads given, KeyValues* cache) const;
  Tensor mixed(const Tensor& x, KeyValues* cache) const;
  Tensor mixed(const Tensor& x, const Documents& documents) const;
  Tensor turned(const Tensor& x, const RotaryTurns& turns) const;
};

/// h = x + self_attn(input_layernorm(x)), then h + mlp(post_attention_layernorm(h)). With norms behind:
/// h = x + post_attention_layernorm(self_attn(input_layernorm(x))), then
/// h + post_feedforward_layernorm(mlp(pre_feedforward_layernorm(h))).
struct SHERD_API LlamaBlock final : Layer<LlamaBlock> {
  LlamaAttention self_attn;
  GatedMlp mlp;
  RmsNorm input_layernorm, post_attention_layernorm;
  std::optional<RmsNorm> pre_feedforward_layernorm, post_feedforward_layernorm;

  explicit LlamaBlock(const LlamaOptions& options, std::int64_t layer = 0);
  Tensor forward(const Tensor& x, KeyValues* cache = nullptr) const;
  /// The same of documents that x holds.
  Tensor forward(const Tensor& x, const Documents& documents) const;
  void visit(auto&& on) {
    on("self_attn", self_attn);
    on("mlp", mlp);
    on("input_layernorm", input_layernorm);
    on("post_attention_layernorm", post_attention_layernorm);
    if (pre_feedforward_layernorm) on("pre_feedforward_layernorm", *pre_feedforward_layernorm);
    if (post_feedforward_layernorm) on("post_feedforward_layernorm", *post_feedforward_layernorm);
  }

 private:
  /// With a cache or documents, as attention takes them.
  template <class Context>
  Tensor with_branches(const Tensor& x, Context& context) const;
};

/// What is below the head: tokens (B, T) -> (B, T, hidden_size).
struct SHERD_API LlamaTrunk final : Layer<LlamaTrunk> {
  Embedding embed_tokens;
  ModuleList<LlamaBlock> layers;
  RmsNorm norm;
  EmbeddingScale embedding_scale;

  explicit LlamaTrunk(const LlamaOptions& options);
  Tensor forward(const Tensor& tokens, KeyValueCache* cache = nullptr) const;
  /// The same of documents that the tokens hold.
  Tensor forward(const Tensor& tokens, const Documents& documents) const;
  void visit(auto&& on) {
    on("embed_tokens", embed_tokens);
    on("layers", layers);
    on("norm", norm);
  }

 private:
  Tensor embedded(const Tensor& tokens) const;
};

/// tokens (B, T) i64 -> logits (B, T, vocab_size). ShapeError unless tokens have two axes and, with the
/// cached positions, T is at most `options.context()`. Matrices start normal with deviation 0.02.
struct SHERD_API Llama final : Layer<Llama> {
  LlamaOptions options;
  LlamaTrunk model;
  Linear lm_head;

  explicit Llama(const LlamaOptions& options);
  Tensor forward(const Tensor& tokens) const;
  /// The loss of the logits against classes (B, T), which the head takes without holding all logits, but
  /// where a soft cap is on them: `model(tokens, nn::ClassTargets{next})`.
  Tensor forward(const Tensor& tokens, const ClassTargets& targets) const;
  /// Logits of the newest tokens (B, T), or of the last alone, (B, 1, vocab_size). They follow the positions
  /// that are in the cache, of each row its own.
  Tensor forward(const Tensor& tokens, KeyValueCache& cache, Logits of = Logits::all) const;
  /// Logits of documents that lie one behind another in the tokens, any number in all; ShapeError for one of
  /// more than `options.context()`, and where they do not fill the tokens.
  Tensor forward(const Tensor& tokens, const Documents& documents) const;
  /// Their loss, as above.
  Tensor forward(const Tensor& tokens, const Documents& documents, const ClassTargets& targets) const;
  void visit(auto&& on) {
    on("model", model);
    on("lm_head", lm_head);
  }

 private:
  void check_tokens(const Tensor& tokens, std::int64_t before) const;
  /// What the head takes.
  Tensor features(const Tensor& tokens, const Documents& documents) const;
  Tensor logits(const Tensor& x) const;
  Tensor loss(const Tensor& x, const ClassTargets& targets) const;
};

// Compiled once, in the library.
extern template class Layer<GatedMlp>;
extern template class Layer<LlamaAttention>;
extern template class Layer<LlamaBlock>;
extern template class Layer<LlamaTrunk>;
extern template class Layer<Llama>;

}  // namespace sherd::nn
