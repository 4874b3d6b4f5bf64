// Random draws by weight.
#include "runtime/ops/multinomial.h"

#include "runtime/cuda/multinomial.h"
#include "runtime/cuda/rank.h"
#include "runtime/ops.h"

namespace sherd::cuda {
namespace {

MultinomialCall describe(const Tensor& weights, const RandomKey& key, const Tensor& places) {
  DeviceState& state = state_of(weights.device());
  const std::int64_t columns = weights.shape().back();
  return {weights.dtype(), device_key(key), weights.numel() / columns,
          columns,         weights.raw(),   reinterpret_cast<std::int64_t*>(places.raw()),
          state.faults(),  state.stream()};
}

void multinomial(const ops::Multinomial& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Tensor weights = contiguous(in[0]);
  launch_multinomial(describe(weights, op.key, out[0]));
  check_launch(op.name);
}

void many_draws(const ops::ManyDraws& op, Inputs in, Outputs out) {
  if (!op.replace || out[0].numel() == 0)
    return sherd::detail::adopt_reference(op.name, op.reference(in), out);
  const Tensor running = empty(in[0].shape(), {DType::f64, in[0].device()});
  launch_many_draws(describe(in[0], op.key, out[0]), op.count, reinterpret_cast<double*>(running.raw()));
  check_launch(op.name);
}

}  // namespace

void add_multinomial() {
  add_kernel<multinomial>(DeviceType::cuda);
  add_kernel<many_draws>(DeviceType::cuda);
}

}  // namespace sherd::cuda
