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

/// A mask with one element along axes where all are the same one, and one axis at least.
Tensor narrowed(const Tensor& mask) {
  Tensor x = mask.rank() == 0 ? reshape(mask, {1}) : mask;
  for (int i = 0; i < x.rank(); ++i)
    if (x.strides()[i] == 0 && x.shape()[i] > 1) x = narrow(x, i, 0, 1);
  return x;
}

/// Such a mask as kernels read it: of the dtype that they compute in, keys in pairs. A copy where it is not
/// so yet, never larger than the mask but for one element a row.
Tensor paired(const Tensor& mask, DType dtype, std::int64_t width) {
  const bool as_f32 = is_floating(mask.dtype()) && !on_tensor_cores(dtype, width);
  const Tensor x = as_f32 ? to(mask, DType::f32) : mask;
  const int last = x.rank() - 1;
  const std::int64_t n = x.shape()[last], size = size_of(x.dtype());
  bool there = n % 2 == 0 && x.strides()[last] == 1 &&
               reinterpret_cast<std::uintptr_t>(x.raw()) % static_cast<std::uintptr_t>(2 * size) == 0;
  for (int i = 0; i < last; ++i) there = there && (x.shape()[i] == 1 || x.strides()[i] % 2 == 0);
  if (there) return x;
  Shape even = x.shape();
  even[last] = n + n % 2;
  if (n == 1) return clone(expand(x, even));
  const Tensor y = zeros(even, {x.dtype(), x.device()});
  copy_(narrow(y, last, 0, n), x);
  return y;
}

/// `mask`, which `paired` gave, for scores of a rank of four; `keys` says whether it has an element a key.
MaskAt mask_of(const Tensor& mask, bool keys) {
  MaskAt at;
  if (!mask.defined()) return at;
  at.kind = mask.dtype() == DType::boolean ? MaskKind::shows : MaskKind::adds;
  at.data = mask.raw();
  at.key = keys ? 1 : 0;
  std::int64_t* const to[] = {&at.row, &at.head, &at.batch};
  for (int i = 0; i < 3 && i < mask.rank() - 1; ++i) {
    const int axis = mask.rank() - 2 - i;
    *to[i] = mask.shape()[axis] == 1 ? 0 : mask.strides()[axis];
  }
  return at;
}

/// What attention has beside queries, keys and values; `mask` lives as long as a call that was made of it.
struct Extra {
  Tensor mask;
  bool mask_has_keys = false;
  Extra() = default;
  Extra(const Tensor& given, DType dtype, std::int64_t width) {
    if (!given.defined() || given.numel() == 0) return;
    const Tensor small = narrowed(given);
    mask_has_keys = small.shape().back() > 1;
    mask = paired(small, dtype, width);
  }
};

AttentionCall describe(std::string_view op, const ops::AttentionRule& rule, const Tensor& q, const Tensor& k,
                       const Tensor& v, const Extra& extra, const Tensor& o, const Tensor& logsumexp) {
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
  call.group = static_cast<int>(call.heads / k.shape()[1]);
  call.mask = mask_of(extra.mask, extra.mask_has_keys);
  call.logsumexp = reinterpret_cast<float*>(logsumexp.raw());
  if (call.mask.kind == MaskKind::adds) call.tops = call.logsumexp + call.batch * call.heads * call.queries;
  call.stream = stream_of(q.device());
  return call;
}

/// k or v with a head for each of q's.
Tensor with_heads(const Tensor& x, std::int64_t heads) {
  const Shape& s = x.shape();
  const std::int64_t times = heads / s[1];
  return reshape(expand(unsqueeze(x, 2), {s[0], s[1], times, s[2], s[3]}), {s[0], heads, s[2], s[3]});
}
/// Writes the gradient of k or v, given one for each head of q.
void sum_heads(const Tensor& to, const Tensor& g) {
  const Shape& s = to.shape();
  copy_(to, sum(reshape(g, {s[0], s[1], g.shape()[1] / s[1], s[2], s[3]}), {2}));
}

void forward(std::string_view op, const ops::AttentionRule& rule, const Tensor& q, const Tensor& k,
             const Tensor& v, const Extra& extra, const Tensor& o, const Tensor& logsumexp) {
  if (o.numel() == 0) return;
  const Tensor rq = readable(q), rk = readable(k), rv = readable(v);
  const Tensor wo = writable(o);
  const AttentionCall call = describe(op, rule, rq, rk, rv, extra, wo, logsumexp);
  CudnnAttention& library = state_of(q.device()).cudnn_attention();
  if (library.run(call)) return;
  if (call.group > 1 && library.wants(call)) {  // where it takes no heads that are shared
    const Tensor wide_k = with_heads(rk, call.heads), wide_v = with_heads(rv, call.heads);
    if (library.run(describe(op, rule, rq, wide_k, wide_v, extra, wo, logsumexp))) return;
  }
  on_tensor_cores(call.dtype, call.width) ? launch_attention_mma(call) : launch_attention_plain(call);
  check_launch(op);
  finish(o, wo);
}

struct Gradients {
  Tensor q, k, v;
};

AttentionGradCall describe_gradients(const AttentionCall& forward, const Tensor& go, const Gradients& to,
                                     const Tensor& delta) {
  AttentionGradCall call;
  call.forward = forward;
  call.go = heads_of(go);
  call.gq = heads_of(to.q);
  call.gk = heads_of(to.k);
  call.gv = heads_of(to.v);
  call.delta = reinterpret_cast<float*>(delta.raw());
  return call;
}

