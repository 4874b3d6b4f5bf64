#include "collectives/fault.h"

#include <algorithm>
#include <utility>

#include "runtime/shown.h"

namespace sherd {
namespace {

std::string opening(const CallPlace& p, CollectiveKind kind) {
  const std::string message =
      p.source < 0 ? "" : fmt::format(" from rank {} to rank {}", p.source, p.destination);
  return fmt::format("{} #{}{} on channel {} of group {}", to_string(kind), p.sequence, message, p.channel,
                     p.group);
}

}  // namespace

std::string describe(const CallPlace& place, const Signature& signature) {
  return opening(place, signature.kind) + ", " + signature.text();
}

void Fault::raise() const { throw CollectiveError(text, ranks, sequence); }

Fault mismatch(const CallPlace& place, RankCall one, RankCall other) {
  return {
      fmt::format(
          "{}: rank {} posted {}, but rank {} posted {}; every rank of a group makes the same calls in the "
          "same order",
          opening(place, one.signature.kind), one.rank, one.signature.text(), other.rank,
          other.signature.text()),
      {one.rank, other.rank},
      place.sequence};
}

Fault departed(const CallPlace& place, int rank, Departure how, std::string_view reason,
               const std::optional<Signature>& last, RankCall waiting) {
  const std::string what = how == Departure::left ? "left the body"
                           : how == Departure::threw
                               ? fmt::format("threw \"{}\"", one_line(std::string(reason)))
                               : fmt::format("died ({})", reason);
  const std::string before =
      last ? fmt::format("its last call here was {}", last->text()) : "it made no call here";
  return {fmt::format("{}: rank {} {} and {}, while rank {} is in {}; every rank of a group makes every call",
                      opening(place, waiting.signature.kind), rank, what, before, waiting.rank,
                      waiting.signature.text()),
          {rank},
          place.sequence};
}

Fault deadlock(const CallPlace& place, std::vector<int> ranks, const std::vector<Blocked>& cycle) {
  std::string text = fmt::format("call #{} on channel {} of group {}: ranks wait for each other",
                                 place.sequence, place.channel, place.group);
  for (const Blocked& b : cycle) text += fmt::format("; rank {} of the world is in {}", b.world_rank, b.call);
  return {text + "; every rank makes its calls on all groups and channels in one order", std::move(ranks),
          place.sequence};
}

}  // namespace sherd
