#include "runtime/cuda/block.cuh"
#include "runtime/cuda/kernels.h"
#include "runtime/cuda/peer_moves.h"
#include "runtime/cuda/types.cuh"

namespace sherd::cuda {
namespace {

/// Few blocks saturate the link between two GPUs; the other multiprocessors are left to the rank's own work.
constexpr unsigned blocks_per_piece = 24;

/// Elements of a piece that are read in one access, and whether all pointers allow it.
template <class T>
constexpr int wide = static_cast<int>(16 / sizeof(T));

__global__ void copy_pieces(const __grid_constant__ CopyTable table) {
  const auto& piece = table.piece[blockIdx.y];
  const std::int64_t first = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x,
                     step = std::int64_t{gridDim.x} * blockDim.x;
  std::int64_t at = 0;
  const auto bits = reinterpret_cast<std::uintptr_t>(piece.to) | reinterpret_cast<std::uintptr_t>(piece.from);
  if (bits % 16 == 0) {
    const std::int64_t packs = piece.bytes / 16;
    for (std::int64_t i = first; i < packs; i += step)
      reinterpret_cast<uint4*>(piece.to)[i] = reinterpret_cast<const uint4*>(piece.from)[i];
    at = packs * 16;
  }
  for (std::int64_t i = at + first; i < piece.bytes; i += step) piece.to[i] = piece.from[i];
}

template <class A>
__device__ A add(A a, A b) {
  if constexpr (std::is_integral_v<A>) {
    using U = std::make_unsigned_t<A>;
    return static_cast<A>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
  } else {
    return a + b;
  }
}

template <class A, ReduceOp::Kind K>
struct Rule {
  A scale;
  __device__ A first(A x) const { return K == ReduceOp::Kind::prescaled_sum ? x * scale : x; }
  __device__ A next(A sum, A x) const {
    if constexpr (K == ReduceOp::Kind::max) {
      if constexpr (std::is_floating_point_v<A>) return (sum > x || sum != sum) ? sum : x;
      return sum > x ? sum : x;
    } else {
      return add(sum, first(x));
    }
  }
  __device__ A last(A sum, int sources) const {
    if constexpr (K == ReduceOp::Kind::average) return sum / static_cast<A>(sources);
    return sum;
  }
};

/// V elements from `i` on, in rank order; all are read before one is written, so `out` may be a source.
template <int V, class T, ReduceOp::Kind K>
__device__ void combine_at(const CombineTable& table, int piece, std::int64_t i,
                           const Rule<compute_t<T>, K>& rule) {
  const std::byte* const* source = table.source + piece * table.sources;
  Packed<V, compute_t<T>> sum;
  for (int r = 0; r < table.sources; ++r) {
    const Packed<V, T> x = load_pack<V>(reinterpret_cast<const T*>(source[r]) + i);
#pragma unroll
    for (int j = 0; j < V; ++j)
      sum.at[j] = r == 0 ? rule.first(widen(x.at[j])) : rule.next(sum.at[j], widen(x.at[j]));
  }
  Packed<V, T> out;
#pragma unroll
  for (int j = 0; j < V; ++j) out.at[j] = narrow<T>(rule.last(sum.at[j], table.sources));
  store_pack<V>(reinterpret_cast<T*>(table.piece[piece].out) + i, out);
}

template <class T, ReduceOp::Kind K>
__global__ void combine_pieces(const __grid_constant__ CombineTable table, Rule<compute_t<T>, K> rule) {
  const int piece = static_cast<int>(blockIdx.y);
  const std::int64_t count = table.piece[piece].count;
  auto bits = reinterpret_cast<std::uintptr_t>(table.piece[piece].out);
  for (int r = 0; r < table.sources; ++r)
    bits |= reinterpret_cast<std::uintptr_t>(table.source[piece * table.sources + r]);
  const std::int64_t first = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x,
                     step = std::int64_t{gridDim.x} * blockDim.x;
  std::int64_t at = 0;
  if (bits % 16 == 0) {
    const std::int64_t packs = count / wide<T>;
    for (std::int64_t i = first; i < packs; i += step)
      combine_at<wide<T>, T>(table, piece, i * wide<T>, rule);
    at = packs * wide<T>;
  }
  for (std::int64_t i = at + first; i < count; i += step) combine_at<1, T>(table, piece, i, rule);
}

template <class T, ReduceOp::Kind K>
void launch(const CombineTable& table, float scale, cudaStream_t stream) {
  combine_pieces<T, K>
      <<<dim3(blocks_per_piece, static_cast<unsigned>(table.count)), threads_per_block, 0, stream>>>(
          table, {static_cast<compute_t<T>>(scale)});
}

}  // namespace

void launch_copies(const CopyTable& table, cudaStream_t stream) {
  copy_pieces<<<dim3(blocks_per_piece, static_cast<unsigned>(table.count)), threads_per_block, 0, stream>>>(
      table);
}

void launch_combine(DType dtype, ReduceOp reduction, const CombineTable& table, cudaStream_t stream) {
  for_any(dtype, [&]<class T>() {
    using Kind = ReduceOp::Kind;
    if constexpr (!std::is_same_v<T, bool>) {  // no rank may ask for bool
      if (reduction.kind == Kind::max) return launch<T, Kind::max>(table, 1, stream);
      if constexpr (std::is_floating_point_v<compute_t<T>>) {
        if (reduction.kind == Kind::average) return launch<T, Kind::average>(table, 1, stream);
        if (reduction.kind == Kind::prescaled_sum)
          return launch<T, Kind::prescaled_sum>(table, reduction.scale, stream);
      }
      launch<T, Kind::sum>(table, 1, stream);
    }
  });
}

}  // namespace sherd::cuda
