// Linear layers in 8 bits.
#include "runtime/ops/linear_fp8.h"

#include <algorithm>

#include "runtime/apply.h"
#include "runtime/cuda/check.h"
#include "runtime/cuda/fp8.h"
#include "runtime/cuda/matmul_plans.h"
#include "runtime/cuda/rank.h"
#include "runtime/ops.h"
#include "runtime/ops/order_free_norm.h"

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

/// The product c (m, n) = a (m, k) b (n, k)^T.
struct ProductSizes {
  std::int64_t m, n, k;
};
ProductShape eight_product(DType dtype, ProductSizes sizes, Eight left, Eight right) {
  const auto bits_of = [](Eight format) { return format == Eight::e4m3 ? EightBits::e4m3 : EightBits::e5m2; };
  ProductShape s;
  s.dtype = dtype;
  s.eight_a = bits_of(left);
  s.eight_b = bits_of(right);
  s.transpose_b = true;
  s.m = sizes.m;
  s.n = sizes.n;
  s.k = s.lda = s.ldb = sizes.k;
  s.align_c = 16;  // of every product, whatever the address; blocks of the pool have more
  return s;
}

/// Whether the library, which scales rows on some GPUs only, has these products.
bool scales_rows(const Tensor& x, std::initializer_list<ProductSizes> products) {
  MatMulPlans& plans = state_of(x.device()).matmul_plans();
  return std::ranges::all_of(products, [&](const ProductSizes& sizes) {
    ProductShape s = eight_product(x.dtype(), sizes, Eight::e4m3, Eight::e4m3);
    s.row_scales = true;
    return plans.has(s);
  });
}

/// Whether there are products of these: x (..., in) of 16 bits and weight (out, in).
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

/// What the numbers are scaled by: the largest magnitude of all, given, or those of rows or of columns.
struct Scaling {
  enum Of { tensor, rows, columns } of;
  const double* largest = nullptr;
};

Rounded round(const Tensor& given, std::int64_t columns, Scaling by, Eight format, Lie lie) {
  const Tensor x = aligned(given);
  const std::int64_t rows = x.numel() / columns;
  const auto room = [&](std::int64_t m, std::int64_t n) { return empty({m, n}, {DType::u8, x.device()}); };
  const Shape numbers = by.of == Scaling::tensor ? Shape{} : Shape{by.of == Scaling::rows ? rows : columns};
  Rounded made{format, {}, {}, empty(numbers, {DType::f32, x.device()})};
  Tensor scale;
  if (by.of != Scaling::tensor) {
    scale = empty(numbers, {DType::f32, x.device()});
    ScalesCall scales;
    scales.dtype = x.dtype();
    scales.rows = rows;
    scales.columns = columns;
    scales.of_columns = by.of == Scaling::columns;
    scales.top = ops::largest_of(format);
    scales.x = x.raw();
    scales.scale = reinterpret_cast<float*>(scale.raw());
    scales.unscale = reinterpret_cast<float*>(made.unscale.raw());
    scales.stream = stream_of(x.device());
    launch_scales(scales);
  }
  if (lie != Lie::turned) made.as_is = room(rows, columns);
  if (lie != Lie::as_is) made.turned = room(columns, rows);
  RoundToEight call;
  call.dtype = x.dtype();
  call.fine = format == Eight::e4m3;
  call.rows = rows;
  call.columns = columns;
  call.top = ops::largest_of(format);
  call.x = x.raw();
  call.largest = by.largest;
  if (by.of != Scaling::tensor)
    (by.of == Scaling::rows ? call.row_scale : call.column_scale) = scale.data<float>();
  call.as_is = raw_or_null(made.as_is);
  call.transposed = raw_or_null(made.turned);
  call.unscale = reinterpret_cast<float*>(made.unscale.raw());
  call.stream = stream_of(x.device());
  launch_round_to_eight(call);
  check_launch("linear_fp8");
  return made;
}

