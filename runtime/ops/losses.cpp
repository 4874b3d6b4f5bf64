// Losses that are made of other ops. `cross_entropy` of rows is one op (cross_entropy.cpp).
#include "runtime/losses.h"

#include "runtime/apply.h"
#include "runtime/given.h"
#include "runtime/loss.h"
#include "runtime/ops.h"
#include "runtime/ops/absolute_error.h"
#include "runtime/ops/bce.h"
#include "runtime/ops/bce_with_logits.h"
#include "runtime/ops/cross_entropy.h"
#include "runtime/ops/huber.h"
#include "runtime/ops/nll.h"
#include "runtime/ops/squared_error.h"

namespace sherd {
namespace {

using detail::elementwise_loss;
using detail::to_compute_dtype;

Tensor reduced(const Tensor& loss, Reduction reduction) {
  return detail::reduced_loss(loss, reduction, loss.dtype());
}

/// The loss that `f` makes of both, element by element; 16-bit floats are computed in f32 and rounded once.
template <class F>
Tensor loss_of(std::string_view call, const Tensor& input, const Tensor& target, Reduction reduction,
               const F& f) {
  detail::check_loss(call, input, target);
  return detail::reduced_loss(f(to_compute_dtype(input), to_compute_dtype(target)), reduction, input.dtype());
}

/// Scores and targets of a classification as rows: (n, classes) and (n).
struct ScoreRows {
  Tensor scores, targets;
  Shape shape;  // of the targets
};

Tensor classes_last(const Tensor& x) {
  Shape order{0};
  for (int i = 2; i < x.rank(); ++i) order.push_back(i);
  order.push_back(1);
  return x.rank() > 2 ? permute(x, order) : x;
}

ScoreRows score_rows(std::string_view call, const Tensor& scores, const Tensor& targets) {
  check<ShapeError>(scores.rank() > 0, "{}: 0-d scores have no classes", call);
  Shape expected = scores.shape();
  expected.erase(scores.rank() > 1 ? 1 : 0);
  check<DeviceError>(targets.device() == scores.device(), "{}: targets on {} for scores on {}", call,
                     targets.device(), scores.device());
  check<ShapeError>(targets.shape() == expected, "{}: scores of shape {} and targets of shape {}; {}", call,
                    scores.shape(), targets.shape(), "axis 1 of the scores is the classes'");
  const Tensor last = classes_last(scores);
  return {reshape(last, {targets.numel(), last.shape().back()}), reshape(targets, {-1}), expected};
}

void check_weight(std::string_view call, const Tensor& weight, const Tensor& scores) {
  const std::int64_t classes = scores.shape().back();
  check<ShapeError>(!weight.defined() || weight.shape() == Shape{classes},
                    "{}: weights of shape {} for {} classes", call,
                    weight.defined() ? weight.shape() : Shape{}, classes);
  check<DeviceError>(!weight.defined() || weight.device() == scores.device(), "{}: weights on {} for {}",
                     call, to_string(weight.defined() ? weight.device() : scores.device()),
                     to_string(scores.device()));
  check<DTypeError>(!weight.defined() || weight.dtype() == scores.dtype(), "{}: {} weights for {}; cast them",
                    call, name_of(weight.defined() ? weight.dtype() : scores.dtype()),
                    name_of(scores.dtype()));
}

/// What a loss, or a part of it, is multiplied by, element by element.
void check_factor(std::string_view call, std::string_view what, const Tensor& factor, const Tensor& loss) {
  if (!factor.defined()) return;
  check<DeviceError>(factor.device() == loss.device(), "{}: {} on {} for {}", call, what,
                     to_string(factor.device()), to_string(loss.device()));
  check<DTypeError>(compute_dtype(factor.dtype()) == loss.dtype() && is_floating(factor.dtype()),
                    "{}: {} of {} for a loss in {}; cast it", call, what, name_of(factor.dtype()),
                    name_of(loss.dtype()));
  broadcast_shapes(call, factor.shape(), loss.shape());
}

void check_factors(std::string_view call, const BinaryCrossEntropyOptions& o, const Tensor& loss) {
  check_factor(call, "weight", o.weight, loss);
  check_factor(call, "positive_weight", o.positive_weight, loss);
}

/// -log p of the targets of rows, times their weights, and what a mean divides by.
struct NllLoss {
  Tensor loss, total;
};
NllLoss nll_of(const ScoreRows& rows, const ops::Nll& op, const Tensor& weight) {
  check<DTypeError>(is_integral(rows.targets.dtype()), "{}: targets must be integers, got {}", op.call,
                    name_of(rows.targets.dtype()));
  const Tensor in[] = {rows.scores, to(rows.targets, DType::i64), weight};
  const Tensors out = apply_many(op, in);
  return {op.reduction == Reduction::none ? reshape(out[0], rows.shape) : out[0], out[1]};
}

/// In f32 for 16-bit logits.
Tensor composed_cross_entropy(const Tensor& logits, const Tensor& targets, const CrossEntropyOptions& o) {
  const double smoothing = o.label_smoothing;
  const Tensor weight = to_compute_dtype(o.weight);
  check<ValueError>(smoothing >= 0 && smoothing <= 1, "cross_entropy: label smoothing {} is outside [0, 1]",
                    smoothing);
  if (is_floating(targets.dtype())) {
    check<ShapeError>(
        logits.rank() > 0 && targets.shape() == logits.shape(),
        "cross_entropy: {} targets are probabilities and have the logits' shape {}, got shape {}; "
        "targets that name classes are integers",
        name_of(targets.dtype()), logits.shape(), targets.shape());
    const Tensor last = classes_last(logits);
    check_weight("cross_entropy", o.weight, last);
    const Tensor log_p = log_softmax(to_compute_dtype(last)), p = to(classes_last(targets), log_p.dtype());
    const auto classes = static_cast<double>(log_p.shape().back());
    const Tensor smooth = smoothing == 0 ? p : add(mul(p, 1 - smoothing), smoothing / classes);
    const Tensor losses = neg(sum(mul(log_p, weight.defined() ? mul(smooth, weight) : smooth), {-1}));
    // A mean is over samples, whatever they weigh.
    return reduced(losses, o.reduction);
  }
  check<DTypeError>(is_integral(targets.dtype()),
                    "cross_entropy: targets must be integers or probabilities, got {}", targets.dtype());
  const ScoreRows rows = score_rows("cross_entropy", logits, to(targets, DType::i64));
  check_weight("cross_entropy", o.weight, rows.scores);
  // What an ignored row holds, infinities and NaN among it, is not used.
  const Tensor ignored = unsqueeze(equal(rows.targets, o.ignore_index), 1);
  const Tensor used = masked_fill(to_compute_dtype(rows.scores), ignored, 0);
  const ScoreRows log_p{log_softmax(used), rows.targets, rows.shape};
  if (smoothing == 0) return nll_of(log_p, {o.reduction, o.ignore_index, "cross_entropy"}, weight).loss;
  const NllLoss nll = nll_of(log_p, {Reduction::none, o.ignore_index, "cross_entropy"}, weight);
  const auto classes = static_cast<double>(log_p.scores.shape().back());
  const Tensor all = neg(sum(weight.defined() ? mul(log_p.scores, weight) : log_p.scores, {1}));
  const Tensor even = where(not_equal(rows.targets, o.ignore_index), mul(all, smoothing / classes), 0);
  const Tensor losses = add(mul(nll.loss, 1 - smoothing), reshape(even, rows.shape));
  if (o.reduction == Reduction::none) return losses;
  return o.reduction == Reduction::sum ? sum(losses) : div(sum(losses), nll.total);
}

}  // namespace

Tensor cross_entropy(const Tensor& logits, const Tensor& targets, CrossEntropyOptions o) {
  detail::check_given("cross_entropy", logits, targets);
  const bool composed = o.label_smoothing != 0 || o.weight.defined() || is_floating(targets.dtype());
  if (composed) {
    check<DTypeError>(is_floating(logits.dtype()), "cross_entropy: takes floating logits, got {}",
                      name_of(logits.dtype()));
    const Tensor loss = composed_cross_entropy(logits, targets, o);
    return o.precision == LossPrecision::wide ? loss : to(loss, logits.dtype());
  }
  const ops::CrossEntropy op{o.reduction, o.ignore_index, o.precision};
  const Tensor classes = is_integral(targets.dtype()) ? to(targets, DType::i64) : targets;
  if (logits.rank() == 2) {
    const Tensor in[] = {logits, classes};
    return apply_many(op, in)[0];
  }
  const ScoreRows rows = score_rows("cross_entropy", logits, classes);
  const Tensor in[] = {rows.scores, rows.targets};
  const Tensor loss = apply_many(op, in)[0];
  return o.reduction == Reduction::none ? reshape(loss, rows.shape) : loss;
}

Tensor nll_loss(const Tensor& log_probabilities, const Tensor& targets, NllOptions o) {
  detail::check_given("nll_loss", log_probabilities, targets);
  const DType dtype = log_probabilities.dtype();
  check<DTypeError>(is_floating(dtype), "nll_loss: takes floating dtypes, got {}", name_of(dtype));
  const ScoreRows rows = score_rows("nll_loss", log_probabilities, targets);
  check_weight("nll_loss", o.weight, rows.scores);
  return nll_of(rows, {o.reduction, o.ignore_index}, to_compute_dtype(o.weight)).loss;
}

Tensor mse_loss(const Tensor& input, const Tensor& target, Reduction reduction) {
  return elementwise_loss("mse_loss", ops::SquaredError{}, input, target, reduction);
}

Tensor l1_loss(const Tensor& input, const Tensor& target, Reduction reduction) {
  return elementwise_loss("l1_loss", ops::AbsoluteError{}, input, target, reduction);
}

Tensor huber_loss(const Tensor& input, const Tensor& target, double delta, Reduction reduction) {
  check<ValueError>(delta > 0, "huber_loss: delta {} must be positive", delta);
  return elementwise_loss("huber_loss", ops::Huber{delta}, input, target, reduction);
}

Tensor smooth_l1_loss(const Tensor& input, const Tensor& target, double beta, Reduction reduction) {
  constexpr std::string_view call = "smooth_l1_loss";
  check<ValueError>(beta >= 0, "smooth_l1_loss: beta {} is negative", beta);
  if (beta == 0) return elementwise_loss(call, ops::AbsoluteError{}, input, target, reduction);
  return elementwise_loss(call, ops::Huber{beta, beta}, input, target, reduction);
}

Tensor bce_with_logits(const Tensor& logits, const Tensor& target, BinaryCrossEntropyOptions o) {
  if (!o.weight.defined() && !o.positive_weight.defined())
    return elementwise_loss("bce_with_logits", ops::BceWithLogits{}, logits, target, o.reduction);
  return loss_of("bce_with_logits", logits, target, o.reduction, [&](const Tensor& x, const Tensor& t) {
    check_factors("bce_with_logits", o, x);
    const auto weighted = [&](const Tensor& weight) {  // what is the positive targets' counts so often
      return add(mul(sub(1, t), x), mul(softplus(neg(x)), add(mul(sub(weight, 1), t), 1)));
    };
    const Tensor loss = o.positive_weight.defined() ? weighted(to_compute_dtype(o.positive_weight))
                                                    : apply(ops::BceWithLogits{}, x, t);
    return o.weight.defined() ? mul(loss, to_compute_dtype(o.weight)) : loss;
  });
}

Tensor bce_loss(const Tensor& p, const Tensor& target, BinaryCrossEntropyOptions o) {
  if (!o.weight.defined() && !o.positive_weight.defined())
    return elementwise_loss("bce_loss", ops::Bce{}, p, target, o.reduction);
  return loss_of("bce_loss", p, target, o.reduction, [&](const Tensor& x, const Tensor& t) {
    check_factors("bce_loss", o, x);
    Tensor loss = apply(ops::Bce{}, x, t);
    if (o.positive_weight.defined()) {
      const Tensor more = mul(sub(to_compute_dtype(o.positive_weight), 1), t);
      loss = add(loss, mul(more, apply(ops::Bce{}, x, ones_like(x))));
    }
    return o.weight.defined() ? mul(loss, to_compute_dtype(o.weight)) : loss;
  });
}

Tensor kl_div(const Tensor& log_input, const Tensor& target, Reduction reduction, KlTarget form) {
  return loss_of("kl_div", log_input, target, reduction, [&](const Tensor& x, const Tensor& t) {
    if (form == KlTarget::logarithms) return mul(exp(t), sub(t, x));
    const Tensor some = not_equal(t, 0);  // t log t is 0 at 0
    // One after the other: the order in which t is used is that in which its gradients are added.
    const Tensor cross = mul(t, x), negative_entropy = where(some, mul(t, log(where(some, t, 1))), 0);
    return sub(negative_entropy, cross);
  });
}

}  // namespace sherd
