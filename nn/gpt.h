// A decoder-only Transformer in the manner of GPT-2 (Radford et al., 2019): pre-norm blocks, learned
// positions, tied embedding.
#pragma once

#include "nn/layers.h"

namespace sherd::nn {

struct GptOptions {
  std::int64_t layers = 4, heads = 4, width = 128, context = 128, vocab = 256;
  double dropout = 0;
  TensorOptions tensor{};  ///< of all parameters; on `meta` they have names and shapes only
};

/// Keys and values of one layer for positions seen so far, (B, H, T, D) each.
struct KeyValues {
  Tensor keys, values;
};
/// One entry a layer; empty at first.
using KeyValueCache = std::vector<KeyValues>;

/// x + attention(ln1(x)), then x + mlp(ln2(x)). Names as in PyTorch: qkv, out, up, down.
struct SHERD_API GptBlock final : Layer<GptBlock> {
  LayerNorm ln1, ln2;
  Linear qkv, out, up, down;
  std::int64_t heads;
  double dropout;

  explicit GptBlock(const GptOptions& options);
  /// x (B, T, width). With a cache, x holds the newest positions only, and the cache grows by them.
  Tensor forward(const Tensor& x, KeyValues* cache = nullptr) const;
  void visit(auto&& on) {
    on("ln1", ln1);
    on("ln2", ln2);
    on("qkv", qkv);
    on("out", out);
    on("up", up);
    on("down", down);
  }

 private:
  Tensor attend(const Tensor& x, KeyValues* cache) const;
  Tensor drop(const Tensor& x) const { return training() && dropout > 0 ? sherd::dropout(x, dropout) : x; }
};

/// tokens (B, T) i64 -> logits (B, T, vocab); T at most `context`.
struct SHERD_API Gpt final : Layer<Gpt> {
  GptOptions options;
  Embedding tok, pos;
  ModuleList<GptBlock> blocks;
  LayerNorm ln;
  Linear head;

  explicit Gpt(GptOptions options);
  Tensor forward(const Tensor& tokens) const;
  /// Logits of the newest tokens (B, T), which follow the positions already in the cache.
  Tensor forward(const Tensor& tokens, KeyValueCache& cache) const;
  void visit(auto&& on) {
    on("tok", tok);
    on("pos", pos);
    on("blocks", blocks);
    on("ln", ln);
    on("head", head);
  }

 private:
  Tensor embed(const Tensor& tokens, std::int64_t start) const;
};

}  // namespace sherd::nn
