#include "nn/tokenizer/hash.h"

#include <random>

// Inlined, so that nothing more is linked.
#ifndef XXH_INLINE_ALL
#define XXH_INLINE_ALL
#endif
// GCC bug 105593: false alarms inside its own AVX-512 intrinsics.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <xxhash.h>
#pragma GCC diagnostic pop

namespace sherd::nn::tokens {

std::uint64_t spreading_factor() {
  static const std::uint64_t factor = [] {
    std::random_device device;
    return static_cast<std::uint64_t>(device()) << 32 | device() | 1U;
  }();
  return factor;
}

std::uint64_t hash_of(std::string_view text) {
  return XXH3_64bits_withSeed(text.data(), text.size(), spreading_factor());
}

}  // namespace sherd::nn::tokens
