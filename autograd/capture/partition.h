// What of a forward's values its backward keeps, and what it makes again of others.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "autograd/capture/recorded.h"

namespace sherd {

/// A value that the backward reads: a storage of the forward's trace, and its number in the cut.
struct KeptValue {
  std::uint32_t storage, number;
  bool stays = false;  ///< others have it anyway, or need it kept
};

/// Ops that make some of them again, in a trace of their own.
struct MadeAgain {
  Trace trace;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> made{};  ///< storage in it, number
  std::vector<std::pair<std::uint32_t, std::uint32_t>>
      read{};  ///< the same of what it is made from, which stays kept
};

/// The cheapest choice (a minimal cut) of which values to keep, by their bytes, and which to make again of
/// those that are kept, by elementwise ops, casts and sums of rows. A light one costs a sixteenth of what it
/// reads; a heavy one four times what it writes, so that it pays only where several values come of it. An
/// entry for each set of values that are made of each other or together. Nothing is made of memory that the
/// program writes more than once, of random numbers, or by reading what an owner brings.
std::vector<MadeAgain> partition(const Recorded& forward, const std::vector<KeptValue>& kept);

}  // namespace sherd
