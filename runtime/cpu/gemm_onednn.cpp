#if defined(SHERD_ONEDNN) && defined(SHERD_OPENMP)

#include <algorithm>
#include <array>
#include <new>
#include <string_view>
#include <utility>

#include "runtime/cpu/gemm_tile.h"
#include "runtime/cpu/onednn.h"
#include "runtime/cpu/onednn_faults.h"
#include "runtime/cpu/scratch.h"

namespace sherd::cpu {
namespace {

using dnnl::memory;

/// One matrix, or some that lie `step` apart.
memory::desc matrix_of(std::int64_t rows, std::int64_t columns, std::int64_t ld, bool transposed,
                       std::int64_t batch = 1, std::int64_t step = 0) {
  memory::dims dims{rows, columns}, strides = transposed ? memory::dims{1, ld} : memory::dims{ld, 1};
  if (batch > 1) dims.insert(dims.begin(), batch), strides.insert(strides.begin(), step);
  return {dims, memory::data_type::bf16, strides};
}

memory::desc row_of(const Gemm<BFloat16>& g) {
  return g.batch > 1 ? memory::desc({1, 1, g.n}, memory::data_type::bf16, memory::dims{g.n, g.n, 1})
                     : matrix_of(1, g.n, g.n, false);
}

/// `packed` leaves it to the library how B lies.
dnnl::matmul::primitive_desc product_of(const Gemm<BFloat16>& g, bool packed) {
  const memory::desc a = matrix_of(g.m, g.k, g.lda, g.transpose_a, g.batch, g.stride_a),
                     b = packed ? memory::desc({g.k, g.n}, memory::data_type::bf16, memory::format_tag::any)
                                : matrix_of(g.k, g.n, g.ldb, g.transpose_b, g.batch, g.stride_b),
                     c = matrix_of(g.m, g.n, g.ldc, false, g.batch, g.stride_c);
  const dnnl::engine& engine = processor_engine();
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (g.accumulate) {
    dnnl::post_ops sum;
    sum.append_sum();
    attributes.set_post_ops(sum);
  }
#if DNNL_VERSION_MAJOR >= 3
  if (g.bias) return {engine, a, b, row_of(g), c, attributes};
  return {engine, a, b, c, attributes};
#else
  using Call = dnnl::matmul::desc;
  return {g.bias ? Call(a, b, row_of(g), c) : Call(a, b, c), attributes, engine};
#endif
}

}  // namespace

struct Product {
  bool plain_loops;  // which are slower than a call for each matrix, if there are several
  memory::desc a, b, c, room;
  dnnl::matmul run;
  dnnl::reorder pack;  // from B as it lies, where the library lays it

  Product(const Gemm<BFloat16>& g, bool packed) : Product(product_of(g, packed)) {
    const memory::desc lies = matrix_of(g.k, g.n, g.ldb, g.transpose_b);
    if (packed) pack = dnnl::reorder({processor_engine(), lies, processor_engine(), b});
  }

