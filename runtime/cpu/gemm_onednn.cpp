#if defined(SHERD_ONEDNN) && defined(SHERD_OPENMP)

#include <array>

#include "runtime/cpu/gemm_tile.h"
#include "runtime/cpu/onednn.h"
#include "runtime/cpu/scratch.h"

namespace sherd::cpu {
namespace {

using dnnl::memory;

memory::desc matrix_of(std::int64_t rows, std::int64_t columns, std::int64_t ld, bool transposed) {
  const memory::dims steps = transposed ? memory::dims{1, ld} : memory::dims{ld, 1};
  return {memory::dims{rows, columns}, memory::data_type::bf16, steps};
}

memory::desc row_of(std::int64_t columns) { return matrix_of(1, columns, columns, false); }

dnnl::matmul::primitive_desc product_of(const Gemm<BFloat16>& g) {
  const memory::desc a = matrix_of(g.m, g.k, g.lda, g.transpose_a),
                     b = matrix_of(g.k, g.n, g.ldb, g.transpose_b), c = matrix_of(g.m, g.n, g.ldc, false);
  const dnnl::engine& engine = processor_engine();
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (g.accumulate) {
    dnnl::post_ops sum;
    sum.append_sum();
    attributes.set_post_ops(sum);
  }
#if DNNL_VERSION_MAJOR >= 3
  if (g.bias) return {engine, a, b, row_of(g.n), c, attributes};
  return {engine, a, b, c, attributes};
#else
  using Call = dnnl::matmul::desc;
  return {g.bias ? Call(a, b, row_of(g.n), c) : Call(a, b, c), attributes, engine};
#endif
}

struct Product {
  memory::desc a, b, c, room;
  dnnl::matmul run;

  explicit Product(const dnnl::matmul::primitive_desc& made)
      : a(made.src_desc()),
        b(made.weights_desc()),
        c(made.dst_desc()),
        room(made.scratchpad_desc()),
        run(made) {}
};

std::shared_ptr<const Product> plan(const Gemm<BFloat16>& g) {
  using Key = std::array<std::int64_t, 10>;
  static auto& plans = *new Plans<Key, Product>();  // outlives every thread
  return plans.find(
      {g.m, g.n, g.k, g.lda, g.transpose_a, g.ldb, g.transpose_b, g.ldc, g.accumulate, g.bias != nullptr},
      [&] { return Product(product_of(g)); });
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
  const std::shared_ptr<const Product> product = plan(g);
  const auto room = scratch<std::byte>(static_cast<std::int64_t>(product->room.get_size()));
  if (!room) return false;
  std::unordered_map<int, memory> arguments{{DNNL_ARG_SRC, argument(product->a, g.a)},
                                            {DNNL_ARG_WEIGHTS, argument(product->b, g.b)},
                                            {DNNL_ARG_DST, argument(product->c, g.c)},
                                            {DNNL_ARG_SCRATCHPAD, argument(product->room, room.get())}};
  if (g.bias) arguments.emplace(DNNL_ARG_BIAS, argument(row_of(g.n), g.bias));
  dnnl::stream stream(processor_engine());
  product->run.execute(stream, arguments);
  stream.wait();
  return true;
} catch (...) {
  return false;
}

}  // namespace sherd::cpu

#endif
