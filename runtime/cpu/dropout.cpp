// Random zeros.
#include "runtime/ops/dropout.h"

#include "runtime/cpu/random.h"
#include "runtime/replay.h"

namespace sherd::cpu {
namespace {

void dropout_op(const ops::Dropout& op, Inputs in, Outputs out) {
  const Tensor& x = in[0];
  dispatch_floating(op.name, x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    dropout(key_to_draw(op.key), op.p, x.data<T>(), reinterpret_cast<T*>(out[0].raw()),
            x.numel());
  });
}

}  // namespace

void add_dropout() { add_kernel<dropout_op>(DeviceType::cpu); }

}  // namespace sherd::cpu
