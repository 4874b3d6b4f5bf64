// Batch normalisation by the statistics of all ranks' batches.
#pragma once

#include "nn/layers.h"

namespace sherd::nn {

/// `BatchNorm1d` and `BatchNorm2d` for any number of axes (N, C, ...), by the mean and variance of the
/// batches of all ranks of `group`, which may differ in size. A training forward makes two calls among the
/// ranks, its backward two more, so all ranks run both. Gradients are those of the sum of the ranks' losses,
/// as in PyTorch; the weight's and the bias's are this rank's part. Without ranks, and in eval mode, it is
/// the others'. The names are PyTorch's.
struct SHERD_API SyncBatchNorm final : BatchNorm<SyncBatchNorm> {
  static constexpr int min_rank = 2, max_rank = 8;
  static constexpr std::string_view takes = "(N, C, ...)";
  Group group;

  /// `group` is the current world's where none is given.
  explicit SyncBatchNorm(std::int64_t channels, BatchNormLayerOptions options = {}, Group group = {});
  /// ShapeError for other channels than the layer's.
  Tensor forward(const Tensor& x, const Tensor& residual = {}) const;
};

// Compiled once, in the library.
extern template class Layer<SyncBatchNorm>;

}  // namespace sherd::nn
