// Tensors of one value, of evenly spaced and of random numbers.
#include <cmath>
#include <cstring>

#include "runtime/cuda/launchers.h"
#include "runtime/cuda/random_order.h"
#include "runtime/cuda/rank.h"
#include "runtime/ops.h"
#include "runtime/ops/arange.h"
#include "runtime/ops/dropout.h"
#include "runtime/ops/full.h"
#include "runtime/ops/random.h"
#include "runtime/random.h"

namespace sherd::cuda {
namespace {

/// The bytes of `value` as one element.
std::uint64_t bits_of(Number value, DType dtype) {
  std::uint64_t bits = 0;
  with_element(dtype, [&]<class T>() {
    const T element = value.element<T>();
    std::memcpy(&bits, &element, sizeof element);
  });
  return bits;
}

void fill(std::string_view op, const Tensor& x, Number value) {
  if (x.numel() == 0) return;
  Tensor out = x;
  launch_fill(operands_of({}, Outputs(&out, 1)), bits_of(value, x.dtype()));
  check_launch(op);
}

void full_kernel(const void* op, Inputs, Outputs out) {
  fill(ops::Full::name, out[0], static_cast<const ops::Full*>(op)->value);
}
void fill_kernel(const void* op, Inputs in, Outputs) {
  fill(ops::Fill::name, in[0], static_cast<const ops::Fill*>(op)->value);
}

void arange_kernel(const void* erased, Inputs, Outputs out) {
  const auto& op = *static_cast<const ops::Arange*>(erased);
  if (out[0].numel() == 0) return;
  launch_arange(out[0].dtype(), op.start, op.step, out[0].raw(), out[0].numel(), stream_of(out[0].device()));
  check_launch(op.name);
}

/// Random kernels make numbers of `made_as`; other dtypes convert from them, as on the CPU.
template <class Launch>
void make_then_cast(std::string_view op, const Tensor& out, DType made_as, Launch&& launch) {
  if (out.numel() == 0) return;
  const Tensor made = out.dtype() == made_as ? out : empty(out.shape(), {made_as, out.device()});
  launch(made.raw(), stream_of(out.device()));
  check_launch(op);
  if (!made.is(out)) copy_(alias(out, out.layout()), made);
}

void uniform_kernel(const void* erased, Inputs, Outputs out) {
  const auto& op = *static_cast<const ops::Uniform*>(erased);
  if (out[0].dtype() == DType::f64)
    return make_then_cast(op.name, out[0], DType::f64, [&](std::byte* y, cudaStream_t stream) {
      launch_uniform(device_key(op.key), uniform_range_f64(op.low, op.high), reinterpret_cast<double*>(y),
                     out[0].numel(), stream);
    });
  const DType dtype = out[0].dtype();
  const UniformRange range = uniform_range(dtype, op.low, op.high);
  make_then_cast(op.name, out[0], dtype, [&](std::byte* y, cudaStream_t stream) {
    launch_uniform(device_key(op.key), range, dtype, y, out[0].numel(), stream);
  });
}

void normal_kernel(const void* erased, Inputs, Outputs out) {
  const auto& op = *static_cast<const ops::Normal*>(erased);
  const DType dtype = out[0].dtype() == DType::f64 ? DType::f32 : out[0].dtype();
  make_then_cast(op.name, out[0], dtype, [&](std::byte* y, cudaStream_t stream) {
    launch_normal(device_key(op.key), static_cast<float>(op.mean), static_cast<float>(op.stddev), dtype, y,
                  out[0].numel(), stream);
  });
}

void integer_kernel(const void* erased, Inputs, Outputs out) {
  const auto& op = *static_cast<const ops::RandomInteger*>(erased);
  const std::uint64_t range = static_cast<std::uint64_t>(op.high) - static_cast<std::uint64_t>(op.low);
  make_then_cast(op.name, out[0], DType::i64, [&](std::byte* y, cudaStream_t stream) {
    launch_integers(device_key(op.key), op.low, range, reinterpret_cast<std::int64_t*>(y), out[0].numel(),
                    stream);
  });
}

void random_order_kernel(const void* erased, Inputs in, Outputs out) {
  const auto& op = *static_cast<const ops::RandomOrder*>(erased);
  RandomOrderCall call{device_key(op.key), out[0].numel(), reinterpret_cast<std::int64_t*>(out[0].raw())};
  if (call.n == 0) return;
  if (call.n > RandomOrderCall::most) return sherd::detail::adopt_reference(op.name, op.reference(in), out);
  const Tensor scratch = empty(Shape{call.scratch_bytes()}, {DType::u8, out[0].device()});
  call.scratch = scratch.raw();
  call.stream = stream_of(out[0].device());
  launch_random_order(call);
  check_launch(op.name);
}

void bernoulli_kernel(const void* erased, Inputs in, Outputs out) {
  const auto& op = *static_cast<const ops::Bernoulli*>(erased);
  const Tensor& p = in[0];
  if (p.numel() == 0) return;
  if (p.dtype() == DType::f64) return sherd::detail::adopt_reference(op.name, op.reference(in), out);
  launch_bernoulli(p.dtype(), device_key(op.key), uniform_range(DType::f32, 0, 1), p.raw(), out[0].raw(),
                   p.numel(), stream_of(p.device()));
  check_launch(op.name);
}

void dropout_kernel(const void* erased, Inputs in, Outputs out) {
  const auto& op = *static_cast<const ops::Dropout*>(erased);
  if (out[0].numel() == 0) return;
  const Tensor x = contiguous(in[0]);
  launch_dropout(x.dtype(), device_key(op.key), drop_threshold(op.p), op.p < 1 ? 1 / (1 - op.p) : 0, x.raw(),
                 out[0].raw(), x.numel(), stream_of(x.device()));
  check_launch(op.name);
}

}  // namespace

void add_creation() {
  kernel_row<ops::Full>().set(DeviceType::cuda, full_kernel);
  kernel_row<ops::Fill>().set(DeviceType::cuda, fill_kernel);
  kernel_row<ops::Arange>().set(DeviceType::cuda, arange_kernel);
  kernel_row<ops::Uniform>().set(DeviceType::cuda, uniform_kernel);
  kernel_row<ops::Normal>().set(DeviceType::cuda, normal_kernel);
  kernel_row<ops::RandomInteger>().set(DeviceType::cuda, integer_kernel);
  kernel_row<ops::RandomOrder>().set(DeviceType::cuda, random_order_kernel);
  kernel_row<ops::Bernoulli>().set(DeviceType::cuda, bernoulli_kernel);
  kernel_row<ops::Dropout>().set(DeviceType::cuda, dropout_kernel);
}

}  // namespace sherd::cuda
