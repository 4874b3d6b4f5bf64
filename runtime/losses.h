// Losses: what a prediction is worth, as a number, a sum, or element by element.
#pragma once

#include "runtime/tensor.h"

namespace sherd {

/// Over all elements of a loss.
enum class Reduction { mean, sum, none };
/// What the loss of 16-bit logits is in: their dtype, or f32, with the bits that casting the logits first
/// gives.
enum class LossPrecision { of_logits, wide };
struct CrossEntropyOptions {
  Reduction reduction = Reduction::mean;  ///< mean over targets that are not ignored, by their weights
  std::int64_t ignore_index = -100;
  LossPrecision precision = LossPrecision::of_logits;
  double label_smoothing = 0;  ///< share of a target that goes to all classes evenly
  Tensor weight{};             ///< of each class (classes), or none
};
/// -log softmax(logits)[target]: logits (n, classes) and targets (n) i64, or (n, classes, d1, ...) and
/// (n, d1, ...), or (classes) and (). Floating targets of the logits' shape are probabilities of the classes.
/// The mean of no targets is NaN. Smoothing, weights and probabilities are composed of other ops.
SHERD_API Tensor cross_entropy(const Tensor& logits, const Tensor& targets, CrossEntropyOptions options = {});
/// The same of a mean or sum (ValueError else), writing the gradient over the logits: the fastest where
/// nobody else needs them, as in `cross_entropy_(std::exchange(logits, {}), targets)`. Where the loss's own
/// gradient is not 1 (a scaled loss) it is rounded twice. No second derivative. GPUs may give other bits.
SHERD_API Tensor cross_entropy_(const Tensor& logits, const Tensor& targets,
                                CrossEntropyOptions options = {});

struct LinearCrossEntropyOptions {
  Tensor bias{};                          ///< of each class (classes), or none
  Reduction reduction = Reduction::mean;  ///< as for `cross_entropy`, as are the next three
  std::int64_t ignore_index = -100;
  LossPrecision precision = LossPrecision::of_logits;
  double label_smoothing = 0;
  /// How many vectors' logits are there at a time; 0 for as many as take the memory of x, and at least 256.
  std::int64_t chunk = 0;
};
/// cross_entropy(linear(x, weight, bias), targets) without all logits: x (..., width), weight (classes,
/// width), targets (...) of class numbers. Some rows of logits are made at a time, and again for the
/// gradient, which takes one product more than the two ops: for vocabularies whose logits are the largest of
/// a step. The numbers differ from those of the two ops by rounding; in 16 bits gradients of the weight are
/// summed over chunks in f32. ValueError for a negative chunk, the errors of both ops.
SHERD_API Tensor linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& targets,
                                      const LinearCrossEntropyOptions& options = {});

struct NllOptions {
  Reduction reduction = Reduction::mean;  ///< as for `cross_entropy`
  std::int64_t ignore_index = -100;
  Tensor weight{};
};
/// -log_probabilities[target], shapes and mean as for `cross_entropy`.
SHERD_API Tensor nll_loss(const Tensor& log_probabilities, const Tensor& targets, NllOptions options = {});

// Of `input` and `target`, which have one shape (ShapeError) unless one is 0-d.

/// (input - target)^2
SHERD_API Tensor mse_loss(const Tensor& input, const Tensor& target, Reduction reduction = Reduction::mean);
/// |input - target|
SHERD_API Tensor l1_loss(const Tensor& input, const Tensor& target, Reduction reduction = Reduction::mean);
/// d^2 / 2 where |d| < delta, else delta (|d| - delta / 2), for d = input - target (Huber, 1964).
SHERD_API Tensor huber_loss(const Tensor& input, const Tensor& target, double delta = 1,
                            Reduction reduction = Reduction::mean);
/// The same divided by its bound: d^2 / (2 beta) where |d| < beta, else |d| - beta / 2.
SHERD_API Tensor smooth_l1_loss(const Tensor& input, const Tensor& target, double beta = 1,
                                Reduction reduction = Reduction::mean);
struct BinaryCrossEntropyOptions {
  Reduction reduction = Reduction::mean;
  Tensor weight{};           ///< of each element, or none
  Tensor positive_weight{};  ///< of the targets' part in the loss, or none
};
/// -(target log sigmoid(logits) + (1 - target) log(1 - sigmoid(logits))), without overflow.
SHERD_API Tensor bce_with_logits(const Tensor& logits, const Tensor& target,
                                 BinaryCrossEntropyOptions options = {});
/// -(target log p + (1 - target) log(1 - p)) of probabilities; logarithms below -100 are -100.
SHERD_API Tensor bce_loss(const Tensor& p, const Tensor& target, BinaryCrossEntropyOptions options = {});
/// What a target of `kl_div` is given as.
enum class KlTarget { probabilities, logarithms };
/// target (log target - log_input), 0 where the target is 0. The mean is over elements; PyTorch's `batchmean`
/// is the sum divided by the batch.
SHERD_API Tensor kl_div(const Tensor& log_input, const Tensor& target, Reduction reduction = Reduction::mean,
                        KlTarget form = KlTarget::probabilities);

}  // namespace sherd
