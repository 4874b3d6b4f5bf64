// Attention: the views that kernels work on, and which kernel does.
#include "runtime/ops/attention.h"

#include "runtime/cuda/attention.h"
#include "runtime/cuda/attention_cudnn.h"
#include "runtime/cuda/rank.h"
#include "runtime/ops.h"
#include "runtime/random.h"

namespace sherd::cuda {
namespace {

HeadsAt heads_of(const Tensor& t) { return {t.raw(), t.strides()[0], t.strides()[1], t.strides()[2]}; }

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

bool aligned(const Tensor& t) {
  const std::int64_t size = size_of(t.dtype());
  bool all = reinterpret_cast<std::uintptr_t>(t.raw()) % 16 == 0;
  for (int i = 0; i < 3; ++i) all = all && (t.shape()[i] <= 1 || t.strides()[i] * size % 16 == 0);
  return all;
}

/// With a contiguous head width. For tensor cores aligned, else in f32.
Tensor readable(const Tensor& t) {
  const bool wide = t.shape()[3] <= 1 || t.strides()[3] == 1;
  if (on_tensor_cores(t.dtype(), t.shape()[3])) return wide && aligned(t) ? t : clone(t);
  const Tensor plain = to(t, DType::f32);
  return plain.strides()[3] == 1 || t.shape()[3] <= 1 ? plain : clone(plain);
}

/// Where a kernel writes the result `t`: into `t` itself, or into f32 memory that `finish` copies to `t`.
Tensor writable(const Tensor& t) {
  const bool there = t.dtype() == DType::f32 || on_tensor_cores(t.dtype(), t.shape()[3]);
  return there ? t : empty(t.shape(), {DType::f32, t.device()});
}
void finish(const Tensor& t, const Tensor& written) {
  if (!written.is(t)) copy_(t, written);
}

AttentionCall describe(std::string_view op, const ops::AttentionRule& rule, const Tensor& q, const Tensor& k,
                       const Tensor& v, const Tensor& o, const Tensor& logsumexp) {
  constexpr std::int64_t most = std::int64_t{1} << 30;
  const std::int64_t width = q.shape()[3];
  check<NotImplementedError>(
      q.shape()[2] < most && k.shape()[2] < most,
      "{}: {} queries and {} keys have no kernel for cuda, which takes less than {} of "
      "each; move the inputs to cpu",
      op, q.shape()[2], k.shape()[2], most);
  AttentionCall call;
  call.dtype = q.dtype();
  call.batch = q.shape()[0];
  call.heads = q.shape()[1];
  call.queries = static_cast<int>(q.shape()[2]);
  call.keys = static_cast<int>(k.shape()[2]);
  call.width = static_cast<int>(width);
  call.scale = static_cast<float>(rule.scale);
  call.causal = rule.causal;
  call.dropout = rule.dropout > 0;
  call.threshold = drop_threshold(rule.dropout);
  call.kept = rule.dropout < 1 ? static_cast<float>(1 / (1 - rule.dropout)) : 0.f;
  call.key = device_key(rule.key);
  call.q = heads_of(q);
  call.k = heads_of(k);
  call.v = heads_of(v);
  call.o = heads_of(o);
  call.logsumexp = reinterpret_cast<float*>(logsumexp.raw());
  call.stream = stream_of(q.device());
  return call;
}

void forward(std::string_view op, const ops::AttentionRule& rule, const Tensor& q, const Tensor& k,
             const Tensor& v, const Tensor& o, const Tensor& logsumexp) {
  if (o.numel() == 0) return;
  const Tensor rq = readable(q), rk = readable(k), rv = readable(v);
  const Tensor wo = writable(o);
  const AttentionCall call = describe(op, rule, rq, rk, rv, wo, logsumexp);
  if (state_of(q.device()).cudnn_attention().run(call)) return;
  on_tensor_cores(call.dtype, call.width) ? launch_attention_mma(call) : launch_attention_plain(call);
  check_launch(op);
  finish(o, wo);
}

struct Gradients {
  Tensor q, k, v;
};

void backward(std::string_view op, const ops::AttentionRule& rule, const Tensor& go, const Tensor& q,
              const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& logsumexp,
              const Gradients& out) {
  if (o.numel() == 0) {
    for (const Tensor* g : {&out.q, &out.k, &out.v}) zero_(*g);
    return;
  }
  const Tensor rq = readable(q), rk = readable(k), rv = readable(v), ro = readable(o), rgo = readable(go);
  AttentionGradCall call;
  call.forward = describe(op, rule, rq, rk, rv, ro, logsumexp);
  call.go = heads_of(rgo);
  const Gradients to{writable(out.q), writable(out.k), writable(out.v)};
  call.gq = heads_of(to.q);
  call.gk = heads_of(to.k);
  call.gv = heads_of(to.v);
  const Tensor delta = empty(logsumexp.spec());
  call.delta = reinterpret_cast<float*>(delta.raw());
  if (state_of(q.device()).cudnn_attention().run(call)) return;
  launch_attention_delta(call);
  on_tensor_cores(call.forward.dtype, call.forward.width) ? launch_attention_grad_mma(call)
                                                          : launch_attention_grad_plain(call);
  check_launch(op);
  finish(out.q, to.q);
  finish(out.k, to.k);
  finish(out.v, to.v);
}

/// The kernels compute in f32 and take heads up to some width; the rest goes through the op's own formula on
/// the device, gradients too.
template <class O>
bool ran_reference(const O& op, DType dtype, std::int64_t width, Inputs in, Outputs out) {
  if (dtype != DType::f64 && width <= widest_head) return false;
  sherd::detail::adopt_reference(O::name, op.reference(in), out);
  return true;
}
std::int64_t packed_width(const Tensor& qkv, std::int64_t heads) { return qkv.shape()[2] / 3 / heads; }

void attention(const ops::Attention& op, Inputs in, Outputs out) {
  if (ran_reference(op, in[0].dtype(), in[0].shape()[3], in, out)) return;
  forward(op.name, op.rule, in[0], in[1], in[2], out[0], out[1]);
}

void attention_grad(const ops::AttentionGrad& op, Inputs in, Outputs out) {
  if (ran_reference(op, in[1].dtype(), in[1].shape()[3], in, out)) return;
  backward(op.name, op.rule, in[0], in[1], in[2], in[3], in[4], in[5], {out[0], out[1], out[2]});
}

void self_attention(const ops::SelfAttention& op, Inputs in, Outputs out) {
  if (ran_reference(op, in[0].dtype(), packed_width(in[0], op.heads), in, out)) return;
  const Tensor qkv = contiguous(in[0]);
  forward(op.name, op.rule, part(qkv, op.heads, 0), part(qkv, op.heads, 1), part(qkv, op.heads, 2),
          split_heads(out[0], op.heads), out[1]);
}

void self_attention_grad(const ops::SelfAttentionGrad& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  if (ran_reference(op, in[1].dtype(), packed_width(in[1], op.heads), in, out)) return;
  const Tensor go = contiguous(in[0]), qkv = contiguous(in[1]), gqkv = out[0];
  backward(op.name, op.rule, split_heads(go, op.heads), part(qkv, op.heads, 0), part(qkv, op.heads, 1),
           part(qkv, op.heads, 2), split_heads(in[2], op.heads), in[3],
           {part(gqkv, op.heads, 0), part(gqkv, op.heads, 1), part(gqkv, op.heads, 2)});
}

}  // namespace

void add_attention() {
  add_kernel<attention>(DeviceType::cuda);
  add_kernel<attention_grad>(DeviceType::cuda);
  add_kernel<self_attention>(DeviceType::cuda);
  add_kernel<self_attention_grad>(DeviceType::cuda);
}

}  // namespace sherd::cuda
