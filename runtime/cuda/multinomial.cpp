// Random draws by weight.
#include "runtime/ops/multinomial.h"

#include "runtime/cuda/multinomial.h"
#include "runtime/cuda/rank.h"
#include "runtime/ops.h"

namespace sherd::cuda {
namespace {

void multinomial(const ops::Multinomial& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Tensor weights = contiguous(in[0]);
  DeviceState& state = state_of(weights.device());
  launch_multinomial({weights.dtype(), device_key(op.key), out[0].numel(), weights.shape().back(),
                      weights.raw(), reinterpret_cast<std::int64_t*>(out[0].raw()), state.faults(),
                      state.stream()});
  check_launch(op.name);
}

}  // namespace

void add_multinomial() { add_kernel<multinomial>(DeviceType::cuda); }

}  // namespace sherd::cuda
