// A limit of every stack of layers.
#pragma once

#include <cstdint>

namespace sherd::nn {

/// Far above any model, and before a stack takes all memory for layers of nothing.
inline constexpr std::int64_t most_layers = std::int64_t{1} << 16;

}  // namespace sherd::nn
