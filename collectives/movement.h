// Which elements go from which rank to which: the arithmetic that all transports share. Moves nothing itself.
#pragma once

#include <cstdint>

#include "collectives/collective.h"

namespace sherd {

/// `count` elements, from offset `source` in the sender's segment to offset `destination` in the receiver's.
struct Piece {
  std::int64_t source = 0, destination = 0, count = 0;
};

/// What a call moves, in one round; a long all_reduce in two: every rank combines its slice of all inputs,
/// then copies the other slices from its peers' outputs.
struct Movement {
  CollectiveKind kind;
  int size = 1;    ///< ranks of the group
  int root = -1;   ///< of a broadcast; for send and recv the sender; else -1
  int rounds = 1;  ///< 1, or 2 for an all_reduce in slices

  /// The movement of a call by `size` ranks. For send and recv rank 0 is the sender and rank 1 the receiver.
  static Movement of(const Collective& c, int size, int rounds) {
    const bool message = c.kind == CollectiveKind::send || c.kind == CollectiveKind::recv;
    return {c.kind, size, message ? 0 : c.kind == CollectiveKind::broadcast ? c.peer : -1, rounds};
  }

  /// Whether round `round` reduces what a rank takes from all others, instead of placing it side by side.
  bool combines(int round) const {
    return kind == CollectiveKind::reduce_scatter || (kind == CollectiveKind::all_reduce && round == 0);
  }
  /// What rank `to` takes from rank `from` of a segment of `n` elements (counted as `Signature::total`); a
  /// count of 0 is nothing.
  Piece piece(int round, int from, int to, std::int64_t n) const {
    switch (kind) {
      case CollectiveKind::all_gather:
        return {0, from * n, n};
      case CollectiveKind::reduce_scatter:
        return {to * n, 0, n};
      case CollectiveKind::all_to_all:
        return {to * (n / size), from * (n / size), n / size};
      case CollectiveKind::all_reduce:
        return all_reduce_piece(round, from, to, n);
      case CollectiveKind::broadcast:
        return {0, 0, from == root ? n : 0};
      case CollectiveKind::send:
      case CollectiveKind::recv:
        return {0, 0, from == root && to != root ? n : 0};
      case CollectiveKind::barrier:
        break;
    }
    return {};
  }

 private:
  Piece all_reduce_piece(int round, int from, int to, std::int64_t n) const {
    if (rounds == 1) return {0, 0, n};
    const int slice = round == 0 ? to : from;
    const std::int64_t begin = n * slice / size, end = n * (slice + 1) / size;
    return {begin, begin, end - begin};
  }
};

}  // namespace sherd
