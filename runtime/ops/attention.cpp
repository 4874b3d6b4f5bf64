#include "runtime/ops/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <vector>

#include "runtime/apply.h"
#include "runtime/context.h"
#include "runtime/given.h"
#include "runtime/math.h"
#include "runtime/ops.h"
#include "runtime/ops/dropout.h"
#include "runtime/ops/random.h"

namespace sherd {
namespace ops {
namespace {

/// The logsumexp that the kernels keep is f32, which is too little for an f64 gradient.
bool exact(const Tensor& x) { return x.dtype() == DType::f64; }

/// What each weight is multiplied by: 0 or 1 / (1 - p); nothing without dropout.
Tensor dropout_factors(const AttentionRule& rule, const Spec& weights) {
  if (rule.dropout == 0) return {};
  // Row r starts at a counter of its own: ceil(keys / 4) counters a row, as the kernels draw them.
  Shape padded = weights.shape;
  padded[3] = (padded[3] + 3) / 4 * 4;
  const Tensor uniform = apply(Uniform{{padded, DType::f32, weights.device}, rule.key, 0, 1});
  const Tensor keep = greater_equal(narrow(uniform, 3, 0, weights.shape[3]), rule.dropout);
  return mul(to(keep, weights.dtype), 1 / (1 - rule.dropout));
}

/// q k^T scale with what a causal query must not see at -inf, in the dtype that kernels compute in.
Tensor scores_of(const AttentionRule& rule, const Tensor& q, const Tensor& k) {
  Tensor scores = mul(matmul(q, transpose(k, -2, -1)), rule.scale);
  if (!rule.causal) return scores;
  const std::int64_t tq = q.shape()[2], tk = k.shape()[2];
  const TensorOptions index{DType::i64, q.device()};
  const Tensor rows = unsqueeze(arange(tk - tq, tk, 1, index), 1),
               columns = unsqueeze(arange(0, tk, 1, index), 0);
  return masked_fill(scores, greater(columns, rows), -std::numeric_limits<double>::infinity());
}

/// The weights; a row that may see nothing has none. Where that can be, its scores are replaced before the
/// softmax, so that no gradient of it is 0 times infinity.
Tensor weights_of(const AttentionRule& rule, const Tensor& scores, std::int64_t tq, std::int64_t tk) {
  if (!rule.causal || tq <= tk) return softmax(scores);
  const Tensor row = arange(tk - tq, tk, 1, {DType::i64, scores.device()});
  const Tensor blind = unsqueeze(less(row, 0), 1);
  return masked_fill(softmax(masked_fill(scores, blind, 0)), blind, 0);
}

Tensor maybe_mul(const Tensor& x, const Tensor& factors) { return factors.defined() ? mul(x, factors) : x; }

/// The parts of a packed projection (B, T, 3 H D) as (B, H, T, D).
Tensors split_projection(const Tensor& qkv, std::int64_t heads) {
  const Shape& s = qkv.shape();
  const Tensor packed = reshape(qkv, {s[0], s[1], 3, heads, s[2] / (3 * heads)});
  Tensors parts;
  for (int i = 0; i < 3; ++i) parts.push_back(transpose(select(packed, 2, i), 1, 2));
  return parts;
}

/// k or v with each head as often as q's heads share it.
Tensor with_heads(const Tensor& x, std::int64_t heads) {
  const Shape& s = x.shape();
  if (s[1] == heads) return x;
  const std::int64_t times = heads / s[1];
  return reshape(expand(unsqueeze(x, 2), {s[0], s[1], times, s[2], s[3]}), {s[0], heads, s[2], s[3]});
}
/// Its gradient, in `shared` heads.
Tensor sum_heads(const Tensor& g, std::int64_t shared) {
  const Shape& s = g.shape();
  if (s[1] == shared) return g;
  return sum(reshape(g, {s[0], shared, s[1] / shared, s[2], s[3]}), {2});
}

/// Which keys the queries see, of a shape that broadcasts to the scores; nothing where they see all.
Tensor seen_keys(const AttentionRule& rule, const Tensor& mask, std::int64_t tq, std::int64_t tk,
                 Device device) {
  Tensor seen;
  if (mask.defined())
    seen = mask.dtype() == DType::boolean ? mask : not_equal(mask, -std::numeric_limits<double>::infinity());
  if (!rule.causal) return seen;
  const Tensor past = tril(ones({tq, tk}, {DType::boolean, device}), tk - tq);
  return seen.defined() ? logical_and(seen, past) : past;
}

/// q k^T scale, plus a mask that is added; q and k in the dtype that is computed in, as many heads of each.
Tensor biased_scores(const AttentionRule& rule, const Tensor& q, const Tensor& k, const Tensor& mask) {
  const Tensor scores = matmul(mul(q, rule.scale), transpose(k, 2, 3));
  return mask.defined() && is_floating(mask.dtype()) ? add(scores, to(mask, q.dtype())) : scores;
}

/// Weights with dropout, as the kernels draw it.
Tensor drop(const AttentionRule& rule, const Tensor& weights) {
  if (rule.dropout == 0) return weights;
  if (weights.shape()[3] % 4 == 0) return apply(Dropout{rule.dropout, rule.key}, weights);
  return mul(weights, dropout_factors(rule, weights.spec()));
}

/// The weights of scores of which `seen` are seen. The scores of others, NaN too, are replaced before the
/// softmax, so that no gradient of a row that sees none is 0 times infinity.
Tensor seen_weights(const Tensor& scores, const Tensor& seen) {
  if (!seen.defined()) return softmax(scores);
  const Tensor shown = where(seen, scores, -std::numeric_limits<double>::infinity());
  return where(seen, softmax(shown), 0);  // rows that see nothing are NaN before
}

/// With scores that are stored, in f32 for 16-bit floats.
Tensor masked_formula(const AttentionRule& rule, Inputs in) {
  const DType wide = compute_dtype(in[0].dtype());
  const std::int64_t heads = in[0].shape()[1], tq = in[0].shape()[2], tk = in[1].shape()[2];
  const Tensor q = to(in[0], wide), k = to(with_heads(in[1], heads), wide),
               v = to(with_heads(in[2], heads), wide);
  const Tensor seen = seen_keys(rule, in[3], tq, tk, q.device());
  const Tensor weights = drop(rule, seen_weights(biased_scores(rule, q, k, in[3]), seen));
  return to(matmul(weights, v), in[0].dtype());
}

/// (B, H, T, D) as (B, T, H D), and back.
Tensor join_heads(const Tensor& x) {
  const Shape& s = x.shape();
  return reshape(transpose(x, 1, 2), {s[0], s[2], s[1] * s[3]});
}
Tensor split_heads(const Tensor& y, std::int64_t heads) {
  const Shape& s = y.shape();
  return transpose(reshape(y, {s[0], s[1], heads, s[2] / heads}), 1, 2);
}

}  // namespace

Specs Attention::infer(SpecSpan in) const {
  const Spec &q = in[0], &k = in[1], &v = in[2];
  check<DTypeError>(is_floating(q.dtype) && k.dtype == q.dtype && v.dtype == q.dtype,
                    "attention: q, k and v must share a floating dtype, got {}, {} and {}", name_of(q.dtype),
                    name_of(k.dtype), name_of(v.dtype));
  check<ShapeError>(q.shape.rank() == 4 && k.shape.rank() == 4 && v.shape == k.shape &&
                        q.shape[0] == k.shape[0] && q.shape[1] == k.shape[1] && q.shape[3] == k.shape[3],
                    "attention: q (B, H, Tq, D), k and v (B, H, Tk, D), got {}, {} and {}", q.shape, k.shape,
                    v.shape);
  return {q, {Shape{q.shape[0], q.shape[1], q.shape[2]}, DType::f32, q.device}};
}

Tensors Attention::grad(const GradArgs& args) const {
  if (args.create_graph || exact(args.inputs[0]))
    return detail::reference_gradient(args, [this](Inputs in) { return reference(in); });
  const Tensor in[] = {args.gy[0],     args.inputs[0],  args.inputs[1],
                       args.inputs[2], args.outputs[0], args.outputs[1]};
  return apply_many(AttentionGrad{rule}, in);
}

Tensors Attention::reference(Inputs in) const {
  const DType wide = compute_dtype(in[0].dtype());
  const Tensor q = to(in[0], wide), k = to(in[1], wide), v = to(in[2], wide);
  const Tensor scores = scores_of(rule, q, k);
  Tensor logsumexp = zeros({q.shape()[0], q.shape()[1], q.shape()[2]}, {DType::f32, q.device()});
  if (scores.numel() > 0) {
    const Tensor fixed = scores.detach(), top = amax(fixed, {-1}, Keep::dims);
    logsumexp = to(squeeze(add(log(sum(exp(sub(fixed, top)), {-1}, Keep::dims)), top), -1), DType::f32);
  }
  const Tensor weights =
      maybe_mul(weights_of(rule, scores, q.shape()[2], k.shape()[2]), dropout_factors(rule, scores.spec()));
  return {to(matmul(weights, v), in[0].dtype()), logsumexp};
}

Tensors AttentionGrad::reference(Inputs in) const {
  const DType wide = compute_dtype(in[1].dtype());
  const Tensor go = to(in[0], wide), q = to(in[1], wide), k = to(in[2], wide), v = to(in[3], wide);
  const Tensor weights = weights_of(rule, scores_of(rule, q, k), q.shape()[2], k.shape()[2]),
               factors = dropout_factors(rule, weights.spec());
  const Tensor g_weights = maybe_mul(matmul(go, transpose(v, -2, -1)), factors);
  const Tensor g_scores =
      mul(mul(weights, sub(g_weights, sum(mul(g_weights, weights), {-1}, Keep::dims))), rule.scale);
  const Tensor gq = matmul(g_scores, k), gk = matmul(transpose(g_scores, -2, -1), q);
  const Tensor gv = matmul(transpose(maybe_mul(weights, factors), -2, -1), go);
  return {to(gq, in[1].dtype()), to(gk, in[2].dtype()), to(gv, in[3].dtype())};
}

Specs MaskedAttention::infer(SpecSpan in) const {
  const Spec &q = in[0], &k = in[1], &v = in[2], &mask = in[3];
  check<DTypeError>(is_floating(q.dtype) && k.dtype == q.dtype && v.dtype == q.dtype,
                    "attention: q, k and v are of one floating dtype, got {}, {} and {}", name_of(q.dtype),
                    name_of(k.dtype), name_of(v.dtype));
  const Shape &sq = q.shape, &sk = k.shape;
  check<ShapeError>(sq.rank() == 4 && sk.rank() == 4 && sk == v.shape && sq[0] == sk[0] && sq[3] == sk[3] &&
                        (sk[1] == sq[1] || (sk[1] > 0 && sq[1] % sk[1] == 0)),
                    "attention: q {}, k {} and v {} do not fit", sq, sk, v.shape);
  const Shape rows{sq[0], sq[1], sq[2]};
  const bool adds = !mask.is_none() && is_floating(mask.dtype);
  if (!mask.is_none()) {
    check<DTypeError>(mask.dtype == DType::boolean || mask.dtype == q.dtype,
                      "attention: a mask is bool or added in q's dtype, got {} for {}", name_of(mask.dtype),
                      name_of(q.dtype));
    const Shape scores{sq[0], sq[1], sq[2], sk[2]};
    check<ShapeError>(broadcast_shapes("attention", mask.shape, scores) == scores,
                      "attention: a mask of shape {} for scores {}", mask.shape, scores);
  }
  return {q, {Shape{adds ? 2 : 1, sq[0], sq[1], sq[2]}, DType::f32, q.device}};
}

Tensors MaskedAttention::grad(const GradArgs& args) const {
  if (args.create_graph || exact(args.inputs[0]) || args.need(3))
    return detail::reference_gradient(args, [this](Inputs in) { return reference(in); });
  const Tensor in[] = {args.gy[0],     args.inputs[0],  args.inputs[1], args.inputs[2],
                       args.inputs[3], args.outputs[0], args.outputs[1]};
  Tensors g = apply_many(MaskedAttentionGrad{rule}, in);
  g.push_back({});
  return g;
}

// Its gradient reads no numbers of the rows.
Tensors MaskedAttention::reference(Inputs in) const {
  const bool adds = in[3].defined() && is_floating(in[3].dtype());
  const Shape& s = in[0].shape();
  return {masked_formula(rule, in), zeros({adds ? 2 : 1, s[0], s[1], s[2]}, {DType::f32, in[0].device()})};
}

Tensors MaskedAttentionGrad::reference(Inputs in) const {
  const DType wide = compute_dtype(in[1].dtype());
  const std::int64_t heads = in[1].shape()[1], shared = in[2].shape()[1];
  const Tensor go = to(in[0], wide), q = to(in[1], wide), k = to(with_heads(in[2], heads), wide),
               v = to(with_heads(in[3], heads), wide);
  const Tensor seen = seen_keys(rule, in[4], q.shape()[2], k.shape()[2], q.device());
  const Tensor weights = seen_weights(biased_scores(rule, q, k, in[4]), seen),
               factors = dropout_factors(rule, weights.spec());
  const Tensor g_weights = maybe_mul(matmul(go, transpose(v, -2, -1)), factors);
  const Tensor g_scores =
      mul(mul(weights, sub(g_weights, sum(mul(g_weights, weights), {-1}, Keep::dims))), rule.scale);
  const Tensor gq = matmul(g_scores, k), gk = matmul(transpose(g_scores, -2, -1), q);
  const Tensor gv = matmul(transpose(maybe_mul(weights, factors), -2, -1), go);
  return {to(gq, in[1].dtype()), to(sum_heads(gk, shared), in[2].dtype()),
          to(sum_heads(gv, shared), in[3].dtype())};
}

Specs SelfAttention::infer(SpecSpan in) const {
  const Spec& qkv = in[0];
  check<DTypeError>(is_floating(qkv.dtype), "self_attention: takes floating dtypes, got {}",
                    name_of(qkv.dtype));
  check<ShapeError>(qkv.shape.rank() == 3 && qkv.shape[2] % 3 == 0 && qkv.shape[2] / 3 % heads == 0,
                    "self_attention: a projection (B, T, 3 * heads * D) for {} heads, got {}", heads,
                    qkv.shape);
  const Shape& s = qkv.shape;
  return {{Shape{s[0], s[1], s[2] / 3}, qkv.dtype, qkv.device},
          {Shape{s[0], heads, s[1]}, DType::f32, qkv.device}};
}

Tensors SelfAttention::grad(const GradArgs& args) const {
  if (args.create_graph || exact(args.inputs[0]))
    return detail::reference_gradient(args, [this](Inputs in) { return reference(in); });
  const Tensor in[] = {args.gy[0], args.inputs[0], args.outputs[0], args.outputs[1]};
  return {apply_many(SelfAttentionGrad{heads, rule}, in)[0]};
}

Tensors SelfAttention::reference(Inputs in) const {
  const Tensors parts = split_projection(in[0], heads);
  const Tensors out = Attention{rule}.reference({parts.begin(), parts.size()});
  return {join_heads(out[0]), out[1]};
}

Tensors SelfAttentionGrad::reference(Inputs in) const {
  const Tensors parts = split_projection(in[1], heads);
  const Tensor all[] = {split_heads(in[0], heads), parts[0], parts[1], parts[2],
                        split_heads(in[2], heads), in[3]};
  const Tensors g = AttentionGrad{rule}.reference(all);
  const Tensor joined[] = {join_heads(g[0]), join_heads(g[1]), join_heads(g[2])};
  return {cat(joined, 2)};
}

}  // namespace ops

namespace {

ops::AttentionRule rule_of(const AttentionOptions& options, std::int64_t rows, std::int64_t keys,
                           std::int64_t width) {
  check<ValueError>(options.dropout >= 0 && options.dropout < 1, "attention: dropout {} is outside [0, 1)",
                    options.dropout);
  ops::AttentionRule rule{
      options.scale.value_or(1 / std::sqrt(static_cast<double>(width))), options.causal, options.dropout, {}};
  if (options.dropout > 0) rule.key = Context::current().generator().reserve(rows * ((keys + 3) / 4 * 4));
  return rule;
}

}  // namespace

namespace {

/// Whether kernels of the device take masks and shared heads.
bool has_masked_kernel(const Tensor& q) {
  return q.dtype() != DType::f64 && kernel_row<ops::MaskedAttention>().on(q.device().type) != nullptr;
}

/// By the op where the device has a kernel for it, else by the formula, whose gradients need no second
/// forward.
Tensor masked_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask,
                        const ops::AttentionRule& rule) {
  const Tensor in[] = {q, k, v, mask};
  const ops::MaskedAttention op{rule};
  if (has_masked_kernel(q)) return apply_many(op, in)[0];
  op.infer(Specs{q.spec(), k.spec(), v.spec(), mask.defined() ? mask.spec() : Spec::none()});
  return ops::masked_formula(rule, in);
}

/// One query of heads that share keys, as as many queries of these keys' heads: no key is copied.
Tensor attention_of_one(const Tensor& q, const Tensor& k, const Tensor& v, AttentionOptions options) {
  const Shape& s = q.shape();
  options.causal = false;  // the last query sees all keys
  options.scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(s[3])));
  const std::int64_t shared = k.shape()[1];
  return reshape(attention(reshape(q, {s[0], shared, s[1] / shared, s[3]}), k, v, std::move(options)), s);
}

