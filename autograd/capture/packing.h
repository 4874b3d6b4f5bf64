// Where what lives for a while lies in memory that is shared.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace sherd {

/// `bytes` that are used from step `begin` to step `end`, both included.
struct Lifetime {
  std::size_t bytes;
  std::uint32_t begin, end;
};

struct Packing {
  std::vector<std::size_t> offsets;  ///< of each lifetime
  std::size_t bytes = 0;             ///< of all
};

/// Offsets, multiples of `alignment`, at which no two overlap that live at a time: the largest first, each at
/// the lowest place that is free as long as it lives ("greedy by size", Pisarchyk and Lee, Efficient Memory
/// Management for Deep Neural Net Inference, 2020).
Packing pack(std::span<const Lifetime> lives, std::size_t alignment);

}  // namespace sherd
