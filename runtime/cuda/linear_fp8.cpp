// Linear layers in 8 bits.
#include "runtime/ops/linear_fp8.h"

#include "runtime/apply.h"
#include "runtime/cuda/check.h"
#include "runtime/cuda/fp8.h"
#include "runtime/cuda/matmul_plans.h"
#include "runtime/cuda/rank.h"
#include "runtime/ops.h"
#include "runtime/ops/optimizer_steps.h"

namespace sherd::cuda {
namespace {

using ops::Eight;

/// Products of 8-bit numbers came with this generation of GPUs (Ada).
bool multiplies_eights(Device device) {
  int major = 0, minor = 0;
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.index), "linear_fp8");
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device.index), "linear_fp8");
  return 10 * major + minor >= 89;
}

/// Whether the library has products of these: x (..., in) of 16 bits and weight (out, in).
bool fits(const Tensor& x, const Tensor& weight) {
  const std::int64_t out = weight.shape()[0], in = weight.shape()[1];
  if (size_of(x.dtype()) != 2 || x.numel() == 0 || weight.numel() == 0) return false;
  return x.numel() / in % 16 == 0 && in % 16 == 0 && out % 16 == 0 && multiplies_eights(x.device());
}

/// As kernels and library read it, 16 bytes at a time.
Tensor aligned(const Tensor& t) {
  return !t.defined() || reinterpret_cast<std::uintptr_t>(t.raw()) % 16 == 0 ? t : clone(t);
}

/// A matrix in 8 bits, as it lies and turned; empty where it was not asked for.
struct Rounded {
  Eight format;
  Tensor as_is, turned, unscale;
};
enum class Lie { as_is, turned, both };

Rounded round(const Tensor& given, std::int64_t columns, const Tensor& largest, Eight format, Lie lie) {
  const Tensor x = aligned(given);
  const std::int64_t rows = x.numel() / columns;
  const auto room = [&](std::int64_t m, std::int64_t n) { return empty({m, n}, {DType::u8, x.device()}); };
  Rounded made{format, {}, {}, empty({}, {DType::f32, x.device()})};
  if (lie != Lie::turned) made.as_is = room(rows, columns);
  if (lie != Lie::as_is) made.turned = room(columns, rows);
  RoundToEight call;
  call.dtype = x.dtype();
  call.fine = format == Eight::e4m3;
  call.rows = rows;
  call.columns = columns;
  call.top = ops::largest_of(format);
  call.x = x.raw();
  call.largest = largest.data<double>();
  call.as_is = made.as_is.defined() ? made.as_is.raw() : nullptr;
  call.transposed = made.turned.defined() ? made.turned.raw() : nullptr;
  call.unscale = reinterpret_cast<float*>(made.unscale.raw());
  call.stream = stream_of(x.device());
  launch_round_to_eight(call);
  check_launch("linear_fp8");
  return made;
}

EightBits bits_of(Eight format) { return format == Eight::e4m3 ? EightBits::e4m3 : EightBits::e5m2; }

/// c (m, n) = a (m, k) b (n, k)^T + bias.
void multiply(const Rounded& left, const Tensor& a, const Rounded& right, const Tensor& b, const Tensor& bias,
              const Tensor& c) {
  ProductShape s;
  s.dtype = c.dtype();
  s.eight_a = bits_of(left.format);
  s.eight_b = bits_of(right.format);
  s.transpose_b = true;
  s.bias = bias.defined();
  s.m = a.shape()[0];
  s.n = b.shape()[0];
  s.k = a.shape()[1];
  s.lda = s.ldb = s.k;
  s.align_c = 16;  // of every product, whatever the address; blocks of the pool have more
  DeviceState& state = state_of(c.device());
  state.matmul_plans().run(s,
                           {a.raw(), b.raw(), s.bias ? bias.raw() : nullptr, nullptr, c.raw(),
                            left.unscale.data<float>(), right.unscale.data<float>()},
                           state.stream());
}

void largest_into(const Tensor& x, Tensor& largest) {
  run_again(OpModel<ops::LargestMagnitude>(ops::LargestMagnitude{}), Inputs(&x, 1), Outputs(&largest, 1));
}

void linear_fp8(const ops::LinearFp8& op, Inputs in, Outputs out) {
  const Tensor &x = in[0], &weight = in[1], &bias = in[2];
  if (!fits(x, weight)) return sherd::detail::adopt_reference(op.name, op.reference(in), out);
  largest_into(x, out[1]);
  largest_into(weight, out[2]);
  const std::int64_t k = weight.shape()[1];
  const Rounded a = round(x, k, out[1], Eight::e4m3, Lie::as_is),
                b = round(weight, k, out[2], Eight::e4m3, Lie::as_is);
  multiply(a, a.as_is, b, b.as_is, aligned(bias), out[0]);
}

void linear_fp8_grad(const ops::LinearFp8Grad& op, Inputs in, Outputs out) {
  const Tensor &gy = in[0], &x = in[1], &weight = in[2];
  if (!fits(x, weight)) return sherd::detail::adopt_reference(op.name, op.reference(in), out);
  const std::int64_t k = weight.shape()[1];
  Tensor largest = empty({}, {DType::f64, x.device()});
  largest_into(gy, largest);
  const Rounded g = round(gy, weight.shape()[0], largest, Eight::e5m2, Lie::both),
                a = round(x, k, in[3], Eight::e4m3, Lie::turned),
                b = round(weight, k, in[4], Eight::e4m3, Lie::turned);
  multiply(g, g.as_is, b, b.turned, {}, out[0]);
  multiply(g, g.turned, a, a.turned, {}, out[1]);
}

}  // namespace

void add_linear_fp8() {
  add_kernel<linear_fp8>(DeviceType::cuda);
  add_kernel<linear_fp8_grad>(DeviceType::cuda);
}

}  // namespace sherd::cuda
