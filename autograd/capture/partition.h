// What of a forward's values its backward keeps, and what it makes again of others.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "autograd/capture/recorded.h"
#include "autograd/op_costs.h"

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

/// What may be made again.
enum class MakesAgain : std::uint8_t {
  small,  ///< elementwise ops, casts and sums of rows
  all,    ///< and whatever else gives the same each time, products too
};

/// Which values a forward keeps for its backward, and which are made again of those, by minimal cuts. Nothing
/// is made of memory that the program writes more than once, or by reading what an owner brings.
class Partitioning {
 public:
  /// By storage of the forward's trace: whether it is made again where it is wanted.
  using Choice = std::vector<bool>;
  /// Where others than `kept` may be kept too, they have numbers from here on, by storage.
  static constexpr std::uint32_t first_other = 1U << 31;

  /// `forward` outlives it. With `MakesAgain::all` others than `kept` may be kept too. Ops cost what
  /// `costs_of` says.
  Partitioning(const Recorded& forward, const std::vector<KeptValue>& kept, MakesAgain which,
               const OpCosts& measured);

  /// The choice that is cheapest where a byte that is kept costs 2^(`quarters` / 4) times what one costs that
  /// is moved.
  Choice cheapest(int quarters) const;
  /// Keeps what ops use on both sides of `segments` - 1 places, evenly spread and each where such values are
  /// small, and makes the rest again.
  Choice in_segments(std::size_t segments) const;
  /// `less` for what is made by op `place` of the forward and behind it, `more` for what is made before.
  Choice mixed(const Choice& less, const Choice& more, std::size_t place) const;
  /// Of all that is made again.
  std::int64_t cost(const Choice& choice) const;
  /// An entry for each set of values that are made of each other or together.
  std::vector<MadeAgain> made_again(const Choice& choice) const;

 private:
  struct Wanted;
  static constexpr std::uint32_t none = TracedTensor::none;
  bool can_run_again(const TracedOp& traced, MakesAgain which) const;
  std::int64_t bytes(std::uint32_t storage) const {
    return static_cast<std::int64_t>(trace_.storages[storage].bytes);
  }
  bool is_read(std::uint32_t storage) const { return numbers_[storage] < first_other; }  // by the backward
  Wanted wanted(const Choice& choice) const;
  MadeAgain extract(const std::vector<std::uint32_t>& ops, const std::vector<bool>& again) const;

  const Trace& trace_;
  std::vector<std::int64_t> costs_;     // by op
  std::vector<std::uint32_t> numbers_;  // by storage: in the cut; none where it cannot be kept
  std::vector<std::uint32_t> makers_;   // by storage: the op that may make it again
};

}  // namespace sherd
