// RMS normalisation over whole tensors; its row kernels are layer normalisation's.
#include "runtime/ops/rms_norm.h"

#include "runtime/cpu/norm.h"
#include "runtime/ops.h"

namespace sherd::cpu {
namespace {

void rms_norm(const ops::RmsNorm& op, Inputs in, Outputs out) {
  const Tensor &x = in[0], &weight = in[1];
  if (x.numel() == 0) return;
  const std::int64_t columns = x.shape().back();
  with_floating(op.name, x.dtype(), [&]<class T>() {
    using C = compute_t<T>;
    layer_norm<T>(x.data<T>(), data_or_null<T>(weight), nullptr, op.eps, x.numel() / columns, columns,
                  reinterpret_cast<T*>(out[0].raw()), nullptr, reinterpret_cast<C*>(out[1].raw()));
  });
}

void rms_norm_grad(const ops::RmsNormGrad& op, Inputs in, Outputs out) {
  const Tensor &gy = in[0], &x = in[1], &weight = in[2];
  const std::int64_t columns = x.shape().back(), rows = columns == 0 ? 0 : x.numel() / columns;
  with_floating(op.name, x.dtype(), [&]<class T>() {
    using C = compute_t<T>;
    layer_norm_backward<T>(gy.data<T>(), x.data<T>(), data_or_null<T>(weight), nullptr, in[3].data<C>(),
                           data_or_null<T>(in[4]), rows, columns, reinterpret_cast<T*>(out[0].raw()),
                           reinterpret_cast<T*>(out[1].raw()), nullptr);
  });
}

}  // namespace

void add_rms_norm() {
  add_kernel<rms_norm>(DeviceType::cpu);
  add_kernel<rms_norm_grad>(DeviceType::cpu);
}

}  // namespace sherd::cpu
