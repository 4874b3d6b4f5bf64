#if defined(SHERD_ONEDNN) && defined(SHERD_OPENMP)

#include <omp.h>
#include <oneapi/dnnl/dnnl.h>
#include <oneapi/dnnl/dnnl.hpp>

#include "runtime/cpu/gemm_tile.h"
#include "runtime/cpu/scratch.h"

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

using dnnl::memory;

memory::desc matrix_of(std::int64_t rows, std::int64_t columns, std::int64_t ld, bool transposed) {
  const memory::dims steps = transposed ? memory::dims{1, ld} : memory::dims{ld, 1};
  return {memory::dims{rows, columns}, memory::data_type::bf16, steps};
}

/// What makes the product of this shape; oneDNN keeps the code of those it has made.
dnnl::matmul::primitive_desc plan(const Gemm<BFloat16>& g, const dnnl::engine& engine) {
  const memory::desc a = matrix_of(g.m, g.k, g.lda, g.transpose_a),
                     b = matrix_of(g.k, g.n, g.ldb, g.transpose_b), c = matrix_of(g.m, g.n, g.ldc, false),
                     bias = matrix_of(1, g.n, g.n, false);
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (g.accumulate) {
    dnnl::post_ops sum;
    sum.append_sum();
    attributes.set_post_ops(sum);
  }
#if DNNL_VERSION_MAJOR >= 3
  if (g.bias) return {engine, a, b, bias, c, attributes};
  return {engine, a, b, c, attributes};
#else
  using Call = dnnl::matmul::desc;
  return {g.bias ? Call(a, b, bias, c) : Call(a, b, c), attributes, engine};
#endif
}

}  // namespace

// Its first call makes code and tables, and throws where there is no memory for them.
bool gemm_tile_onednn(const Gemm<float>& g) noexcept try {
  const OneThread one_thread;
  return dnnl_sgemm(g.transpose_a ? 'T' : 'N', g.transpose_b ? 'T' : 'N', g.m, g.n, g.k, 1.f, g.a, g.lda, g.b,
                    g.ldb, g.accumulate ? 1.f : 0.f, g.c, g.ldc) == dnnl_success;
} catch (...) {
  return false;
}

bool onednn_multiplies_bf16() noexcept try {
  const auto isa = static_cast<unsigned>(dnnl::get_effective_cpu_isa());
  constexpr auto needed = static_cast<unsigned>(dnnl::cpu_isa::avx512_core_bf16);
  return (isa & needed) == needed;
} catch (...) {
  return false;
}

bool gemm_tile_onednn(const Gemm<BFloat16>& g) noexcept try {
  const OneThread one_thread;
  const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  const dnnl::matmul::primitive_desc made = plan(g, engine);
  const auto room = scratch<std::byte>(static_cast<std::int64_t>(made.scratchpad_desc().get_size()));
  if (!room) return false;
  const auto argument = [&](const memory::desc& desc, const void* data) {
    return memory(desc, engine, const_cast<void*>(data));  // oneDNN has no word for memory that is only read
  };
  std::unordered_map<int, memory> arguments{
      {DNNL_ARG_SRC, argument(made.src_desc(), g.a)},
      {DNNL_ARG_WEIGHTS, argument(made.weights_desc(), g.b)},
      {DNNL_ARG_DST, argument(made.dst_desc(), g.c)},
      {DNNL_ARG_SCRATCHPAD, argument(made.scratchpad_desc(), room.get())}};
  if (g.bias) arguments.emplace(DNNL_ARG_BIAS, argument(matrix_of(1, g.n, g.n, false), g.bias));
  dnnl::stream stream(engine);
  dnnl::matmul(made).execute(stream, arguments);
  stream.wait();
  return true;
} catch (...) {
  return false;
}

}  // namespace sherd::cpu

#endif
