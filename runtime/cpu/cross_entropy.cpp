// Cross entropy over whole tensors; its row kernels stand with softmax.
#include "runtime/ops/cross_entropy.h"

#include <algorithm>

#include "runtime/cpu/softmax.h"

namespace sherd::cpu {
namespace {

void cross_entropy_op(const ops::CrossEntropy& op, Inputs in, Outputs out) {
  const Tensor &logits = in[0], &targets = in[1];
  const std::int64_t rows = logits.shape()[0], columns = logits.shape()[1];
  with_floating(op.name, logits.dtype(), [&]<class T>() {
    using C = compute_t<T>;
    const Tensor row_loss = empty({rows}, {dtype_of<C>, Device::cpu()});
    auto* loss = static_cast<C*>(row_loss.storage().data());
    const std::int64_t* target = targets.data<std::int64_t>();
    auto* tops = reinterpret_cast<C*>(out[1].raw());
    const std::int64_t bad =
        cross_entropy(logits.data<T>(), target, op.ignore_index, rows, columns, loss, tops, tops + rows);
    check<ValueError>(bad < 0,
                      "cross_entropy: target {} of row {} is outside [0, {}) and is not ignore_index {}",
                      target[std::max<std::int64_t>(bad, 0)], bad, columns, op.ignore_index);
    double total = 0;
    std::int64_t count = 0;
    for (std::int64_t i = 0; i < rows; ++i) {
      total += loss[i];
      count += target[i] != op.ignore_index;
    }
    *reinterpret_cast<C*>(out[2].raw()) = static_cast<C>(count);
    if (op.reduction == Reduction::mean) total /= static_cast<double>(count);
    const auto put = [&]<class L>(L* y) {
      if (op.reduction != Reduction::none)
        *y = static_cast<L>(static_cast<C>(total));
      else
        std::transform(loss, loss + rows, y, [](C one) { return static_cast<L>(one); });
    };
    if (op.precision == LossPrecision::wide)
      put(reinterpret_cast<C*>(out[0].raw()));
    else
      put(reinterpret_cast<T*>(out[0].raw()));
  });
}

void cross_entropy_grad_op(const ops::CrossEntropyGrad& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Tensor &gy = in[0], &logits = in[1], &targets = in[2];
  with_floating(op.name, logits.dtype(), [&]<class T>() {
    using C = compute_t<T>;
    const bool each = op.forward.reduction == Reduction::none;
    const Tensor row_scale = each ? to(gy, dtype_of<C>) : Tensor{};
    C scale = each ? C(1) : *to(gy, dtype_of<C>).template data<C>();
    if (op.forward.reduction == Reduction::mean) scale /= *in[4].data<C>();
    cross_entropy_backward(logits.data<T>(), targets.data<std::int64_t>(), op.forward.ignore_index,
                           in[3].data<C>(), in[3].data<C>() + logits.shape()[0], scale,
                           each ? row_scale.data<C>() : nullptr, logits.shape()[0], logits.shape()[1],
                           reinterpret_cast<T*>(out[0].raw()));
  });
}

void cross_entropy_grad_in_place_op(const ops::CrossEntropyGradInPlace& op, Inputs in, Outputs) {
  Tensor over[] = {in[1]};
  cross_entropy_grad_op(op.grad, in, over);
}

}  // namespace

void add_cross_entropy() {
  add_kernel<cross_entropy_op>(DeviceType::cpu);
  add_kernel<cross_entropy_grad_op>(DeviceType::cpu);
  add_kernel<cross_entropy_grad_in_place_op>(DeviceType::cpu);
}

}  // namespace sherd::cpu
