// Random zeros.
#include "runtime/ops/dropout.h"

#include "runtime/cpu/random.h"
#include "runtime/replay.h"

namespace sherd::cpu {
namespace {

void dropout_op(const ops::Dropout& op, Inputs in, Outputs out) {
  const Tensor& x = in[0];
  with_floating(op.name, x.dtype(), [&]<class T>() {
    dropout(key_to_draw(op.key), op.p, x.data<T>(), reinterpret_cast<T*>(out[0].raw()), x.numel());
  });
}

}  // namespace

void add_dropout() { add_kernel<dropout_op>(DeviceType::cpu); }

}  // namespace sherd::cpu
