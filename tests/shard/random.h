// Random programs, from a seed.
#pragma once

#include <cstdint>
#include <random>

namespace sherd::test {

using Random = std::mt19937_64;

inline int below(Random& random, int n) { return static_cast<int>(random() % static_cast<std::uint64_t>(n)); }
inline bool once_in(Random& random, int n) { return below(random, n) == 0; }

}  // namespace sherd::test
