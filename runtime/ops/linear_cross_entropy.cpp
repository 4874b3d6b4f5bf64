#include "runtime/ops/linear_cross_entropy.h"

#include <algorithm>
#include <optional>

#include "runtime/apply.h"
#include "runtime/given.h"
#include "runtime/indexing.h"
#include "runtime/ops.h"
#include "runtime/ops/cross_entropy.h"
#include "runtime/ops/matmul.h"

namespace sherd {
namespace ops {

/// Logits that take what x does, but rows enough for products that keep a device busy.
std::int64_t LinearCrossEntropyRule::rows_at_a_time(std::int64_t rows, std::int64_t width,
                                                    std::int64_t classes) const {
  constexpr std::int64_t least = 256;
  const std::int64_t like_x = rows * width / std::max<std::int64_t>(classes, 1);
  return chunk > 0 ? chunk : std::max(least, like_x);
}

namespace {

/// Calls `body(first, count)` for the rows of each chunk.
template <class F>
void for_chunks(const LinearCrossEntropyRule& rule, const Tensor& x, const Tensor& weight, const F& body) {
  const std::int64_t rows = x.shape()[0];
  const std::int64_t most = rule.rows_at_a_time(rows, x.shape()[1], weight.shape()[0]);
  for (std::int64_t first = 0; first < rows; first += most) body(first, std::min(most, rows - first));
}

/// The same memory under a handle that ops may write.
Tensor written(const Tensor& out) { return alias(out, out.layout()); }

/// Loss of each row of some logits, in the dtype that is computed in, and the normalizers.
Tensors row_losses(const LinearCrossEntropyRule& rule, const Tensor& logits, const Tensor& targets) {
  const Tensor in[] = {logits, targets};
  const CrossEntropy op{Reduction::none, rule.ignore_index, LossPrecision::wide};
  Tensors found = apply_many(op, in);
  if (rule.label_smoothing == 0) return found;
  const Tensor &normalizers = found[1], wide = to(logits, normalizers.dtype());
  const Tensor spread = sub(add(select(normalizers, 0, 0), select(normalizers, 0, 1)), mean(wide, {1}));
  const Tensor smooth = masked_fill(spread, equal(targets, rule.ignore_index), 0);
  found[0] = add(mul(found[0], 1 - rule.label_smoothing), mul(smooth, rule.label_smoothing));
  return found;
}

/// The gradient of some logits with what smoothing adds: of each counted row `scales` times its share, at the
/// target and against all classes.
Tensor smoothed(const LinearCrossEntropyRule& rule, const Tensor& g, const Tensor& targets,
                const Tensor& scales) {
  const Tensor counted = not_equal(targets, rule.ignore_index);
  const double share = rule.label_smoothing / static_cast<double>(g.shape()[1]);
  const Tensor rows = unsqueeze(where(counted, scales, 0), 1);
  const Tensor at = unsqueeze(where(counted, targets, 0), 1);
  const Tensor less = sub(to(g, rows.dtype()), mul(rows, share));
  return to(scatter_add(less, 1, at, mul(rows, rule.label_smoothing)), g.dtype());
}

/// The same of all logits at once, whose gradients have gradients.
Tensors of_all_logits(const LinearCrossEntropyRule& rule, Inputs in) {
  const CrossEntropyOptions options{.reduction = rule.reduction,
                                    .ignore_index = rule.ignore_index,
                                    .precision = rule.precision,
                                    .label_smoothing = rule.label_smoothing};
  const TensorOptions wide{compute_dtype(in[0].dtype()), in[0].device()};
  return {cross_entropy(linear(in[0], in[1], in[3]), in[2], options), zeros({2, in[2].numel()}, wide),
          zeros({}, wide)};
}

/// A gradient that chunks add to: in its place, or of 16 bits beside it in f32.
class Total {
 public:
  explicit Total(const Tensor& out)
      : out_(written(out)),
        sum_(compute_dtype(out.dtype()) == out.dtype()
                 ? out_
                 : empty(out.shape(), {compute_dtype(out.dtype()), out.device()})) {
    zero_(sum_);
  }
  void add(const Tensor& part) { add_(sum_, to(part, sum_.dtype())); }
  void finish() const {
    if (!sum_.is(out_)) copy_(out_, sum_);
  }

