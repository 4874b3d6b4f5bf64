#include "nn/gpt.h"

#include <cmath>

#include "nn/init.h"
#include "nn/most_layers.h"

namespace sherd::nn {

GptBlock::GptBlock(const GptOptions& o)
    : ln1(o.width, o.norm_eps, o.tensor),
      ln2(o.width, o.norm_eps, o.tensor),
      qkv(o.width, 3 * o.width, {.tensor = o.tensor, .products = o.products}),
      out(o.width, o.width, {.tensor = o.tensor, .products = o.products}),
      up(o.width, 4 * o.width, {.tensor = o.tensor, .products = o.products}),
      down(4 * o.width, o.width, {.tensor = o.tensor, .products = o.products}),
      heads(o.heads),
      dropout(o.dropout),
      gelu(o.gelu) {}

Tensor GptBlock::attend(const Tensor& x, KeyValues* cache) const {
  const AttentionOptions options{.causal = true, .dropout = training() ? dropout : 0};
  if (cache == nullptr) return self_attention(qkv(x), heads, options);
  const std::int64_t b = x.size(0), t = x.size(1), d = x.size(2) / heads;
  const Tensor packed = reshape(qkv(x), {b, t, 3, heads, d});
  const auto part = [&](int i) { return transpose(select(packed, 2, i), 1, 2); };
  const Tensor parts[2][2] = {{cache->keys, part(1)}, {cache->values, part(2)}};
  cache->keys = cache->keys.defined() ? cat(parts[0], 2) : contiguous(parts[0][1]);
  cache->values = cache->values.defined() ? cat(parts[1], 2) : contiguous(parts[1][1]);
  return reshape(transpose(attention(part(0), cache->keys, cache->values, options), 1, 2), x.shape());
}

Tensor GptBlock::add_branch(const Tensor& x, const Linear& branch, const Tensor& y) const {
  return training() && dropout > 0 ? add(x, sherd::dropout(branch(y), dropout)) : branch(y, x);
}

Tensor GptBlock::forward(const Tensor& x, KeyValues* cache) const {
  const Tensor h = add_branch(x, out, attend(ln1(x), cache));
  if (gelu == GeluForm::erf) return add_branch(h, down, up(ln2(h), Activation::gelu));
  return add_branch(h, down, sherd::gelu(up(ln2(h)), gelu));
}

Gpt::Gpt(GptOptions o)
    : options(o),
      tok(o.vocab, o.width, o.tensor),
      pos(o.context, o.width, o.tensor),
      ln(o.width, o.norm_eps, o.tensor),
      head(o.width, o.vocab, {Bias::no, o.tensor}) {
  check<ValueError>(o.heads > 0 && o.width % o.heads == 0, "Gpt: width {} does not divide into {} heads",
                    o.width, o.heads);
  check<ValueError>(o.layers > 0 && o.context > 0 && o.vocab > 0, "Gpt: {} layers, context {}, vocabulary {}",
                    o.layers, o.context, o.vocab);
  check<ValueError>(o.layers <= most_layers, "Gpt: {} layers, at most {} are supported; give fewer", o.layers,
                    most_layers);
  for (std::int64_t i = 0; i < o.layers; ++i) blocks.emplace_back(o);
  if (o.tie_word_embeddings) tie(tok.weight, head.weight);
  // As GPT-2: normal 0.02, the projections back into the residual stream scaled by 1/sqrt(2 layers).
  const double residual = 0.02 / std::sqrt(2.0 * static_cast<double>(o.layers));
  for (NamedParameter& p : named_parameters()) {
    const bool into_residual = p.name.ends_with("out.weight") || p.name.ends_with("down.weight");
    if (p.parameter.shape().rank() == 2)
      init::normal_(p.parameter, 0, into_residual ? residual : 0.02);
    else if (p.name.ends_with("bias"))
      init::constant_(p.parameter, 0);
  }
}

Tensor Gpt::embed(const Tensor& tokens, std::int64_t start) const {
  check<ShapeError>(tokens.rank() == 2, "Gpt: tokens (B, T), got shape {}", tokens.shape());
  check<ShapeError>(start + tokens.size(1) <= options.context, "Gpt: position {} is beyond the context of {}",
                    start + tokens.size(1) - 1, options.context);
  const Tensor x = add(tok(tokens), narrow(pos.weight, 0, start, tokens.size(1)));
  return training() && options.embedding_dropout > 0 ? dropout(x, options.embedding_dropout) : x;
}

Tensor Gpt::features(const Tensor& tokens) const {
  Tensor x = embed(tokens, 0);
  for (const GptBlock& block : blocks) x = block(x);
  return ln(x);
}

Tensor Gpt::forward(const Tensor& tokens) const { return head(features(tokens)); }

Tensor Gpt::forward(const Tensor& tokens, const ClassTargets& targets) const {
  return head(features(tokens), targets);
}

Tensor Gpt::forward(const Tensor& tokens, KeyValueCache& cache) const {
  cache.resize(blocks.size());
  Tensor x = embed(tokens, cache[0].seen());
  for (std::size_t i = 0; i < blocks.size(); ++i) x = blocks[i](x, &cache[i]);
  return head(ln(x));
}

template class Layer<GptBlock>;
template class Layer<Gpt>;

}  // namespace sherd::nn
