#include "runtime/ops/attention.h"

#include <cmath>
#include <limits>

#include "runtime/apply.h"
#include "runtime/context.h"
#include "runtime/cpu/attention.h"
#include "runtime/ops.h"
#include "runtime/ops/random.h"

namespace sherd {
namespace ops {
namespace {

template <class T>
cpu::Heads<T> heads_of(const Tensor& t) {
  return {reinterpret_cast<T*>(t.raw()), t.strides()[0], t.strides()[1], t.strides()[2]};
}

/// f32 with a contiguous head width, as the kernel wants it; other floats are computed in f32.
Tensor as_f32(const Tensor& t) {
  const Tensor wide = to(t, DType::f32);
  return wide.strides()[3] == 1 || wide.shape()[3] <= 1 ? wide : clone(wide);
}

/// (B, T, 3, H, D) parts of a packed projection as (B, H, T, D) views.
Tensor part(const Tensor& qkv, std::int64_t heads, int which) {
  const std::int64_t b = qkv.shape()[0], t = qkv.shape()[1], width = qkv.shape()[2] / 3, d = width / heads;
  return alias(qkv, {Shape{b, heads, t, d}, Shape{qkv.strides()[0], d, qkv.strides()[1], 1},
                     qkv.layout().offset + which * width});
}

/// (B, T, H D) as (B, H, T, D).
Tensor split_heads(const Tensor& y, std::int64_t heads) {
  const std::int64_t b = y.shape()[0], t = y.shape()[1], d = y.shape()[2] / heads;
  return alias(y, {Shape{b, heads, t, d}, Shape{y.strides()[0], d, y.strides()[1], 1}, y.layout().offset});
}

cpu::Attention describe(const AttentionRule& rule, const Tensor& q, const Tensor& k, const Tensor& v) {
  cpu::Attention a;
  a.batch = q.shape()[0];
  a.heads = q.shape()[1];
  a.queries = q.shape()[2];
  a.keys = k.shape()[2];
  a.width = q.shape()[3];
  a.scale = static_cast<float>(rule.scale);
  a.causal = rule.causal;
  a.dropout = rule.dropout;
  a.random = {rule.key.seed, rule.key.offset};
  a.q = heads_of<const float>(q);
  a.k = heads_of<const float>(k);
  a.v = heads_of<const float>(v);
  return a;
}

void forward(const AttentionRule& rule, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
             const Tensor& logsumexp) {
  if (o.numel() == 0) return;
  const Tensor qf = as_f32(q), kf = as_f32(k), vf = as_f32(v);
  const Tensor of = o.dtype() == DType::f32 ? o : empty(o.shape(), {DType::f32});
  cpu::attention(describe(rule, qf, kf, vf), heads_of<float>(of), reinterpret_cast<float*>(logsumexp.raw()));
  if (!of.is(o)) copy_(o, of);
}

void backward(const AttentionRule& rule, const Tensor& go, const Tensor& q, const Tensor& k, const Tensor& v,
              const Tensor& o, const Tensor& logsumexp, const Tensor& gq, const Tensor& gk,
              const Tensor& gv) {
  const Tensor qf = as_f32(q), kf = as_f32(k), vf = as_f32(v), of = as_f32(o), gof = as_f32(go);
  const auto target = [](const Tensor& g) {
    return g.dtype() == DType::f32 ? g : empty(g.shape(), {DType::f32});
  };
  const Tensor gqf = target(gq), gkf = target(gk), gvf = target(gv);
  cpu::attention_backward(describe(rule, qf, kf, vf),
                          {heads_of<const float>(of), heads_of<const float>(gof), logsumexp.data<float>(),
                           heads_of<float>(gqf), heads_of<float>(gkf), heads_of<float>(gvf)});
  if (!gqf.is(gq)) copy_(gq, gqf);
  if (!gkf.is(gk)) copy_(gk, gkf);
  if (!gvf.is(gv)) copy_(gv, gvf);
}

/// The kernels compute in f32; f64 goes through the reference.
bool exact(const Tensor& x) { return x.dtype() == DType::f64; }

template <class O>
void run_reference(const O& op, Inputs in, Outputs out) {
  detail::adopt_reference(O::name, op.reference(in), out);
  zero_(out[1]);  // no kernel reads the logsumexp of this way
}

Tensor drop_weights(const AttentionRule& rule, const Tensor& weights) {
  if (rule.dropout == 0) return weights;
  // Row r starts at a counter of its own: ceil(keys / 4) counters a row, as the kernel draws them.
  const std::int64_t keys = weights.shape().back(), padded = (keys + 3) / 4 * 4;
  Shape shape = weights.shape();
  shape[3] = padded;
  const Tensor uniform = apply(Uniform{{shape, DType::f32, weights.device()}, rule.key, 0, 1});
  const Tensor keep = greater_equal(narrow(uniform, 3, 0, keys), rule.dropout);
  return mul(mul(weights, to(keep, weights.dtype())), 1 / (1 - rule.dropout));
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

void Attention::run(Cpu, Inputs in, Outputs out) const {
  if (exact(in[0]))
    run_reference(*this, in, out);
  else
    forward(rule, in[0], in[1], in[2], out[0], out[1]);
}

Tensors Attention::grad(const GradArgs& args) const {
  if (args.create_graph || exact(args.inputs[0]))
    return detail::reference_gradient(args, [this](Inputs in) { return reference(in); });
  const Tensor in[] = {args.gy[0],     args.inputs[0],  args.inputs[1],
                       args.inputs[2], args.outputs[0], args.outputs[1]};
  return apply_many(AttentionGrad{rule}, in);
}

Tensors Attention::reference(Inputs in) const {
  const Tensor &q = in[0], &k = in[1], &v = in[2];
  Tensor scores = mul(matmul(q, transpose(k, -2, -1)), rule.scale);
  if (rule.causal) {
    const std::int64_t tq = q.shape()[2], tk = k.shape()[2];
    const TensorOptions index{DType::i64, q.device()};
    const Tensor rows = unsqueeze(arange(static_cast<double>(tk - tq), static_cast<double>(tk), 1, index), 1);
    const Tensor columns = unsqueeze(arange(0, static_cast<double>(tk), 1, index), 0);
    scores = masked_fill(scores, greater(columns, rows), -std::numeric_limits<double>::infinity());
  }
  return {matmul(drop_weights(rule, softmax(scores)), v)};
}

void AttentionGrad::run(Cpu, Inputs in, Outputs out) const {
  backward(rule, in[0], in[1], in[2], in[3], in[4], in[5], out[0], out[1], out[2]);
}

Specs SelfAttention::infer(SpecSpan in) const {
  const Spec& qkv = in[0];
  check<DTypeError>(is_floating(qkv.dtype), "self_attention: takes floating dtypes, got {}",
                    name_of(qkv.dtype));
  check<ShapeError>(qkv.shape.rank() == 3 && qkv.shape[2] % (3 * heads) == 0,
                    "self_attention: a projection (B, T, 3 * heads * D) for {} heads, got {}", heads,
                    qkv.shape);
  const Shape& s = qkv.shape;
  return {{Shape{s[0], s[1], s[2] / 3}, qkv.dtype, qkv.device},
          {Shape{s[0], heads, s[1]}, DType::f32, qkv.device}};
}

void SelfAttention::run(Cpu, Inputs in, Outputs out) const {
  if (exact(in[0])) return run_reference(*this, in, out);
  const Tensor qkv = contiguous(in[0]);
  forward(rule, part(qkv, heads, 0), part(qkv, heads, 1), part(qkv, heads, 2), split_heads(out[0], heads),
          out[1]);
}

Tensors SelfAttention::grad(const GradArgs& args) const {
  if (args.create_graph || exact(args.inputs[0]))
    return detail::reference_gradient(args, [this](Inputs in) { return reference(in); });
  const Tensor in[] = {args.gy[0], args.inputs[0], args.outputs[0], args.outputs[1]};
  return {apply_many(SelfAttentionGrad{heads, rule}, in)[0]};
}

Tensors SelfAttention::reference(Inputs in) const {
  const Shape& s = in[0].shape();
  const Tensor packed = reshape(in[0], {s[0], s[1], 3, heads, s[2] / (3 * heads)});
  Tensor parts[3];
  for (int i = 0; i < 3; ++i) parts[i] = transpose(select(packed, 2, i), 1, 2);
  return {reshape(transpose(Attention{rule}.reference(parts)[0], 1, 2), {s[0], s[1], s[2] / 3})};
}

void SelfAttentionGrad::run(Cpu, Inputs in, Outputs out) const {
  if (out[0].numel() == 0) return;
  const Tensor go = contiguous(in[0]), qkv = contiguous(in[1]);
  backward(rule, split_heads(go, heads), part(qkv, heads, 0), part(qkv, heads, 1), part(qkv, heads, 2),
           split_heads(in[2], heads), in[3], part(out[0], heads, 0), part(out[0], heads, 1),
           part(out[0], heads, 2));
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

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, AttentionOptions options) {
  check<ShapeError>(q.rank() == 4 && k.rank() == 4,
                    "attention: q (B, H, Tq, D), k and v (B, H, Tk, D), got {} and {}", q.shape(), k.shape());
  const Tensor in[] = {q, k, v};
  return apply_many(ops::Attention{rule_of(options, q.numel() / std::max<std::int64_t>(q.shape()[3], 1),
                                           k.shape()[2], q.shape()[3])},
                    in)[0];
}

Tensor self_attention(const Tensor& qkv, std::int64_t heads, AttentionOptions options) {
  check<ShapeError>(qkv.rank() == 3 && heads > 0,
                    "self_attention: a projection (B, T, 3 * heads * D) and heads > 0, got {} and {}",
                    qkv.shape(), heads);
  const std::int64_t t = qkv.shape()[1], width = qkv.shape()[2] / (3 * heads);
  return apply_many(ops::SelfAttention{heads, rule_of(options, qkv.shape()[0] * heads * t, t, width)},
                    std::span(&qkv, 1))[0];
}

}  // namespace sherd
