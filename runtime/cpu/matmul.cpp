// Products of matrices and linear layers, as calls of the matrix library.
#include "runtime/ops/matmul.h"

#include <algorithm>
#include <type_traits>

#include "runtime/cpu/gemm.h"
#include "runtime/cpu/scratch.h"
#include "runtime/cpu/simd.h"
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

// ---- integers: sums wrap around, so the order of terms is free ----

constexpr std::int64_t rows_per_tile = 64, rows_per_block = 4;

/// How one operand lies.
template <class T>
struct Lain {
  const T* at;
  std::int64_t down, across;
};

/// A product of integers of up to 32 bits is summed in 32, else in 64.
template <class T>
using IntegerSum = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;
template <class T>
inline constexpr std::int64_t panel_width = 2 * lanes<IntegerSum<T>>;

/// The first `columns` columns of B's `k` rows as vectors, two a row, zeros beyond.
template <class T>
void pack_panel(Lain<T> b, std::int64_t k, std::int64_t columns, IntegerSum<T>* panel) {
  for (std::int64_t p = 0; p < k; ++p)
    for (std::int64_t j = 0; j < panel_width<T>; ++j)
      panel[p * panel_width<T> + j] =
          j < columns ? static_cast<IntegerSum<T>>(b.at[p * b.down + j * b.across]) : IntegerSum<T>(0);
}

/// `rows` rows of A, a block's at most, times a panel: c (rows, columns).
template <class T>
void multiply_panel(Lain<T> a, std::int64_t rows, std::int64_t k, const Vec<IntegerSum<T>>* panel,
                    std::int64_t columns, T* c, std::int64_t ldc) {
  const T* row[rows_per_block];
  for (std::int64_t r = 0; r < rows_per_block; ++r) row[r] = a.at + std::min(r, rows - 1) * a.down;
  Vec<IntegerSum<T>> sums[rows_per_block][2] = {};
  for (std::int64_t p = 0; p < k; ++p)
#pragma GCC unroll 4
    for (std::int64_t r = 0; r < rows_per_block; ++r) {
      const auto factor = static_cast<IntegerSum<T>>(row[r][p * a.across]);
      sums[r][0] += factor * panel[2 * p];
      sums[r][1] += factor * panel[2 * p + 1];
    }
  constexpr std::int64_t half = panel_width<T> / 2;
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t j = 0; j < columns; ++j) c[r * ldc + j] = static_cast<T>(sums[r][j / half][j % half]);
}

template <class T>
void integer_product(const Gemm<T>& g) {
  const Lain<T> a{g.a, g.transpose_a ? 1 : g.lda, g.transpose_a ? g.lda : 1};
  const Lain<T> b{g.b, g.transpose_b ? 1 : g.ldb, g.transpose_b ? g.ldb : 1};
  const std::int64_t tiles = (g.m + rows_per_tile - 1) / rows_per_tile;
  const double work = static_cast<double>(std::min(g.m, rows_per_tile)) * static_cast<double>(g.n) *
                      static_cast<double>(std::max<std::int64_t>(g.k, 1));
  const auto grain = static_cast<std::int64_t>(std::max(1.0, 65536 / work));
  parallel_for(g.batch * tiles, grain, [&](std::int64_t begin, std::int64_t end) {
    const auto panel = scratch<Vec<IntegerSum<T>>>(2 * g.k);
    check<OutOfMemoryError>(panel != nullptr, "matmul: no memory for {} rows of integers", g.k);
    for (std::int64_t tile = begin; tile < end; ++tile) {
      const std::int64_t matrix = tile / tiles, first = tile % tiles * rows_per_tile;
      const std::int64_t last = std::min(g.m, first + rows_per_tile);
      const T *rows = g.a + matrix * g.stride_a, *columns = g.b + matrix * g.stride_b;
      for (std::int64_t j = 0; j < g.n; j += panel_width<T>) {
        const std::int64_t width = std::min(panel_width<T>, g.n - j);
        pack_panel<T>({columns + j * b.across, b.down, b.across}, g.k, width,
                      reinterpret_cast<IntegerSum<T>*>(panel.get()));
        for (std::int64_t i = first; i < last; i += rows_per_block)
          multiply_panel<T>({rows + i * a.down, a.down, a.across}, std::min(rows_per_block, last - i), g.k,
                            panel.get(), width, g.c + matrix * g.stride_c + i * g.ldc + j, g.ldc);
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
  with_floating("linear", y.dtype(), [&]<class T>() {
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
