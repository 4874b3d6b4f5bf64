#include "nn/tokenizer/hash.h"

#include <random>

#include "runtime/io/xxhash_inline.h"

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
