#include "runtime/cpu/gemm_repeated.h"

#include <algorithm>
#include <atomic>

#include "runtime/cpu/gemm_tile.h"
#include "runtime/error.h"
#include "runtime/parallel.h"

namespace sherd::cpu {
namespace {

/// Its columns side by side, which products of several rows read faster.
template <class T>
void transpose_b(const Gemm<T>& g, T* columns) {
  constexpr std::int64_t block = 16;
  for (std::int64_t j = 0; j < g.n; j += block)
    for (std::int64_t p = 0; p < g.k; ++p)
      for (std::int64_t i = j; i < std::min(j + block, g.n); ++i) columns[p * g.n + i] = g.b[i * g.ldb + p];
}

}  // namespace

template <class T>
RepeatedGemm<T>::RepeatedGemm(const Gemm<T>& g) : g_(g) {
  if (g.m == 0 || g.n == 0 || g.k == 0) return;
  if constexpr (has_onednn && std::is_same_v<T, BFloat16>) packed_ = PackedB::of(g);
  constexpr std::int64_t several = 8;
  if (packed_ || !g.transpose_b || g.m < several) return;
  columns_ = scratch<T>(g.n * g.k);
  check<OutOfMemoryError>(columns_ != nullptr, "gemm: no memory for {} numbers of working space", g.n * g.k);
  transpose_b(g, columns_.get());
  g_.b = columns_.get(), g_.ldb = g.n, g_.transpose_b = false;
}

template <class T>
void RepeatedGemm<T>::operator()(const T* a, T* c) const {
  if constexpr (has_onednn && std::is_same_v<T, BFloat16>)
    if (packed_) {
      std::atomic<bool> ok{true};
      parallel_for(packed_->parts(), 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t part = begin; part < end; ++part)
          if (!packed_->multiply(part, a, c)) ok.store(false, std::memory_order_relaxed);
      });
      return check<InternalError>(ok, "gemm: the matrix library failed, most likely for lack of memory");
    }
  Gemm<T> g = g_;
  g.a = a, g.c = c;
  gemm(g);
}

template class RepeatedGemm<double>;
template class RepeatedGemm<float>;
template class RepeatedGemm<Half>;
template class RepeatedGemm<BFloat16>;

}  // namespace sherd::cpu
