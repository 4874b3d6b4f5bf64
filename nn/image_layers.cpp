#include "nn/image_layers.h"

#include "runtime/ops.h"

namespace sherd::nn {

InstanceNorm::InstanceNorm(std::int64_t channels, const InstanceNormOptions& options)
    : channels(channels), eps(options.eps) {
  check<ValueError>(channels > 0, "InstanceNorm: {} channels; it takes at least one", channels);
  if (options.affine == Affine::no) return;
  weight.emplace(ones({channels}, options.tensor));
  bias.emplace(zeros({channels}, options.tensor));
}

Tensor InstanceNorm::forward(const Tensor& x) const {
  check<ShapeError>(x.rank() >= 2 && x.size(1) == channels, "InstanceNorm: takes (N, {}, ...), got shape {}",
                    channels, x.shape());
  return instance_norm(x, weight ? Tensor(*weight) : Tensor(), bias ? Tensor(*bias) : Tensor(), eps);
}

template class Layer<InstanceNorm>;
template class Layer<PixelShuffle>;
template class Layer<PixelUnshuffle>;

}  // namespace sherd::nn
