// What a pass may run at another place of a program, and where.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "autograd/capture/recorded.h"

namespace sherd {

/// Of a program that outlives this and is not changed meanwhile.
class Moves {
 public:
  explicit Moves(const Recorded& program);
  /// By storage, whether the caller or the other half gets it.
  bool leaves(std::uint32_t storage) const { return leaves_[storage]; }
  /// By storage, whether others have its memory too: of two such nobody knows whether they share it.
  bool foreign(std::uint32_t storage) const { return foreign_[storage]; }
  /// Whether op `i` gives the same wherever it reads the same, before what reads it: it writes nothing, calls
  /// and asks nobody, and nobody writes what it gives or has it afterwards.
  bool may_move(std::size_t i) const;
  /// Whether what op `i` reads may be another thing before op `at`, behind it, or it may throw and others see
  /// something written between.
  bool crosses(std::size_t i, std::size_t at) const;
  /// The op whose one result is all of `t` and read by op `reader` alone, and that may run right before it.
  std::optional<std::size_t> maker_for(const TracedTensor& t, std::size_t reader) const;

 private:
  const Trace& trace_;
  std::vector<bool> leaves_, foreign_;              // by storage
  std::vector<std::vector<std::size_t>> writers_;   // by storage: ops
  std::vector<std::size_t> barriers_;               // ops before which what is foreign may change
  std::vector<std::optional<std::size_t>> makers_;  // by storage: the first op that has it
  std::vector<std::size_t> uses_;                   // by storage: of ops, its maker's among them
};

}  // namespace sherd
