#include "runtime/cuda/peer_moves.h"

#include "runtime/cuda/peer_moves.cuh"

namespace sherd::cuda {
namespace {

__global__ void __launch_bounds__(move_threads) copy_pieces(const __grid_constant__ CopyTable table) {
  each_chunk(
      table.count, [&](int piece) { return table.piece[piece].bytes; },
      [&](int piece, std::int64_t chunk) {
        const auto& [to, from, bytes] = table.piece[piece];
        copy_chunk(to, from, bytes, chunk);
      });
}

template <class T, class R>
__global__ void __launch_bounds__(move_threads)
    combine_pieces(const __grid_constant__ CombineTable table, R rule) {
  each_chunk(
      table.count, [&](int piece) { return table.piece[piece].count * static_cast<std::int64_t>(sizeof(T)); },
      [&](int piece, std::int64_t chunk) {
        const std::byte* const* sources = table.source + piece * table.sources;
        combine_chunk<T>(
            table.piece[piece].out, table.sources, [&](int r) { return sources[r]; },
            table.piece[piece].count, chunk, rule);
      });
}

}  // namespace

void launch_copies(const CopyTable& table, cudaStream_t stream) {
  std::int64_t bytes = 0;
  for (int i = 0; i < table.count; ++i) bytes += table.piece[i].bytes;
  copy_pieces<<<move_blocks(bytes, table.count), move_threads, 0, stream>>>(table);
}

void launch_combine(DType dtype, ReduceOp reduction, const CombineTable& table, cudaStream_t stream) {
  std::int64_t count = 0;
  for (int i = 0; i < table.count; ++i) count += table.piece[i].count;
  with_rule(dtype, reduction, table.sources, [&]<class T, class R>(R rule) {
    combine_pieces<T>
        <<<move_blocks(count * static_cast<std::int64_t>(sizeof(T)), table.count), move_threads, 0, stream>>>(
            table, rule);
  });
}

}  // namespace sherd::cuda
