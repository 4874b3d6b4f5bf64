// A decoder-only Transformer in the manner of GPT-2 (Radford et al., 2019): pre-norm blocks, learned
// positions, tied embedding.
#pragma once

#include "nn/documents.h"
#include "nn/key_values.h"
#include "nn/layers.h"

namespace sherd::nn {

/// Sizes of a Gpt. ValueError when one of layers, heads, context and vocab is below 1, or heads do not divide
/// width.
struct GptOptions {
  std::int64_t layers = 4, heads = 4, width = 128, context = 128, vocab = 256;
  double dropout = 0;                      ///< of attention, and of what a block adds
  TensorOptions tensor{};                  ///< of all parameters; on `meta` they have names and shapes only
  Products products = Products::as_given;  ///< of the blocks' linear layers, not of the head
  double embedding_dropout = 0;            ///< of the sum of both embeddings
  double norm_eps = 1e-5;                  ///< of the layer normalisations
  GeluForm gelu = GeluForm::erf;           ///< GPT-2's own is `tanh`, which has no kernel with the layer
  bool tie_word_embeddings = true;         ///< whether the head shares the weight of `tok`
};

/// Of which positions a model gives logits.
enum class Logits { all, last };

/// h = x + out(attention(qkv(ln1(x)))), then h + down(gelu(up(ln2(h)))). qkv maps width to 3 width, up width
/// to 4 width.
struct SHERD_API GptBlock final : Layer<GptBlock> {
  LayerNorm ln1, ln2;
  Linear qkv, out, up, down;
  std::int64_t heads;
  double dropout;
  GeluForm gelu;

  explicit GptBlock(const GptOptions& options);
  /// x (B, T, width) to the same shape. With a cache x holds the newest positions only, and their keys and
  /// values are appended to it.
  Tensor forward(const Tensor& x, KeyValues* cache = nullptr) const;
  /// The same of documents that x holds.
  Tensor forward(const Tensor& x, const Documents& documents) const;
  void visit(auto&& on) {
    on("ln1", ln1);
    on("ln2", ln2);
    on("qkv", qkv);
    on("out", out);
    on("up", up);
    on("down", down);
  }

 private:
  AttentionOptions rule() const;
  Tensor attend(const Tensor& x, KeyValues* cache) const;
  Tensor attend(const Tensor& x, const Documents& documents) const;
  /// x with both branches, of which the first is given what attention makes of ln1(x).
  Tensor with_branches(const Tensor& x, const Tensor& attended) const;
  /// x plus what `branch` makes of `y`, with dropout.
  Tensor add_branch(const Tensor& x, const Linear& branch, const Tensor& y) const;
};

/// tokens (B, T) i64 -> logits (B, T, vocab). ShapeError unless tokens have two axes and, with the cached
/// positions, T is at most `context`. Parameters start as GPT-2's.
struct SHERD_API Gpt final : Layer<Gpt> {
  GptOptions options;
  Embedding tok, pos;
  ModuleList<GptBlock> blocks;
  LayerNorm ln;
  Linear head;

  explicit Gpt(GptOptions options);
  Tensor forward(const Tensor& tokens) const;
  /// The loss of the logits against classes (B, T), which the head takes without holding all logits:
  /// `model(tokens, nn::ClassTargets{next})`.
  Tensor forward(const Tensor& tokens, const ClassTargets& targets) const;
  /// Logits of the newest tokens (B, T), or of the last alone, (B, 1, vocab). They follow the positions that
  /// are in the cache, of each row its own.
  Tensor forward(const Tensor& tokens, KeyValueCache& cache, Logits of = Logits::all) const;
  /// Logits of documents that lie one behind another in the tokens, any number in all; ShapeError for one of
  /// more than `context`, and where they do not fill the tokens.
  Tensor forward(const Tensor& tokens, const Documents& documents) const;
  /// Their loss, as above.
  Tensor forward(const Tensor& tokens, const Documents& documents, const ClassTargets& targets) const;
  void visit(auto&& on) {
    on("tok", tok);
    on("pos", pos);
    on("blocks", blocks);
    on("ln", ln);
    on("head", head);
  }

 private:
  Tensor embed(const Tensor& tokens, const KeyValueCache* cache) const;
  Tensor dropped(const Tensor& embedded) const;
  /// What the head takes.
  Tensor features(const Tensor& tokens) const;
  Tensor features(const Tensor& tokens, const Documents& documents) const;
};

// Compiled once, in the library.
extern template class Layer<GptBlock>;
extern template class Layer<Gpt>;

}  // namespace sherd::nn
