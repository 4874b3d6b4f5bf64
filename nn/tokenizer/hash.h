// Hashes for tables that live in memory only. They differ from process to process, so that no file is made of
// tokens that collide.
#pragma once

#include <cstdint>
#include <string_view>

namespace sherd::nn::tokens {

std::uint64_t hash_of(std::string_view text);

/// An odd number of 64 bits: the high bits of a product with it spread keys over a table.
std::uint64_t spreading_factor();

}  // namespace sherd::nn::tokens