/// Of heads that are shared, by a plan of cuDNN's, which wants a head of k and v for each of q's; false where
/// it has none. Where a plan pays, such copies are little beside the products.
bool ran_unshared(std::string_view op, const ops::AttentionRule& rule, const Tensor& go, const Tensor& q,
                  const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& logsumexp,
                  const Tensor& delta, const Gradients& out) {
  const std::int64_t heads = q.shape()[1];
  const Tensor wide_k = with_heads(k, heads), wide_v = with_heads(v, heads);
  const Gradients to{out.q, empty(wide_k.spec()), empty(wide_v.spec())};
  const AttentionGradCall call =
      describe_gradients(describe(op, rule, q, wide_k, wide_v, {}, o, logsumexp), go, to, delta);
  if (!state_of(q.device()).cudnn_attention().run(call)) return false;
  sum_heads(out.k, to.k);
  sum_heads(out.v, to.v);
  return true;
}

void backward(std::string_view op, const ops::AttentionRule& rule, const Tensor& go, const Tensor& q,
              const Tensor& k, const Tensor& v, const Extra& extra, const Tensor& o, const Tensor& logsumexp,
              const Gradients& out) {
  if (o.numel() == 0) {
    for (const Tensor* g : {&out.q, &out.k, &out.v}) zero_(*g);
    return;
  }
  const Tensor rq = readable(q), rk = readable(k), rv = readable(v), ro = readable(o), rgo = readable(go);
  const Gradients to{writable(out.q), writable(out.k), writable(out.v)};
  const Tensor delta = empty({q.shape()[0], q.shape()[1], q.shape()[2]}, {DType::f32, q.device()});
  const AttentionCall made = describe(op, rule, rq, rk, rv, extra, ro, logsumexp);
  const AttentionGradCall call = describe_gradients(made, rgo, to, delta);
  CudnnAttention& library = state_of(q.device()).cudnn_attention();
  if (made.group > 1 && library.wants(call) &&
      ran_unshared(op, rule, rgo, rq, rk, rv, ro, logsumexp, delta, out))
    return;
  if (library.run(call)) return;
  launch_attention_delta(call);
  on_tensor_cores(made.dtype, made.width) ? launch_attention_grad_mma(call)
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
  if (dtype != DType::f64 && (on_tensor_cores(dtype, width) || width <= widest_head_here())) return false;
  sherd::detail::adopt_reference(O::name, op.reference(in), out);
  return true;
}
std::int64_t packed_width(const Tensor& qkv, std::int64_t heads) { return qkv.shape()[2] / 3 / heads; }

void attention(const ops::Attention& op, Inputs in, Outputs out) {
  if (ran_reference(op, in[0].dtype(), in[0].shape()[3], in, out)) return;
  forward(op.name, op.rule, in[0], in[1], in[2], {}, out[0], out[1]);
}

void attention_grad(const ops::AttentionGrad& op, Inputs in, Outputs out) {
  if (ran_reference(op, in[1].dtype(), in[1].shape()[3], in, out)) return;
  backward(op.name, op.rule, in[0], in[1], in[2], in[3], {}, in[4], in[5], {out[0], out[1], out[2]});
}

void masked_attention(const ops::MaskedAttention& op, Inputs in, Outputs out) {
  const DType dtype = in[0].dtype();
  const std::int64_t width = in[0].shape()[3];
  if (ran_reference(op, dtype, width, in, out)) return;
  forward(op.name, op.rule, in[0], in[1], in[2], {in[3], dtype, width}, out[0], out[1]);
}

void masked_attention_grad(const ops::MaskedAttentionGrad& op, Inputs in, Outputs out) {
  const DType dtype = in[1].dtype();
  const std::int64_t width = in[1].shape()[3];
  if (ran_reference(op, dtype, width, in, out)) return;
  backward(op.name, op.rule, in[0], in[1], in[2], in[3], {in[4], dtype, width}, in[5], in[6],
           {out[0], out[1], out[2]});
}

void self_attention(const ops::SelfAttention& op, Inputs in, Outputs out) {
  if (ran_reference(op, in[0].dtype(), packed_width(in[0], op.heads), in, out)) return;
  const Tensor qkv = contiguous(in[0]);
  forward(op.name, op.rule, part(qkv, op.heads, 0), part(qkv, op.heads, 1), part(qkv, op.heads, 2), {},
          split_heads(out[0], op.heads), out[1]);
}

void self_attention_grad(const ops::SelfAttentionGrad& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  if (ran_reference(op, in[1].dtype(), packed_width(in[1], op.heads), in, out)) return;
  const Tensor go = contiguous(in[0]), qkv = contiguous(in[1]), gqkv = out[0];
  backward(op.name, op.rule, split_heads(go, op.heads), part(qkv, op.heads, 0), part(qkv, op.heads, 1),
           part(qkv, op.heads, 2), {}, split_heads(in[2], op.heads), in[3],
           {part(gqkv, op.heads, 0), part(gqkv, op.heads, 1), part(gqkv, op.heads, 2)});
}

}  // namespace

void add_attention() {
  add_kernel<attention>(DeviceType::cuda);
  add_kernel<attention_grad>(DeviceType::cuda);
  add_kernel<masked_attention>(DeviceType::cuda);
  add_kernel<masked_attention_grad>(DeviceType::cuda);
  add_kernel<self_attention>(DeviceType::cuda);
  add_kernel<self_attention_grad>(DeviceType::cuda);
}

}  // namespace sherd::cuda
