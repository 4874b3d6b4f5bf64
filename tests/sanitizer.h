// Which sanitizer this build has, for tests whose cost or memory it changes.
#pragma once

#include <cstddef>
#include <vector>

namespace sherd::test {

#ifdef __SANITIZE_THREAD__
inline constexpr bool thread_sanitizer = true;
#else
inline constexpr bool thread_sanitizer = false;
#endif
#ifdef __SANITIZE_ADDRESS__
inline constexpr bool address_sanitizer = true;
#else
inline constexpr bool address_sanitizer = false;
#endif
inline constexpr bool sanitized = thread_sanitizer || address_sanitizer;

/// Of a wide grid a sanitizer sees every eleventh combination, in which each axis still has all its values.
constexpr bool left_to_plain_build(std::size_t combination) { return sanitized && combination % 11 != 0; }

/// Numbers of ranks for wide sweeps. A sanitizer takes long, and sees with a few of them what it would with all.
inline std::vector<int> worlds() {
  if (thread_sanitizer) return {2};
  if (address_sanitizer) return {1, 3};
  return {1, 2, 3, 4};
}

}  // namespace sherd::test
