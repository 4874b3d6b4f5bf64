// Which ranks of a test compile its model.
#pragma once

#include "tests/ranks.h"

namespace sherd::test {

enum class Compiles { nobody, everybody, rank_0 };
inline constexpr Compiles somebody[] = {Compiles::everybody, Compiles::rank_0};

inline bool compiles_here(Compiles who, const World& world) {
  return who == Compiles::everybody || (who == Compiles::rank_0 && world.rank() == 0);
}

}  // namespace sherd::test
