#include "runtime/cuda/attention_cudnn.h"

#include <limits>

#include "runtime/cuda/cudnn_plans.h"

namespace sherd::cuda {
namespace {

using Sizes = CudnnGraph::Sizes;

// Of a plan: the gradient that repeats to the bit stores batch x heads x queries x keys halves. Beyond it a
// kernel of ours runs, in memory of the length. No part of the free memory, which would change bits.
constexpr std::int64_t most_workspace_bytes = std::int64_t{2} << 30;

cudnnDataType_t data_type(DType dtype) {
  return dtype == DType::bf16 ? CUDNN_DATA_BFLOAT16 : CUDNN_DATA_HALF;
}

// Pairs of a query and a key in all heads. A plan takes some 40 ms, once for each new length; below this
// many, which our own kernels do in a fraction of a millisecond, a program whose lengths grow (sampling, a
// ragged batch) would build plans and compute next to nothing. By sizes alone, which all ranks share.
constexpr std::int64_t least_pairs = std::int64_t{1} << 24;

/// What decides which kernel is right.
struct AttentionForm {
  bool gradient = false, causal = false;
  DType dtype = DType::bf16;
  std::int64_t batch = 0, heads = 0, shared = 0, queries = 0, keys = 0, width = 0;  // shared: heads of k
  float scale = 1;
  std::array<std::array<std::int64_t, 3>, 8> strides{};  // of q, k, v, o, and of the gradients of o, q, k, v
  friend auto operator<=>(const AttentionForm&, const AttentionForm&) = default;
};

/// With enough work to pay for a plan. Without a mask, and without dropout, whose masks are the CPU's and not
/// cuDNN's; every query sees a key, and there are two queries at least.
bool fits(const AttentionCall& c) {
  return size_of(c.dtype) == 2 && c.width % 8 == 0 && c.width <= 128 && !c.dropout &&
         c.mask.kind == MaskKind::none && c.scale > 0 && c.queries > 1 &&
         c.batch * c.heads * c.queries * c.keys >= least_pairs && (!c.causal || c.queries == c.keys);
}

/// So few keys that our own kernels, which hold all of them, were faster (H200, cuDNN 9).
bool is_short(const AttentionCall& c, bool gradient) {
  if (c.width <= 32) return c.keys <= (gradient ? 64 : 128);
  return c.width <= 64 && !gradient && c.keys <= 64;
}

AttentionForm form_of(const AttentionCall& c) {
  AttentionForm form;
  form.causal = c.causal;
  form.dtype = c.dtype;
  form.batch = c.batch;
  form.heads = c.heads;
  form.shared = c.heads / c.group;
  form.queries = c.queries;
  form.keys = c.keys;
  form.width = c.width;
  form.scale = c.scale;
  int i = 0;
  for (const HeadsAt* x : {&c.q, &c.k, &c.v, &c.o}) form.strides[i++] = {x->batch, x->head, x->row};
  return form;
}

/// The tensors that both graphs have, and the scores.
struct Drawing {
  const AttentionForm& form;
  CudnnGraph& graph;
  cudnnDataType_t type = data_type(form.dtype);
  Sizes scores{form.batch, form.heads, form.queries, form.keys};
  Sizes rows{form.batch, form.heads, form.queries, 1};
  Sizes row_steps{form.heads * form.queries, form.queries, 1, 1};

