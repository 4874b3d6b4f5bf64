#include "nn/sync_batch_norm.h"

#include "collectives/differentiable.h"
#include "collectives/world.h"
#include "runtime/context.h"
#include "runtime/given.h"

namespace sherd::nn {

SyncBatchNorm::SyncBatchNorm(std::int64_t channels, BatchNormLayerOptions options, Group given)
    : BatchNorm(channels, options), group(std::move(given)) {
  if (!group.defined())
    if (const World* world = World::current_or_null()) group = world->group();
}

Tensor SyncBatchNorm::forward(const Tensor& x, const Tensor& residual) const {
  sherd::detail::check_given("SyncBatchNorm", x);
  if (!training() || !group.defined() || group.size() == 1) return BatchNorm::forward(x, residual);
  const std::int64_t channels = weight.shape()[0];
  check<ShapeError>(x.rank() >= min_rank && x.rank() <= max_rank && x.shape()[1] == channels,
                    "SyncBatchNorm: takes (N, {}, ...), got shape {}", channels, x.shape());
  check<ShapeError>(!residual.defined() || residual.shape() == x.shape(),
                    "SyncBatchNorm: residual of shape {} for an input of shape {}",
                    residual.defined() ? residual.shape() : Shape(), x.shape());
  const DType wide = compute_dtype(x.dtype());
  Shape along{channels};
  Shape others{0};
  for (int i = 2; i < x.rank(); ++i) {
    along.push_back(1);
    others.push_back(i);
  }
  // Each rank uses a sum of all on its own batch, so what comes back for it is summed too.
  const auto of_all = [&](const Tensor& partial, const char* label) {
    return enter_parallel(group, sum_partials(group, partial, {.label = label}), {.label = label});
  };
  const Tensor all = sherd::to(x, wide);
  const auto here = static_cast<double>(channels > 0 ? x.numel() / channels : 0);
  const Tensor count_here = full({1}, here, {wide, x.device()});
  const Tensor sums = of_all(cat({sum(all, others), count_here}, 0), "batch norm mean");
  const Tensor count = narrow(sums, 0, channels, 1).detach();
  const Tensor mean = div(narrow(sums, 0, 0, channels), count);
  const Tensor centred = sub(all, reshape(mean, along));
  const Tensor var = div(of_all(sum(square(centred), others), "batch norm variance"), count);
  if (running_mean.tensor().defined()) {
    const NoGrad guard;
    add_(num_batches_tracked, 1);
    // Without a momentum the share of one batch among all so far.
    const Tensor share = momentum ? Tensor() : div(1, sherd::to(num_batches_tracked.tensor(), wide));
    const Tensor any_sample = greater(count, 0);  // of all ranks; without one the statistics stay
    const auto follow = [&](const Buffer& running, const Tensor& now) {
      const Tensor old = sherd::to(running, wide);
      const Tensor moved = momentum ? add(mul(old, 1 - *momentum), mul(now, *momentum))
                                    : add(mul(old, sub(1, share)), mul(now, share));
      copy_(running, where(any_sample, moved, old));
    };
    follow(running_mean, mean.detach());
    follow(running_var, mul(var.detach(), div(count, maximum(sub(count, 1), 1))));
  }
  const auto of_channels = [&](const Param& p) { return sherd::to(reshape(p, along), wide); };
  const Tensor scale = mul(reshape(rsqrt(add(var, eps)), along), of_channels(weight));
  const Tensor y = sherd::to(add(mul(centred, scale), of_channels(bias)), x.dtype());
  return detail::activated(residual.defined() ? add(y, residual) : y, activation);
}

template class Layer<SyncBatchNorm>;

}  // namespace sherd::nn
