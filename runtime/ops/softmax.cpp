#include "runtime/ops/softmax.h"

#include "runtime/apply.h"
#include "runtime/cpu/softmax.h"
#include "runtime/ops.h"

namespace sherd {
namespace ops {
namespace {

std::int64_t columns_of(const Tensor& x) { return x.rank() == 0 ? 1 : x.shape().back(); }

}  // namespace

Specs Softmax::infer(SpecSpan in) const {
  check<DTypeError>(is_floating(in[0].dtype), "{}: takes floating dtypes, got {}; cast the input first",
                    log ? "log_softmax" : "softmax", name_of(in[0].dtype));
  return {in[0]};
}

void Softmax::run(Cpu, Inputs in, Outputs out) const {
  if (out[0].numel() == 0) return;
  const Tensor x = contiguous(in[0]);
  const std::int64_t columns = columns_of(x), rows = x.numel() / columns;
  dispatch_floating(name, x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    auto* y = reinterpret_cast<T*>(out[0].raw());
    log ? cpu::log_softmax(x.data<T>(), rows, columns, y) : cpu::softmax(x.data<T>(), rows, columns, y);
  });
}

Tensors Softmax::grad(const GradArgs& args) const {
  const Tensor in[] = {args.outputs[0], args.gy[0]};
  if (args.create_graph) return SoftmaxGrad{log}.reference(in);
  return {apply(SoftmaxGrad{log}, in[0], in[1])};
}

Tensors Softmax::reference(Inputs in) const {
  const Tensor& x = in[0];
  if (x.rank() == 0) return {log ? sub(x, x) : div(x, x)};
  const Tensor shifted = sub(x, amax(x, {-1}, Keep::dims).detach());
  const Tensor total = sum(exp(shifted), {-1}, Keep::dims);
  return {log ? sub(shifted, sherd::log(total)) : div(exp(shifted), total)};
}

void SoftmaxGrad::run(Cpu, Inputs in, Outputs out) const {
  if (out[0].numel() == 0) return;
  const Tensor y = contiguous(in[0]), gy = contiguous(in[1]);
  const std::int64_t columns = columns_of(y), rows = y.numel() / columns;
  dispatch_floating(name, y.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    auto* gx = reinterpret_cast<T*>(out[0].raw());
    log ? cpu::log_softmax_backward(y.data<T>(), gy.data<T>(), rows, columns, gx)
        : cpu::softmax_backward(y.data<T>(), gy.data<T>(), rows, columns, gx);
  });
}

Tensors SoftmaxGrad::reference(Inputs in) const {
  const Tensor &y = in[0], &gy = in[1];
  const Shape last = y.rank() == 0 ? Shape{} : Shape{-1};
  if (log) return {sub(gy, mul(exp(y), sum(gy, last, Keep::dims)))};
  return {mul(y, sub(gy, sum(mul(gy, y), last, Keep::dims)))};
}

}  // namespace ops

namespace {
/// The kernel works along the last axis; others are moved there and back.
Tensor along(const Tensor& x, std::int64_t axis, bool log) {
  const int at = normalize_axis("softmax", axis, x.rank());
  if (x.rank() == 0 || at == x.rank() - 1) return apply(ops::Softmax{log}, x);
  return transpose(apply(ops::Softmax{log}, transpose(x, at, -1)), at, -1);
}
}  // namespace

Tensor softmax(const Tensor& x, std::int64_t axis) { return along(x, axis, false); }
Tensor log_softmax(const Tensor& x, std::int64_t axis) { return along(x, axis, true); }

}  // namespace sherd