 private:
  explicit Product(const dnnl::matmul::primitive_desc& made)
      : plain_loops(std::string_view(made.impl_info_str()).starts_with("ref")),
        a(made.src_desc()),
        b(made.weights_desc()),
        c(made.dst_desc()),
        room(made.scratchpad_desc()),
        run(made) {}
};

namespace {

std::shared_ptr<const Product> plan(const Gemm<BFloat16>& g, bool packed = false) {
  using Key = std::array<std::int64_t, 15>;
  static auto& plans = *std::make_unique<Plans<Key, Product>>().release();  // outlives every thread
  const bool one = g.batch == 1;
  return plans.find(
      {packed, g.m, g.n, g.k, g.lda, g.transpose_a, g.ldb, g.transpose_b, g.ldc, g.accumulate,
       g.bias != nullptr, g.batch, one ? 0 : g.stride_a, one ? 0 : g.stride_b, one ? 0 : g.stride_c},
      [&] { return Product(g, packed); });
}

using Arguments = std::unordered_map<int, memory>;

Arguments arguments_of(const Product& product, const Gemm<BFloat16>& g, const void* b, void* room) {
  Arguments given{{DNNL_ARG_SRC, argument(product.a, g.a)},
                  {DNNL_ARG_WEIGHTS, argument(product.b, b)},
                  {DNNL_ARG_DST, argument(product.c, g.c)},
                  {DNNL_ARG_SCRATCHPAD, argument(product.room, room)}};
  if (g.bias) given.emplace(DNNL_ARG_BIAS, argument(row_of(g), g.bias));
  return given;
}

bool execute(const Product& product, const Gemm<BFloat16>& g) {
  const auto room = scratch<std::byte>(static_cast<std::int64_t>(product.room.get_size()));
  if (!room) return false;
  dnnl::stream stream(processor_engine());
  product.run.execute(stream, arguments_of(product, g, g.b, room.get()));
  stream.wait();
  return true;
}

bool run_each(Gemm<BFloat16> g) {
  const std::int64_t batch = std::exchange(g.batch, 1);
  bool ok = true;
  for (std::int64_t i = 0; i < batch; ++i, g.a += g.stride_a, g.b += g.stride_b, g.c += g.stride_c)
    ok = gemm_tile_onednn(g) && ok;
  return ok;
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

bool onednn_leaves_stack() noexcept {
  static const bool leaves_stack = faults::leaves_stack(faults::library_here());
  return leaves_stack;
}

bool onednn_multiplies_bf16() noexcept try {
  const auto isa = static_cast<unsigned>(dnnl::get_effective_cpu_isa());
  constexpr auto needed = static_cast<unsigned>(dnnl::cpu_isa::avx512_core_bf16);
  return (isa & needed) == needed;
} catch (...) {
  return false;
}

bool onednn_multiplies_bf16(std::int64_t terms) noexcept {
  static const bool multiplies_bf16 = onednn_multiplies_bf16();
  static const faults::Library library = faults::library_here();
  return multiplies_bf16 && !faults::spreads_nan(terms, DType::bf16, library);
}

bool gemm_tile_onednn(const Gemm<BFloat16>& g) noexcept try {
  const OneThread one_thread;
  const std::shared_ptr<const Product> product = plan(g);
  return g.batch > 1 && product->plain_loops ? run_each(g) : execute(*product, g);
} catch (...) {
  return false;
}

/// Columns of B and C, and all that a call of the library is given, which takes as long to make as a small
/// product.
struct PackedB::Part {
  std::int64_t column;
  std::shared_ptr<const Product> product;
  Scratch<std::byte> b, room;
  dnnl::stream stream{processor_engine()};
  Arguments arguments;

  Part(Gemm<BFloat16> g, std::int64_t begin, std::int64_t end) : column(begin) {
    g.n = end - begin;
    g.b += g.transpose_b ? begin * g.ldb : begin;
    if (g.bias) g.bias += begin;
    product = plan(g, true);
    b = scratch<std::byte>(static_cast<std::int64_t>(product->b.get_size()));
    room = scratch<std::byte>(static_cast<std::int64_t>(product->room.get_size()));
    if (!b || !room) throw std::bad_alloc();
    arguments = arguments_of(*product, g, b.get(), room.get());
    memory lies = argument(matrix_of(g.k, g.n, g.ldb, g.transpose_b), g.b);
    dnnl::reorder(product->pack).execute(stream, lies, arguments.at(DNNL_ARG_WEIGHTS));
    stream.wait();
  }
};

PackedB::PackedB() = default;
PackedB::~PackedB() = default;

std::shared_ptr<PackedB> PackedB::of(const Gemm<BFloat16>& g) noexcept try {
  constexpr std::int64_t most_rows = 63, unit = 64, enough = 1 << 20;
  if (g.batch != 1 || g.m > most_rows || g.m * g.n * g.k < onednn_work_bf16) return nullptr;
  if (!onednn_multiplies_bf16(g.k)) return nullptr;
  const OneThread one_thread;
  const std::int64_t columns = std::max<std::int64_t>(2, enough / (g.m * g.k) / unit) * unit;
  auto packed = std::make_shared<PackedB>();
  for (std::int64_t column = 0; column < g.n; column += columns)
    packed->parts_.push_back(std::make_unique<Part>(g, column, std::min(column + columns, g.n)));
  return packed;
} catch (...) {
  return nullptr;
}

bool PackedB::multiply(std::int64_t part, const BFloat16* a, BFloat16* c) noexcept try {
  const OneThread one_thread;
  Part& p = *parts_[static_cast<std::size_t>(part)];
  p.arguments.at(DNNL_ARG_SRC).set_data_handle(const_cast<BFloat16*>(a));
  p.arguments.at(DNNL_ARG_DST).set_data_handle(c + p.column);
  p.product->run.execute(p.stream, p.arguments);
  p.stream.wait();
  return true;
} catch (...) {
  return false;
}

}  // namespace sherd::cpu

#endif
