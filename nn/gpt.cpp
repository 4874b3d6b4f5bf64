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

AttentionOptions GptBlock::rule() const { return {.causal = true, .dropout = training() ? dropout : 0}; }

Tensor GptBlock::attend(const Tensor& x, const Documents& documents) const {
  const Tensor packed = qkv(x);
  const Tensor y =
      by_document(documents, {reshape(packed, {1, x.size(0) * x.size(1), packed.size(2)})},
                  [&](const std::vector<Tensor>& parts) { return self_attention(parts[0], heads, rule()); });
  return reshape(y, x.shape());
}

Tensor GptBlock::attend(const Tensor& x, KeyValues* cache) const {
  AttentionOptions options = rule();
  if (cache == nullptr) return self_attention(qkv(x), heads, options);
  const std::int64_t b = x.size(0), t = x.size(1), d = x.size(2) / heads;
  const Tensor packed = reshape(qkv(x), {b, t, 3, heads, d});
  const auto part = [&](int i) { return transpose(select(packed, 2, i), 1, 2); };
  cache->append(part(1), part(2));
  options.mask = cache->mask(t);
  return reshape(transpose(attention(part(0), cache->keys(), cache->values(), options), 1, 2), x.shape());
}

Tensor GptBlock::add_branch(const Tensor& x, const Linear& branch, const Tensor& y) const {
  return training() && dropout > 0 ? add(x, sherd::dropout(branch(y), dropout)) : branch(y, x);
}

Tensor GptBlock::forward(const Tensor& x, KeyValues* cache) const {
  return with_branches(x, attend(ln1(x), cache));
}

Tensor GptBlock::forward(const Tensor& x, const Documents& documents) const {
  return with_branches(x, attend(ln1(x), documents));
}

Tensor GptBlock::with_branches(const Tensor& x, const Tensor& attended) const {
  const Tensor h = add_branch(x, out, attended);
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

Tensor Gpt::embed(const Tensor& tokens, const KeyValueCache* cache) const {
  check<ShapeError>(tokens.rank() == 2, "Gpt: tokens (B, T), got shape {}", tokens.shape());
  const KeyValues* first = cache != nullptr && !cache->rows().empty() ? &(*cache)[0] : nullptr;
  const std::int64_t start = first == nullptr ? 0 : first->seen(), t = tokens.size(1);
  check<ShapeError>(start + t <= options.context, "Gpt: position {} is beyond the context of {}",
                    start + t - 1, options.context);
  const Tensor numbers = first == nullptr ? Tensor{} : first->positions(t, tokens.device());
  return dropped(add(tok(tokens), numbers.defined() ? pos(numbers) : narrow(pos.weight, 0, start, t)));
}

Tensor Gpt::dropped(const Tensor& embedded) const {
  const double p = options.embedding_dropout;
  return training() && p > 0 ? dropout(embedded, p) : embedded;
}

Tensor Gpt::features(const Tensor& tokens) const {
  Tensor x = embed(tokens, nullptr);
  for (const GptBlock& block : blocks) x = block(x);
  return ln(x);
}

Tensor Gpt::forward(const Tensor& tokens) const { return head(features(tokens)); }

Tensor Gpt::forward(const Tensor& tokens, const ClassTargets& targets) const {
  return head(features(tokens), targets);
}

Tensor Gpt::forward(const Tensor& tokens, KeyValueCache& cache, Logits of) const {
  cache.resize(blocks.size());
  Tensor x = embed(tokens, &cache);
  for (std::size_t i = 0; i < blocks.size(); ++i) x = blocks[i](x, &cache[i]);
  return head(ln(of == Logits::last ? narrow(x, 1, x.size(1) - 1, 1) : x));
}

Tensor Gpt::features(const Tensor& tokens, const Documents& documents) const {
  check<ShapeError>(tokens.rank() == 2, "Gpt: tokens (B, T), got shape {}", tokens.shape());
  check_documents("Gpt", documents, tokens.numel(), options.context);
  Tensor x = dropped(add(tok(tokens), pos(positions_of(documents, tokens.shape(), tokens.device()))));
  for (const GptBlock& block : blocks) x = block(x, documents);
  return ln(x);
}

Tensor Gpt::forward(const Tensor& tokens, const Documents& documents) const {
  return head(features(tokens, documents));
}

Tensor Gpt::forward(const Tensor& tokens, const Documents& documents, const ClassTargets& targets) const {
  return head(features(tokens, documents), targets);
}

template class Layer<GptBlock>;
template class Layer<Gpt>;

}  // namespace sherd::nn
