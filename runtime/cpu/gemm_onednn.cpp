#if defined(SHERD_ONEDNN) && defined(SHERD_OPENMP)

#include <omp.h>
#include <oneapi/dnnl/dnnl.h>

#include "runtime/cpu/gemm_tile.h"

namespace sherd::cpu {
namespace {

/// oneDNN starts threads of its own (and then changes bits) unless this thread's OpenMP setting forbids it.
class OneThread {
 public:
  OneThread() { omp_set_num_threads(1); }
  ~OneThread() { omp_set_num_threads(before_); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int before_ = omp_get_max_threads();
};

}  // namespace

// Its first call makes code and tables, and throws where there is no memory for them.
bool gemm_tile_onednn(const Gemm<float>& g) noexcept try {
  const OneThread one_thread;
  return dnnl_sgemm(g.transpose_a ? 'T' : 'N', g.transpose_b ? 'T' : 'N', g.m, g.n, g.k, 1.f, g.a, g.lda, g.b,
                    g.ldb, g.accumulate ? 1.f : 0.f, g.c, g.ldc) == dnnl_success;
} catch (...) {
  return false;
}

}  // namespace sherd::cpu

#endif