/// c (m, n) = a (m, k) b (n, k)^T + bias.
void multiply(const Rounded& left, const Tensor& a, const Rounded& right, const Tensor& b, const Tensor& bias,
              const Tensor& c) {
  ProductShape s =
      eight_product(c.dtype(), {a.shape()[0], b.shape()[0], a.shape()[1]}, left.format, right.format);
  s.row_scales = left.unscale.rank() > 0;
  s.bias = bias.defined() && !s.row_scales;  // it is not said that the library adds one to those
  DeviceState& state = state_of(c.device());
  state.matmul_plans().run(s,
                           {a.raw(), b.raw(), s.bias ? bias.raw() : nullptr, nullptr, c.raw(),
                            left.unscale.data<float>(), right.unscale.data<float>()},
                           state.stream());
  if (bias.defined() && !s.bias) add_(alias(c, c.layout()), bias);
}

void largest_into(const Tensor& x, Tensor& largest) {
  run_again(OpModel<ops::LargestMagnitude>(ops::LargestMagnitude{}), Inputs(&x, 1), Outputs(&largest, 1));
}

void linear_fp8(const ops::LinearFp8& op, Inputs in, Outputs out) {
  const Tensor &x = in[0], &weight = in[1], &bias = in[2];
  const std::int64_t n = weight.shape()[0], k = weight.shape()[1];
  if (!fits(x, weight) || (op.by_rows && !scales_rows(x, {{x.numel() / k, n, k}})))
    return sherd::detail::adopt_reference(op.name, op.reference(in), out);
  Scaling of_x{Scaling::rows}, of_weight{Scaling::rows};
  if (!op.by_rows) {
    largest_into(x, out[1]);
    largest_into(weight, out[2]);
    of_x = {Scaling::tensor, out[1].data<double>()};
    of_weight = {Scaling::tensor, out[2].data<double>()};
  }
  const Rounded a = round(x, k, of_x, Eight::e4m3, Lie::as_is),
                b = round(weight, k, of_weight, Eight::e4m3, Lie::as_is);
  multiply(a, a.as_is, b, b.as_is, aligned(bias), out[0]);
}

void linear_fp8_grad(const ops::LinearFp8Grad& op, Inputs in, Outputs out) {
  const Tensor &gy = in[0], &x = in[1], &weight = in[2];
  const std::int64_t n = weight.shape()[0], k = weight.shape()[1];
  const auto fits_by_rows = [&] {
    const std::int64_t rows = x.numel() / k;
    return scales_rows(x, {{rows, k, n}, {n, k, rows}});
  };
  if (!fits(x, weight) || (op.by_rows && !fits_by_rows()))
    return sherd::detail::adopt_reference(op.name, op.reference(in), out);
  if (op.by_rows) {
    const auto turned = [](const Tensor& t, std::int64_t columns) {
      return round(t, columns, {Scaling::columns}, Eight::e4m3, Lie::turned);
    };
    const Rounded of_rows = round(gy, n, {Scaling::rows}, Eight::e4m3, Lie::as_is),
                  of_columns = turned(gy, n), a = turned(x, k), b = turned(weight, k);
    multiply(of_rows, of_rows.as_is, b, b.turned, {}, out[0]);
    multiply(of_columns, of_columns.turned, a, a.turned, {}, out[1]);
    return;
  }
  Tensor largest = empty({}, {DType::f64, x.device()});
  largest_into(gy, largest);
  const auto of = [](const Tensor& t) { return Scaling{Scaling::tensor, t.data<double>()}; };
  const Rounded g = round(gy, n, of(largest), Eight::e5m2, Lie::both),
                a = round(x, k, of(in[3]), Eight::e4m3, Lie::turned),
                b = round(weight, k, of(in[4]), Eight::e4m3, Lie::turned);
  multiply(g, g.as_is, b, b.turned, {}, out[0]);
  multiply(g, g.turned, a, a.turned, {}, out[1]);
}

}  // namespace

void add_linear_fp8() {
  add_kernel<linear_fp8>(DeviceType::cuda);
  add_kernel<linear_fp8_grad>(DeviceType::cuda);
}

}  // namespace sherd::cuda