 private:
  Tensor out_, sum_;
};

}  // namespace

Specs LinearCrossEntropy::infer(SpecSpan in) const {
  const Spec &x = in[0], &weight = in[1], &targets = in[2], &bias = in[3];
  check<DTypeError>(is_floating(x.dtype) && weight.dtype == x.dtype,
                    "linear_cross_entropy: x and weight share a floating dtype, got {} and {}; cast one",
                    name_of(x.dtype), name_of(weight.dtype));
  check<DTypeError>(targets.dtype == DType::i64,
                    "linear_cross_entropy: targets must be class numbers in i64, got {}; cast them first",
                    name_of(targets.dtype));
  check<ShapeError>(x.shape.rank() == 2 && weight.shape.rank() == 2 && x.shape[1] == weight.shape[1] &&
                        targets.shape == Shape{x.shape[0]},
                    "linear_cross_entropy: x (n, width), weight (classes, width) and targets (n), got {}, {} "
                    "and {}",
                    x.shape, weight.shape, targets.shape);
  if (!bias.is_none()) {
    check<ShapeError>(bias.shape == Shape{weight.shape[0]},
                      "linear_cross_entropy: a bias of shape {} for {} classes", bias.shape, weight.shape[0]);
    check<DTypeError>(bias.dtype == x.dtype, "linear_cross_entropy: a bias in {} for {}; cast it",
                      name_of(bias.dtype), name_of(x.dtype));
  }
  const DType wide = compute_dtype(x.dtype);
  const Shape loss = rule.reduction == Reduction::none ? targets.shape : Shape{};
  return {{loss, rule.precision == LossPrecision::wide ? wide : x.dtype, x.device},
          {{2, targets.shape[0]}, wide, x.device},
          {{}, wide, x.device}};
}

Tensors LinearCrossEntropy::reference(Inputs in) const {
  const Tensor &x = in[0], &weight = in[1], &targets = in[2], &bias = in[3];
  std::vector<Tensor> losses, normalizers;
  for_chunks(rule, x, weight, [&](std::int64_t first, std::int64_t size) {
    const Tensor logits = linear(narrow(x, 0, first, size), weight, bias);
    const Tensors found = row_losses(rule, logits, narrow(targets, 0, first, size));
    losses.push_back(found[0]);
    normalizers.push_back(found[1]);
  });
  const TensorOptions wide{compute_dtype(x.dtype()), x.device()};
  if (losses.empty()) losses.push_back(zeros({0}, wide)), normalizers.push_back(zeros({2, 0}, wide));
  const Tensor count = to(sum(not_equal(targets, rule.ignore_index)), wide.dtype);
  Tensor loss = cat(losses);
  if (rule.reduction != Reduction::none) loss = sum(loss);
  if (rule.reduction == Reduction::mean) loss = div(loss, count);
  return {rule.precision == LossPrecision::wide ? loss : to(loss, x.dtype()), cat(normalizers, 1), count};
}

void LinearCrossEntropy::run(Inputs in, Outputs out) const {
  const Tensor &x = in[0], &weight = in[1];
  const std::int64_t rows = x.shape()[0], most = rule.rows_at_a_time(rows, x.shape()[1], weight.shape()[0]);
  if (rows > 0 && rows <= most && rule.label_smoothing == 0) {
    const Tensor given[] = {linear(x, weight, in[3]), in[2]};
    return run_again(OpModel<CrossEntropy>({rule.reduction, rule.ignore_index, rule.precision}), given, out);
  }
  const Tensors found = reference(in);
  for (std::size_t i = 0; i < found.size(); ++i) copy_(written(out[i]), found[i]);
}

Tensors LinearCrossEntropy::grad(const GradArgs& args) const {
  if (args.create_graph)
    return detail::reference_gradient(args, [this](Inputs in) { return of_all_logits(rule, in); });
  constexpr std::size_t places[] = {0, 1, 3};
  LinearCrossEntropyGrad back{rule, 0};
  for (std::size_t i = 0; i < 3; ++i)
    if (args.need(places[i])) back.wanted |= bit(i);
  const Tensor in[] = {args.gy[0],     args.inputs[0],  args.inputs[1], args.inputs[2],
                       args.inputs[3], args.outputs[1], args.outputs[2]};
  const Tensors found = apply_many(back, in);
  Tensors grads(4);
  std::size_t next = 0;
  for (std::size_t i = 0; i < 3; ++i)
    if (has(back.wanted, i)) grads[places[i]] = found[next++];
  return grads;
}

Specs LinearCrossEntropyGrad::infer(SpecSpan in) const {
  Specs out;
  const Spec bias{{in[2].shape[0]}, in[2].dtype, in[2].device};
  const Spec* all[] = {&in[1], &in[2], &bias};
  for (std::size_t i = 0; i < 3; ++i)
    if (has(wanted, i)) out.push_back(*all[i]);
  return out;
}

void LinearCrossEntropyGrad::run(Inputs in, Outputs out) const {
  const Tensor &gy = in[0], &x = in[1], &weight = in[2], &targets = in[3], &bias = in[4];
  const Tensor &normalizers = in[5], &count = in[6];
  std::size_t next = 0;
  const Tensor gx = has(wanted, 0) ? written(out[next++]) : Tensor();
  std::optional<Total> gw, gb;
  if (has(wanted, 1)) gw.emplace(out[next++]);
  if (has(wanted, 2)) gb.emplace(out[next++]);
  Tensor scales = to(gy, normalizers.dtype());
  if (rule.reduction == Reduction::mean) scales = div(scales, count);
  const bool each = rule.reduction == Reduction::none;
  const CrossEntropyGradInPlace op{{{rule.reduction, rule.ignore_index, rule.precision}}};
  for_chunks(rule, x, weight, [&](std::int64_t first, std::int64_t size) {
    const auto part = [&](const Tensor& t) { return narrow(t, 0, first, size); };
    const Tensor here = part(targets);
    Tensor g = linear(part(x), weight, bias);
    const Tensor given[] = {each ? part(gy) : gy, g, here, contiguous(narrow(normalizers, 1, first, size)),
                            count};
    apply_many(op, given);
    if (rule.label_smoothing > 0) g = smoothed(rule, g, here, each ? part(scales) : scales);
    if (gx.defined()) copy_(part(gx), apply(MatMul{}, g, weight));
    if (gw) gw->add(apply(MatMul{true, false}, g, part(x)));
    if (gb) gb->add(sum(g, {0}));
  });
  if (gw) gw->finish();
  if (gb) gb->finish();
}

}  // namespace ops

Tensor linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& targets,
                            const LinearCrossEntropyOptions& options) {
  detail::check_given("linear_cross_entropy", x, weight, targets);
  check<ValueError>(options.label_smoothing >= 0 && options.label_smoothing <= 1,
                    "linear_cross_entropy: label smoothing {} is outside [0, 1]", options.label_smoothing);
  check<ValueError>(options.chunk >= 0,
                    "linear_cross_entropy: chunks of {} rows; give at least 1, or 0 for "
                    "as many as x's memory holds",
                    options.chunk);
  Shape expected = x.shape();
  check<ShapeError>(!expected.empty(), "linear_cross_entropy: x (..., width), got a 0-d tensor");
  expected.erase(expected.rank() - 1);
  check<ShapeError>(targets.shape() == expected,
                    "linear_cross_entropy: x of shape {} and targets of shape {}; each vector of x has one",
                    x.shape(), targets.shape());
  const ops::LinearCrossEntropy op{
      {options.reduction, options.ignore_index, options.precision, options.label_smoothing, options.chunk}};
  const Tensor classes = is_integral(targets.dtype()) ? to(targets, DType::i64) : targets;
  const Tensor in[] = {reshape(x, {targets.numel(), x.shape().back()}), weight, reshape(classes, {-1}),
                       options.bias};
  const Tensor loss = apply_many(op, in)[0];
  return options.reduction == Reduction::none ? reshape(loss, expected) : loss;
}

}  // namespace sherd