/// Whether a mask, if there is one, is the same for all heads.
bool same_for_heads(const Tensor& mask) {
  return !mask.defined() || mask.rank() < 3 || mask.shape()[mask.rank() - 3] == 1;
}

}  // namespace

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, AttentionOptions options) {
  detail::check_given("attention", q, k, v);
  check<ShapeError>(q.rank() == 4 && k.rank() == 4,
                    "attention: q (B, H, Tq, D), k and v (B, H, Tk, D), got {} and {}", q.shape(), k.shape());
  check<ShapeError>(v.shape() == k.shape(), "attention: k and v (B, H, Tk, D) of one shape, got {} and {}",
                    k.shape(), v.shape());
  const std::int64_t heads = q.shape()[1], shared = k.shape()[1];
  const std::int64_t width = q.shape()[3], rows = q.numel() / std::max<std::int64_t>(width, 1);
  const bool shares = heads != shared && shared > 0 && heads % shared == 0;
  if (shares && q.shape()[2] == 1 && options.dropout == 0 && same_for_heads(options.mask) &&
      !has_masked_kernel(q))
    return attention_of_one(q, k, v, std::move(options));
  if (!options.mask.defined() && shares && !has_masked_kernel(q))
    return attention(q, ops::with_heads(k, heads), ops::with_heads(v, heads), std::move(options));
  const ops::AttentionRule rule = rule_of(options, rows, k.shape()[2], width);
  if (options.mask.defined() || shares) return masked_attention(q, k, v, options.mask, rule);
  const Tensor in[] = {q, k, v};
  return apply_many(ops::Attention{rule}, in)[0];
}

Tensor self_attention(const Tensor& qkv, std::int64_t heads, AttentionOptions options) {
  detail::check_given("self_attention", qkv);
  check<ShapeError>(qkv.rank() == 3 && heads > 0,
                    "self_attention: a projection (B, T, 3 * heads * D) and heads > 0, got {} and {}",
                    qkv.shape(), heads);
  const std::int64_t t = qkv.shape()[1], width = qkv.shape()[2] / 3 / heads;
  if (options.mask.defined()) {
    check<ShapeError>(qkv.shape()[2] == 3 * heads * width, "self_attention: {} heads do not divide shape {}",
                      heads, qkv.shape());
    const Tensor all = permute(reshape(qkv, {qkv.shape()[0], t, 3, heads, width}), {2, 0, 3, 1, 4});
    const Tensor y = attention(select(all, 0, 0), select(all, 0, 1), select(all, 0, 2), std::move(options));
    return reshape(permute(y, {0, 2, 1, 3}), {qkv.shape()[0], t, heads * width});
  }
  const std::int64_t rows = width > 0 ? qkv.numel() / 3 / width : 0;
  return apply_many(ops::SelfAttention{heads, rule_of(options, rows, t, width)}, std::span(&qkv, 1))[0];
}

}  // namespace sherd
