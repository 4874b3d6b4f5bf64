// Products of matrices and linear layers.
#include <algorithm>
#include <bit>

#include "runtime/cuda/check.h"
#include "runtime/cuda/kernels.h"
#include "runtime/cuda/product.h"
#include "runtime/cuda/rank.h"
#include "runtime/cuda/small_product.h"
#include "runtime/cuda/tf32.h"
#include "runtime/ops.h"
#include "runtime/ops/arithmetic.h"
#include "runtime/ops/linear.h"
#include "runtime/ops/matmul.h"
#include "runtime/ops/view_as.h"

namespace sherd::cuda {
namespace {

/// The largest power of two, up to 256, that divides an address.
std::uint32_t alignment_of(const void* address) {
  const auto bits = reinterpret_cast<std::uintptr_t>(address) | 256;
  return std::uint32_t{1} << std::countr_zero(bits);
}

const std::byte* bytes(const void* at) { return static_cast<const std::byte*>(at); }
std::byte* bytes(void* at) { return static_cast<std::byte*>(at); }

/// The library counts the matrices of a batch in 32 bits, and a grid's last axis in 16: more are taken in
/// portions of this many, which leaves every portion's addresses as aligned as the whole's.
constexpr std::int64_t most_matrices = std::int64_t{1} << 15;

}  // namespace

Tensor dense_addend(const Tensor& t) {
  if (!t.defined()) return {};
  return t.is_contiguous() && alignment_of(t.raw()) >= 16 ? t : clone(t);
}

SmallFactors small_factors(const Factors& f) {
  const auto& [s, a, b, add] = f;
  return {s.m,
          s.n,
          s.k,
          a.transposed,
          b.transposed,
          a.ld,
          b.ld,
          a.batch_step,
          b.batch_step,
          a.data,
          b.data,
          raw_or_null(add.bias),
          raw_or_null(add.residual)};
}

namespace {

/// `factors.shape` with all that decides which algorithm is right.
ProductShape whole_shape(const Factors& factors, const Tensor& c) {
  const auto& [shape, a, b, add] = factors;
  ProductShape s = shape;
  s.dtype = c.dtype();
  s.tf32 = takes_tf32(s.dtype);
  s.transpose_a = a.transposed;
  s.transpose_b = b.transposed;
  s.lda = a.ld;
  s.ldb = b.ld;
  s.stride_a = a.batch_step;
  s.stride_b = b.batch_step;
  s.align_a = alignment_of(a.data);
  s.align_b = alignment_of(b.data);
  s.align_c = alignment_of(c.raw());
  // The library adds no bias to f64.
  s.bias = add.bias.defined() && s.dtype != DType::f64;
  s.residual = add.residual.defined() && alignment_of(add.residual.raw()) >= s.align_c;
  return s;
}

/// Where the matrices lie from the `first` of a batch on.
ProductData data_from(std::int64_t first, const ProductShape& s, const Factors& factors, const Tensor& c) {
  const auto from = [&](auto* data, std::int64_t step) {
    return data != nullptr ? data + first * step * size_of(s.dtype) : nullptr;
  };
  const auto& [shape, a, b, add] = factors;
  const std::int64_t step = s.m * s.n;
  return {from(bytes(a.data), s.stride_a), from(bytes(b.data), s.stride_b), s.bias ? add.bias.raw() : nullptr,
          s.residual ? from(bytes(add.residual.raw()), step) : nullptr, from(bytes(c.raw()), step)};
}

}  // namespace

void multiply(const Factors& factors, const Tensor& c) {
  const Addends& add = factors.add;
  ProductShape s = factors.shape;
  DeviceState& state = state_of(c.device());
  if (SmallProduct::fits(c.dtype(), s.m, s.n, s.k, s.batch)) {
    launch_small_product({c.dtype(), small_factors(factors), s.batch, c.raw(), state.stream()});
    return check_launch("matmul");
  }
  if (s.k == 0) {
    check_cuda(cudaMemsetAsync(c.raw(), 0, static_cast<std::size_t>(c.spec().bytes()), state.stream()),
               "matmul");
  } else {
    s = whole_shape(factors, c);
    const std::int64_t batch = s.batch;
    for (std::int64_t first = 0; first < batch; first += most_matrices) {
      s.batch = std::min(batch - first, most_matrices);
      state.matmul_plans().run(s, data_from(first, s, factors, c), state.stream());
    }
  }
  if (add.bias.defined() && !s.bias) add_(alias(c, c.layout()), add.bias);
  if (add.residual.defined() && !s.residual) add_(alias(c, c.layout()), add.residual);
}

bool multiply_with_relu(const Factors& factors, const Tensor& c) {
  ProductShape s = factors.shape;
  if (SmallProduct::fits(c.dtype(), s.m, s.n, s.k, s.batch) || s.k == 0 || s.batch > most_matrices)
    return false;
  s = whole_shape(factors, c);
  if (s.bias != factors.add.bias.defined() || s.residual != factors.add.residual.defined()) return false;
  s.relu = true;
  DeviceState& state = state_of(c.device());
  return state.matmul_plans().run_with_relu(s, data_from(0, s, factors, c), state.stream());
}

namespace {

Factors factors_of(const ops::MatMul& op, Inputs in, const Shape& result) {
  const int r = result.rank();
  ProductShape s;
  s.m = result[r - 2];
  s.n = result[r - 1];
  s.k = in[0].shape()[op.transpose_a ? r - 2 : r - 1];
  s.batch = result.numel() / (s.m * s.n);
  return {s, ops::matrix_operand(in[0], op.transpose_a), ops::matrix_operand(in[1], op.transpose_b)};
}

Factors factors_of(const ops::Linear&, Inputs in, const Shape& result) {
  const Tensor& w = in[1];
  ProductShape s;
  s.n = w.shape()[0];
  s.k = w.shape()[1];
  s.m = result.numel() / s.n;
  return {s,
          ops::rows_operand(in[0], s.m, s.k),
          ops::matrix_operand(w, true),
          {dense_addend(in[2]), dense_addend(in[3])}};
}

void matmul_kernel(const void* erased, Inputs in, Outputs out) {
  const auto& op = *static_cast<const ops::MatMul*>(erased);
  const Tensor& c = out[0];
  check<DTypeError>(
      is_floating(c.dtype()),
      "matmul: {} are multiplied on the CPU alone, got operands on {}; move them there or cast them to "
      "floats",
      name_of(c.dtype()), to_string(c.device()));
  if (c.numel() > 0) multiply(factors_of(op, in, c.shape()), c);
}

void linear_kernel(const void* erased, Inputs in, Outputs out) {
  const Tensor& y = out[0];
  if (y.numel() > 0) multiply(factors_of(*static_cast<const ops::Linear*>(erased), in, y.shape()), y);
}

}  // namespace

Factors factors_of(const AnyOp& op, Inputs in, const Shape& result) {
  if (&op.kernels() == &kernel_row<ops::MatMul>())
    return factors_of(*static_cast<const ops::MatMul*>(op.value()), in, result);
  check<InternalError>(&op.kernels() == &kernel_row<ops::Linear>(), "{}: is no product", op.name());
  return factors_of(*static_cast<const ops::Linear*>(op.value()), in, result);
}

void add_matmul() {
  kernel_row<ops::MatMul>().set(DeviceType::cuda, matmul_kernel);
  kernel_row<ops::Linear>().set(DeviceType::cuda, linear_kernel);
}

}  // namespace sherd::cuda
