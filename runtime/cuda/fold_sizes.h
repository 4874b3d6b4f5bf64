// What the tree of a fold on a GPU is made of: the kernels of folds have it, and those of regions.
#pragma once

#include <cstdint>

namespace sherd::cuda {

inline constexpr int block_columns = 32;
/// Of a block that folds the array across rows, and of one that joins pieces.
inline constexpr int block_rows = 8, join_rows = 32;
/// Terms that a thread adds up in a run: a sum of f32 loses with every number added to it.
inline constexpr std::int64_t run_length = 32;
/// Elements of a piece along rows; of so many rows each is one piece.
inline constexpr std::int64_t piece_length = 4096, rows_without_pieces = 1 << 16;

}  // namespace sherd::cuda