  int between(Sizes sizes) { return graph.between(CUDNN_DATA_FLOAT, sizes); }
  int row_memory() { return graph.memory(CUDNN_DATA_FLOAT, rows, row_steps); }
  std::int64_t heads_at(int which) const { return which == 1 || which == 2 ? form.shared : form.heads; }
  /// Operand `which` of the form, (batch, heads, length, width).
  int heads(int which, std::int64_t length) {
    const auto& s = form.strides[which];
    return graph.memory(type, {form.batch, heads_at(which), length, form.width}, {s[0], s[1], s[2], 1});
  }
  /// The same memory as (batch, heads, width, length).
  int transposed(int which, std::int64_t length) {
    const auto& s = form.strides[which];
    return graph.memory(type, {form.batch, heads_at(which), form.width, length}, {s[0], s[1], 1, s[2]});
  }
  int pointwise(cudnnPointwiseMode_t mode, int a, int b, Sizes sizes) {
    const int y = between(sizes);
    graph.pointwise(mode, {a, b}, y);
    return y;
  }
  int scaled_product(int q, int k, int scale) {
    const int product = between(scores);
    graph.matmul(q, k, product);
    return pointwise(CUDNN_POINTWISE_MUL, product, scale, scores);
  }
  /// -inf where a query is before its key.
  int masked(int x) {
    if (!form.causal) return x;
    const int row = graph.between(CUDNN_DATA_INT32, scores), column = graph.between(CUDNN_DATA_INT32, scores),
              seen = graph.between(CUDNN_DATA_BOOLEAN, scores), y = between(scores);
    graph.pointwise(CUDNN_POINTWISE_GEN_INDEX, {.x = x, .axis = 2}, row);
    graph.pointwise(CUDNN_POINTWISE_GEN_INDEX, {.x = x, .axis = 3}, column);
    graph.pointwise(CUDNN_POINTWISE_CMP_GE, {row, column}, seen, CUDNN_DATA_BOOLEAN);
    graph.pointwise(CUDNN_POINTWISE_BINARY_SELECT,
                    {x, graph.number(-std::numeric_limits<float>::infinity()), seen}, y);
    return y;
  }
  int exponential(int x) {
    const int y = between(scores);
    graph.pointwise(CUDNN_POINTWISE_EXP, {x}, y);
    return y;
  }
};

/// Memory: q, k, v, o, logsumexp.
void draw_forward(const AttentionForm& form, CudnnGraph& graph) {
  Drawing d{form, graph};
  const int q = d.heads(0, form.queries), k = d.transposed(1, form.keys), v = d.heads(2, form.keys),
            o = d.heads(3, form.queries), logsumexp = d.row_memory();
  const int scores = d.masked(d.scaled_product(q, k, graph.number(form.scale)));
  const int largest = d.between(d.rows), sum = d.between(d.rows), log = d.between(d.rows);
  graph.reduce(CUDNN_REDUCE_TENSOR_MAX, scores, largest);
  const int weights = d.exponential(d.pointwise(CUDNN_POINTWISE_SUB, scores, largest, d.scores));
  graph.reduce(CUDNN_REDUCE_TENSOR_ADD, weights, sum);
  graph.pointwise(CUDNN_POINTWISE_LOG, {sum}, log);
  graph.pointwise(CUDNN_POINTWISE_ADD, {largest, log}, logsumexp);
  const int shares = graph.between(d.type, d.scores);
  graph.pointwise(CUDNN_POINTWISE_DIV, {weights, sum}, shares);
  graph.matmul(shares, v, o);
}

/// Memory: q, k, v, o, logsumexp, then the gradients of o, q, k and v, and delta. The gradient of q is one
/// product and no sum over blocks in the order of their ends, so that it repeats to the bit.
void draw_backward(const AttentionForm& form, CudnnGraph& graph) {
  Drawing d{form, graph};
  const Sizes turned{form.batch, form.heads, form.keys, form.queries},
      turned_steps{form.heads * form.queries * form.keys, form.queries * form.keys, 1, form.keys};
  const int q = d.heads(0, form.queries), k = d.transposed(1, form.keys), v = d.transposed(2, form.keys),
            o = d.heads(3, form.queries), logsumexp = d.row_memory(), go = d.heads(4, form.queries),
            gq = d.heads(5, form.queries), gk = d.heads(6, form.keys), gv = d.heads(7, form.keys),
            delta = d.row_memory();
  const int scale = graph.number(form.scale);
  const Sizes outputs{form.batch, form.heads, form.queries, form.width};
  const int products = d.pointwise(CUDNN_POINTWISE_MUL, go, o, outputs), row_sums = d.between(d.rows);
  graph.reduce(CUDNN_REDUCE_TENSOR_ADD, products, row_sums);
  graph.pointwise(CUDNN_POINTWISE_MUL, {row_sums, graph.number(1)}, delta);

  const int scores = d.scaled_product(q, k, scale);
  const int shares = d.exponential(d.masked(d.pointwise(CUDNN_POINTWISE_SUB, scores, logsumexp, d.scores)));
  const int shares_turned = graph.between(d.type, turned, turned_steps);
  graph.reshape(shares, shares_turned);
  graph.matmul(shares_turned, go, gv);

  const int weight_gradients = d.between(d.scores);
  graph.matmul(go, v, weight_gradients);
  const int centred = d.pointwise(CUDNN_POINTWISE_SUB, weight_gradients, delta, d.scores);
  const int score_gradients = d.pointwise(
      CUDNN_POINTWISE_MUL, d.pointwise(CUDNN_POINTWISE_MUL, centred, shares, d.scores), scale, d.scores);
  const int gradients_turned = graph.between(d.type, turned, turned_steps);
  graph.reshape(score_gradients, gradients_turned);
  graph.matmul(gradients_turned, q, gk);
  const auto& s = form.strides[1];
  const int keys =
      graph.between(d.type, {form.batch, form.heads, form.keys, form.width}, {s[0], s[1], s[2], 1});
  graph.reshape(k, keys);
  graph.matmul(score_gradients, keys, gq);
}

template <class Draw>
bool run_plan(CudnnPlans<AttentionForm>& plans, const AttentionForm& form, const Draw& draw,
              std::span<void* const> memory, cudaStream_t stream) {
  const CudnnPlan* const plan = plans.find(form, {}, draw);
  return plan && plan->workspace_bytes() <= most_workspace_bytes && plans.run(*plan, memory, stream);
}

}  // namespace

struct CudnnAttention::Plans {
  std::unique_ptr<CudnnPlans<AttentionForm>> all;  // none where cuDNN is not installed
};

CudnnAttention::CudnnAttention(Device device) : plans_(std::make_unique<Plans>()) {
  plans_->all = CudnnPlans<AttentionForm>::make(device);
}
CudnnAttention::~CudnnAttention() = default;

bool CudnnAttention::wants(const AttentionCall& c) const {
  return plans_->all && fits(c) && !is_short(c, false);
}
bool CudnnAttention::wants(const AttentionGradCall& call) const {
  return plans_->all && fits(call.forward) && !is_short(call.forward, true);
}

bool CudnnAttention::run(const AttentionCall& c) {
  if (!wants(c)) return false;
  void* const memory[] = {c.q.data, c.k.data, c.v.data, c.o.data, c.logsumexp};
  return run_plan(*plans_->all, form_of(c), draw_forward, memory, c.stream);
}

bool CudnnAttention::run(const AttentionGradCall& call) {
  const AttentionCall& c = call.forward;
  if (!wants(call) || c.group > 1) return false;
  AttentionForm form = form_of(c);
  form.gradient = true;
  int i = 4;
  for (const HeadsAt* x : {&call.go, &call.gq, &call.gk, &call.gv})
    form.strides[i++] = {x->batch, x->head, x->row};
  void* const memory[] = {c.q.data,     c.k.data,     c.v.data,     c.o.data,     c.logsumexp,
                          call.go.data, call.gq.data, call.gk.data, call.gv.data, call.delta};
  return run_plan(*plans_->all, form, draw_backward, memory, c.stream);
}

}  // namespace sherd::cuda
