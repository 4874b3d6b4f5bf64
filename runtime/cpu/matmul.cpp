// Products of matrices and linear layers, as calls of the matrix library.
#include "runtime/ops/matmul.h"

#include <algorithm>
#include <type_traits>

#include "runtime/cpu/gemm.h"
#include "runtime/ops.h"
#include "runtime/ops/linear.h"
#include "runtime/ops/matrix_operand.h"
#include "runtime/parallel.h"

namespace sherd::cpu {
namespace {

template <class T>
Gemm<T> gemm_of(const ops::MatrixOperand& a, const ops::MatrixOperand& b, const Tensor& c) {
  Gemm<T> g;
  g.a = reinterpret_cast<const T*>(a.data);
  g.lda = a.ld;
  g.transpose_a = a.transposed;
  g.b = reinterpret_cast<const T*>(b.data);
  g.ldb = b.ld;
  g.transpose_b = b.transposed;
  g.c = reinterpret_cast<T*>(c.raw());
  return g;
}

/// The same of integers, with sums that wrap around.
template <class T>
void integer_product(const Gemm<T>& g) {
  using U = std::make_unsigned_t<T>;
  const std::int64_t a_down = g.transpose_a ? 1 : g.lda, a_across = g.transpose_a ? g.lda : 1;
  const std::int64_t b_down = g.transpose_b ? 1 : g.ldb, b_across = g.transpose_b ? g.ldb : 1;
  const std::int64_t rows_per_tile = std::max<std::int64_t>(1, 65536 / std::max<std::int64_t>(1, g.n * g.k));
  parallel_for(g.batch * g.m, rows_per_tile, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const std::int64_t matrix = row / g.m;
      const T* a = g.a + matrix * g.stride_a + row % g.m * a_down;
      const T* b = g.b + matrix * g.stride_b;
      U* c = reinterpret_cast<U*>(g.c + matrix * g.stride_c + row % g.m * g.ldc);
      std::fill_n(c, g.n, U(0));
      for (std::int64_t p = 0; p < g.k; ++p) {
        const auto factor = static_cast<std::uint64_t>(a[p * a_across]);
        for (std::int64_t j = 0; j < g.n; ++j)
          c[j] = static_cast<U>(c[j] + factor * static_cast<std::uint64_t>(b[p * b_down + j * b_across]));
      }
    }
  });
}

void matmul(const ops::MatMul& op, Inputs in, Outputs out) {
  const ops::MatrixOperand a = ops::matrix_operand(in[0], op.transpose_a),
                           b = ops::matrix_operand(in[1], op.transpose_b);
  const Tensor& c = out[0];
  if (c.numel() == 0) return;
  const int r = c.rank();
  with_element<number_dtypes>(c.dtype(), [&]<class T>() {
    auto g = gemm_of<T>(a, b, c);
    g.m = c.shape()[r - 2];
    g.n = c.shape()[r - 1];
    g.k = in[0].shape()[op.transpose_a ? r - 2 : r - 1];
    g.ldc = g.n;
    g.batch = c.numel() / (g.m * g.n);
    g.stride_a = a.batch_step;
    g.stride_b = b.batch_step;
    g.stride_c = g.m * g.n;
    if constexpr (std::is_integral_v<T>)
      integer_product(g);
    else
      gemm(g);
  });
}

void linear(const ops::Linear&, Inputs in, Outputs out) {
  const Tensor &w = in[1], &y = out[0];
  if (y.numel() == 0) return;
  const std::int64_t n = w.shape()[0], k = w.shape()[1], m = y.numel() / n;
  const ops::MatrixOperand a = ops::rows_operand(in[0], m, k), b = ops::matrix_operand(w, true);
  const Tensor& bias = in[2];
  dispatch_floating("linear", y.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    auto g = gemm_of<T>(a, b, y);
    g.m = m;
    g.n = n;
    g.k = k;
    g.ldc = n;
    if (bias.defined()) g.bias = bias.data<T>();
    gemm(g);
  });
  if (in[3].defined()) add_(alias(y, y.layout()), in[3]);
}

}  // namespace

void add_matmul() {
  add_kernel<matmul>(DeviceType::cpu);
  add_kernel<linear>(DeviceType::cpu);
}

}  // namespace sherd::cpu
