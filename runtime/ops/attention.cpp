#include "runtime/ops/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <vector>

#include "runtime/apply.h"
#include "runtime/context.h"
#include "runtime/math.h"
#include "runtime/ops.h"
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

/// k or v with each head as often as q's heads share it.
Tensor with_heads(const Tensor& x, std::int64_t heads) {
  const Shape& s = x.shape();
  const std::int64_t times = heads / s[1];
  return reshape(expand(unsqueeze(x, 2), {s[0], s[1], times, s[2], s[3]}), {s[0], heads, s[2], s[3]});
}

/// With scores that are stored, in f32 for 16-bit floats.
Tensor masked_attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& o) {
  const bool adds = is_floating(o.mask.dtype());
  check<DTypeError>(o.mask.dtype() == DType::boolean || o.mask.dtype() == q.dtype(),
                    "attention: a mask is bool or added in q's dtype, got {} for {}", name_of(o.mask.dtype()),
                    name_of(q.dtype()));
  check<DTypeError>(is_floating(q.dtype()) && k.dtype() == q.dtype() && v.dtype() == q.dtype(),
                    "attention: q, k and v are of one floating dtype, got {}, {} and {}", name_of(q.dtype()),
                    name_of(k.dtype()), name_of(v.dtype()));
  const Shape &sq = q.shape(), &sk = k.shape();
  check<ShapeError>(sk == v.shape() && sq[0] == sk[0] && sq[1] == sk[1] && sq[3] == sk[3],
                    "attention: q {}, k {} and v {} do not fit", sq, sk, v.shape());
  const Shape shape{sq[0], sq[1], sq[2], sk[2]};
  check<ShapeError>(broadcast_shapes("attention", o.mask.shape(), shape) == shape,
                    "attention: a mask of shape {} for scores {}", o.mask.shape(), shape);
  const DType wide = compute_dtype(q.dtype());
  const double scale = o.scale.value_or(1 / std::sqrt(static_cast<double>(sq[3])));
  Tensor scores = matmul(mul(to(q, wide), scale), transpose(to(k, wide), 2, 3)), seen;
  if (adds) scores = add(scores, to(o.mask, wide));
  if (!adds) seen = o.mask;
  if (o.causal) {
    const Tensor past = tril(ones({sq[2], sk[2]}, {DType::boolean, q.device()}), sk[2] - sq[2]);
    seen = seen.defined() ? logical_and(seen, past) : past;
  }
  if (seen.defined()) scores = where(seen, scores, -std::numeric_limits<double>::infinity());
  Tensor weights = softmax(scores);
  if (seen.defined()) weights = where(seen, weights, 0);  // rows that see nothing are NaN before
  if (o.dropout > 0) weights = dropout(weights, o.dropout);
  return to(matmul(weights, to(v, wide)), q.dtype());
}

}  // namespace

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, AttentionOptions options) {
  check<ShapeError>(q.rank() == 4 && k.rank() == 4,
                    "attention: q (B, H, Tq, D), k and v (B, H, Tk, D), got {} and {}", q.shape(), k.shape());
  check<ShapeError>(v.shape() == k.shape(), "attention: k and v (B, H, Tk, D) of one shape, got {} and {}",
                    k.shape(), v.shape());
  const std::int64_t heads = q.shape()[1], shared = k.shape()[1];
  if (heads != shared && v.rank() == 4 && v.shape()[1] == shared && shared > 0 && heads % shared == 0)
    return attention(q, with_heads(k, heads), with_heads(v, heads), std::move(options));
  if (options.mask.defined()) return masked_attention(q, k, v, options);
  const Tensor in[] = {q, k, v};
  return apply_many(ops::Attention{rule_of(options, q.numel() / std::max<std::int64_t>(q.shape()[3], 1),
                                           k.shape()[2], q.shape()[3])},
                    in)[0];
}

Tensor self_attention(const Tensor& qkv, std::int64_t heads, AttentionOptions options) {
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

Tensor rotary(const Tensor& x, RotaryOptions o) {
  check<DTypeError>(is_floating(x.dtype()), "rotary: takes floating dtypes, got {}", name_of(x.dtype()));
  check<ShapeError>(x.rank() >= 2 && x.shape().back() % 2 == 0,
                    "rotary: x (..., T, D) with an even D, got shape {}", x.shape());
  check<ValueError>(o.base > 0 && o.first >= 0,
                    "rotary: base {} must be positive and position {} not negative", o.base, o.first);
  check<ValueError>(o.first <= std::numeric_limits<std::int64_t>::max() - x.shape()[x.rank() - 2],
                    "rotary: {} steps from position {} on are beyond the largest integer",
                    x.shape()[x.rank() - 2], o.first);
  check<ValueError>(
      o.scaling.factor > 0 && o.scaling.high > o.scaling.low && o.scaling.original > 0,
      "rotary: scaling by {} between {} and {} turns in {} positions; all are positive, and the "
      "second number of turns is the larger one",
      o.scaling.factor, o.scaling.low, o.scaling.high, o.scaling.original);
  const std::int64_t steps = x.shape()[x.rank() - 2], half = x.shape().back() / 2;
  // Angles in f64: large positions times small rates keep their fractions.
  const TensorOptions exact{DType::f64, x.device()};
  const Tensor rates = exp(mul(arange(0, half, 1, exact),
                               -math::log(o.base) / static_cast<double>(std::max<std::int64_t>(half, 1))));
  Tensor slowed = rates;
  if (o.scaling.factor != 1) {
    std::vector<double> share;  // of the full speed, by pair
    for (std::int64_t i = 0; i < half; ++i) {
      const double rate = math::pow(o.base, -static_cast<double>(i) / static_cast<double>(half));
      const double turns = o.scaling.original * rate / (2 * std::numbers::pi);
      const double full_speed =
          std::clamp((turns - o.scaling.low) / (o.scaling.high - o.scaling.low), 0.0, 1.0);
      share.push_back(full_speed + (1 - full_speed) / o.scaling.factor);
    }
    slowed = mul(rates, to(Tensor::from(share, {half}, Device::cpu()), x.device()));
  }
  const Tensor angles = mul(unsqueeze(arange(o.first, o.first + steps, 1, exact), 1), slowed);
  const DType wide = compute_dtype(x.dtype());
  const Tensor c = to(cos(angles), wide), s = to(sin(angles), wide), all = to(x, wide);
  const bool halves = o.pairs == RotaryPairs::halves;
  Shape pairs = x.shape();
  pairs[pairs.rank() - 1] = halves ? 2 : half;
  pairs.push_back(halves ? half : 2);
  const Tensor paired = reshape(all, pairs);
  const int axis = halves ? -2 : -1;
  const Tensor a = select(paired, axis, 0), b = select(paired, axis, 1);
  const Tensor turned = stack({sub(mul(a, c), mul(b, s)), add(mul(a, s), mul(b, c))}, axis);
  return to(reshape(turned, x.shape()), x.dtype());
}

}  // namespace sherd
