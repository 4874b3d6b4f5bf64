#include "nn/multihead_attention.h"

#include <limits>

#include "nn/init.h"
#include "runtime/given.h"

namespace sherd::nn {

MultiheadAttention::MultiheadAttention(std::int64_t width, std::int64_t heads,
                                       MultiheadAttentionOptions options)
    : out_proj(width, width, {Bias::yes, options.tensor}),
      heads(heads),
      dropout(options.dropout),
      batch_first(options.batch_first) {
  check<ValueError>(heads > 0 && width % heads == 0,
                    "MultiheadAttention: width {} does not divide into {} heads", width, heads);
  check<ValueError>(dropout >= 0 && dropout < 1, "MultiheadAttention: dropout {} is outside [0, 1)", dropout);
  in_proj_weight = Parameter(empty({3 * width, width}, options.tensor));
  in_proj_bias = Parameter(zeros({3 * width}, options.tensor));
  init::xavier_uniform_(in_proj_weight.object());
  init::constant_(out_proj.bias.object(), 0);
}

/// `count` of the three projections of x, from number `first` on, side by side in the last axis.
Tensor MultiheadAttention::project(const Tensor& x, std::int64_t first, std::int64_t count) const {
  const std::int64_t width = x.size(-1);
  if (count == 3) return linear(x, in_proj_weight, in_proj_bias);
  return linear(x, narrow(in_proj_weight, 0, first * width, count * width),
                narrow(in_proj_bias, 0, first * width, count * width));
}

namespace {

void check_mask_dtype(std::string_view mask, const Tensor& t, DType dtype) {
  check<DTypeError>(t.dtype() == DType::boolean || t.dtype() == dtype,
                    "MultiheadAttention: {} is bool or added in the query's dtype, got {} for {}", mask,
                    name_of(t.dtype()), name_of(dtype));
}

/// A mask as what is added to scores.
Tensor added(const Tensor& mask, DType dtype) {
  if (mask.dtype() != DType::boolean) return mask;
  return where(mask, -std::numeric_limits<double>::infinity(), zeros(mask.shape(), {dtype, mask.device()}));
}

}  // namespace

/// Both masks as the one that `attention` takes, for scores (B, heads, Tq, Tk).
AttentionOptions MultiheadAttention::rule(const AttentionMasks& masks, const Shape& scores,
                                          DType dtype) const {
  AttentionOptions options{.causal = masks.causal == Causal::yes, .dropout = training() ? dropout : 0};
  Tensor pair = masks.attn_mask, padding = masks.key_padding_mask;
  if (pair.defined()) {
    check_mask_dtype("attn_mask", pair, dtype);
    if (pair.rank() == 3 && pair.shape() == Shape{scores[0] * heads, scores[2], scores[3]})
      pair = reshape(pair, scores);
    check<ShapeError>((pair.rank() != 3 || pair.size(0) == 1) &&
                          broadcast_shapes("MultiheadAttention", pair.shape(), scores) == scores,
                      "MultiheadAttention: attn_mask of shape {} for scores {}; three axes are (B heads, Tq, "
                      "Tk) or (1, Tq, Tk)",
                      pair.shape(), scores);
  }
  if (padding.defined()) {
    check_mask_dtype("key_padding_mask", padding, dtype);
    check<ShapeError>(padding.shape() == Shape{scores[0], scores[3]},
                      "MultiheadAttention: key_padding_mask of shape {} for {} sequences of {} keys",
                      padding.shape(), scores[0], scores[3]);
    padding = reshape(padding, {scores[0], 1, 1, scores[3]});
  }
  if (!pair.defined() || !padding.defined())
    options.mask = pair.defined() ? pair : padding;
  else if (pair.dtype() == DType::boolean && padding.dtype() == DType::boolean)
    options.mask = logical_or(pair, padding);
  else
    options.mask = add(added(pair, dtype), added(padding, dtype));
  if (options.mask.defined() && options.mask.dtype() == DType::boolean)
    options.mask = logical_not(options.mask);
  return options;
}

Tensor MultiheadAttention::forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                   const AttentionMasks& masks) const {
  sherd::detail::check_given("MultiheadAttention", query, key, value);
  const std::int64_t width = out_proj.weight.shape()[0];
  const Tensor* in[] = {&query, &key, &value};
  for (const Tensor* x : in)
    check<ShapeError>(x->rank() == 3 && x->size(2) == width,
                      "MultiheadAttention: takes three axes, the last of {}, got shape {}", width,
                      x->shape());
  const Shape heads_first = batch_first ? Shape{0, 2, 1, 3} : Shape{1, 2, 0, 3};
  const Shape heads_last = batch_first ? Shape{0, 2, 1, 3} : Shape{2, 0, 1, 3};
  Tensor parts[3];
  for (std::int64_t i = 0, same = 1; i < 3; i += same) {  // one product for inputs that are the same
    for (same = 1; i + same < 3 && in[i + same]->is(*in[i]);) ++same;
    const Tensor& x = *in[i];
    const Tensor packed = reshape(project(x, i, same), {x.size(0), x.size(1), same, heads, width / heads});
    for (std::int64_t j = 0; j < same; ++j) parts[i + j] = permute(select(packed, 2, j), heads_first);
  }
  const Shape scores{parts[0].size(0), heads, parts[0].size(2), parts[1].size(2)};
  const Tensor mixed = attention(parts[0], parts[1], parts[2], rule(masks, scores, query.dtype()));
  return out_proj(reshape(permute(mixed, heads_last), query.shape()));
}

template class Layer<MultiheadAttention>;

}  // namespace sherd::nn
