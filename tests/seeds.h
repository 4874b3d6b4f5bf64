// Which seeds a test of random programs plays when it runs for long.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace sherd::test {

struct Seeds {
  std::uint64_t first, last;  ///< Both are played.
};

/// `all`, or what SHERD_SEEDS=FIRST-LAST says: so that processes share a soak, and a found seed is played
/// again.
inline Seeds soak_seeds(Seeds all) {
  const char* text = std::getenv("SHERD_SEEDS");
  if (!text) return all;
  const std::string given = text;
  const std::size_t dash = given.find('-');
  if (dash == std::string::npos)
    throw std::runtime_error("SHERD_SEEDS wants FIRST-LAST, got '" + given + "'");
  return {std::stoull(given), std::stoull(given.substr(dash + 1))};
}

}  // namespace sherd::test
