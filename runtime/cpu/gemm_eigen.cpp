#if !defined(__clang__)
// g++ 12 warns about its own AVX-512 headers once Eigen inlines them.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#define EIGEN_DONT_PARALLELIZE
#define EIGEN_MPL2_ONLY
#include <Eigen/Core>
#include <new>

#include "runtime/cpu/gemm_tile.h"

namespace sherd::cpu {
namespace {

template <class T>
using Matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <class T>
using In = Eigen::Map<const Matrix<T>, 0, Eigen::OuterStride<>>;
template <class T>
using Out = Eigen::Map<Matrix<T>, 0, Eigen::OuterStride<>>;

template <class T, class A>
void multiply(const Gemm<T>& g, const A& a) {
  Out<T> c(g.c, g.m, g.n, Eigen::OuterStride<>(g.ldc));
  if (!g.accumulate) c.setZero();
  if (g.transpose_b) {
    c.noalias() += a * In<T>(g.b, g.n, g.k, Eigen::OuterStride<>(g.ldb)).transpose();
  } else {
    c.noalias() += a * In<T>(g.b, g.k, g.n, Eigen::OuterStride<>(g.ldb));
  }
}

template <class T>
bool tile(const Gemm<T>& g) noexcept {
  try {
    if (g.transpose_a) {
      multiply(g, In<T>(g.a, g.k, g.m, Eigen::OuterStride<>(g.lda)).transpose());
    } else {
      multiply(g, In<T>(g.a, g.m, g.k, Eigen::OuterStride<>(g.lda)));
    }
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

}  // namespace

bool gemm_tile_eigen(const Gemm<float>& g) noexcept { return tile(g); }
bool gemm_tile_eigen(const Gemm<double>& g) noexcept { return tile(g); }

}  // namespace sherd::cpu
