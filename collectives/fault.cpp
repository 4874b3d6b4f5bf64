#include "collectives/fault.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <utility>

#include "runtime/shown.h"

namespace sherd {
namespace {

constexpr std::size_t most_named = 8;  // ranks of one side of a mismatch; the others are counted

std::string opening(const CallPlace& p, CollectiveKind kind) {
  const std::string message =
      p.source < 0 ? "" : fmt::format(" from rank {} to rank {}", p.source, p.destination);
  return fmt::format("{} #{}{} on channel {} of group {}", to_string(kind), p.sequence, message, p.channel,
                     p.group);
}

/// "rank 1", "ranks 0, 2 and 3", "ranks 0, 1, 2 and 13 more".
std::string names_of(std::span<const int> ranks) {
  if (ranks.size() == 1) return fmt::format("rank {}", ranks[0]);
  if (ranks.size() > most_named)
    return fmt::format("ranks {} and {} more", fmt::join(ranks.first(most_named), ", "),
                       ranks.size() - most_named);
  return fmt::format("ranks {} and {}", fmt::join(ranks.first(ranks.size() - 1), ", "), ranks.back());
}

/// The ranks that posted one of several calls at a place.
struct Side {
  const Signature* signature;
  std::vector<int> ranks;
};

/// Those of most ranks last, else by their first rank.
std::vector<Side> sides_of(std::span<const RankCall> posts) {
  std::vector<Side> sides;
  for (const RankCall& post : posts) {
    const auto side = std::ranges::find_if(
        sides, [&](const Side& s) { return s.signature->digest == post.signature->digest; });
    if (side == sides.end())
      sides.push_back({post.signature, {post.rank}});
    else
      side->ranks.push_back(post.rank);
  }
  std::ranges::stable_sort(sides, {}, [](const Side& side) { return side.ranks.size(); });
  return sides;
}

std::string heard_text(const Fault& heard) {
  return fmt::format(" after it heard of a fault of {} of the world", names_of(heard.ranks));
}

std::vector<int> to_world(const CallPlace& place, std::span<const int> ranks) {
  std::vector<int> world;
  for (int rank : ranks) world.push_back(place.world_ranks[static_cast<std::size_t>(rank)]);
  return world;
}

/// The ranks at fault, of the world, where `gone` is.
std::vector<int> at_fault(const CallPlace& place, const Leaver& gone, int waiting, std::size_t made,
                          std::size_t missed) {
  std::vector<int> ranks(gone.blames.begin(), gone.blames.end());
  const auto is_here = [&](int rank) {
    return std::ranges::find(place.world_ranks, rank) != place.world_ranks.end();
  };
  if (std::ranges::any_of(ranks, is_here)) return ranks;
  const bool returned = gone.how == Departure::left && ranks.empty();
  const int leaver = place.world_ranks[static_cast<std::size_t>(gone.rank)];
  if (!returned || made >= missed) ranks.push_back(leaver);
  if (returned && missed >= made) ranks.push_back(place.world_ranks[static_cast<std::size_t>(waiting)]);
  return ranks;
}

}  // namespace

std::string describe(const CallPlace& place, const Signature& signature) {
  return opening(place, signature.kind) + ", " + signature.text();
}

std::string describe_renewal(std::string_view group, const Fault* heard) {
  const bool blames = heard != nullptr && !heard->ranks.empty();
  return fmt::format("renew of group {}{}", group, blames ? heard_text(*heard) : "");
}

void Fault::raise(std::span<const int> world_ranks) const {
  std::vector<int> here;
  for (int rank : ranks) {
    const auto found = std::ranges::find(world_ranks, rank);
    if (found != world_ranks.end()) here.push_back(static_cast<int>(found - world_ranks.begin()));
  }
  std::ranges::sort(here);
  here.erase(std::ranges::unique(here).begin(), here.end());
  throw CollectiveError(text + "; the group stays failed until all its ranks renew() it", std::move(here),
                        sequence);
}

Fault mismatch(const CallPlace& place, std::span<const RankCall> posts) {
  const std::vector<Side> sides = sides_of(posts);
  const bool clear = sides.back().ranks.size() > sides[sides.size() - 2].ranks.size();
  std::string text = opening(place, sides.back().signature->kind) + ": ";
  std::vector<int> ranks;
  for (const Side& side : sides) {
    const bool last = &side == &sides.back();
    text += fmt::format("{}{} posted {}", last ? "but " : "", names_of(side.ranks), side.signature->text());
    text += last ? "; every rank of a group makes the same calls in the same order" : ", ";
    if (!last || !clear) ranks.insert(ranks.end(), side.ranks.begin(), side.ranks.end());
  }
  return {std::move(text), to_world(place, ranks), place.sequence};
}

std::string parting(Departure how, std::string_view reason, const Fault* heard) {
  if (how == Departure::died) return fmt::format("died ({})", reason);
  std::string text =
      how == Departure::left ? "left the body" : fmt::format("threw \"{}\"", one_line(std::string(reason)));
  if (heard == nullptr) return text;
  if (!heard->ranks.empty()) text += heard_text(*heard);
  if (reason.find(heard->text) == std::string_view::npos) text += fmt::format(" (\"{}\")", heard->text);
  return one_line(text);
}

Fault departed(const CallPlace& place, const Leaver& leaver, RankCall waiting, std::size_t made,
               std::size_t missed) {
  const std::string before =
      leaver.last ? fmt::format("its last call here was {}", leaver.last->text()) : "it made no call here";
  return {fmt::format("{}: rank {} {} and {}, while rank {} is in {}; every rank of a group makes every call",
                      opening(place, waiting.signature->kind), leaver.rank, leaver.parting, before,
                      waiting.rank, waiting.signature->text()),
          at_fault(place, leaver, waiting.rank, made, missed), place.sequence};
}

Fault not_moved(const CallPlace& place, RankCall call, int peer, std::string_view failure) {
  return {fmt::format("{}: between rank {}, which is in {}, and rank {}, {}",
                      opening(place, call.signature->kind), call.rank, call.signature->text(), peer, failure),
          to_world(place, std::array{call.rank, peer}), place.sequence};
}

Fault device_failed(const CallPlace& place, RankCall call, std::string_view failure) {
  return {
      one_line(fmt::format("{}: the device of rank {}, which is in {}, failed: {}",
                           opening(place, call.signature->kind), call.rank, call.signature->text(), failure)),
      to_world(place, std::array{call.rank}), place.sequence};
}

Fault renewing(std::string_view group, std::span<const int> world_ranks, int rank, const Fault* heard) {
  const bool blames = heard != nullptr && !heard->ranks.empty();
  std::string why = blames ? heard_text(*heard) : "";
  if (heard != nullptr) why += fmt::format(" (\"{}\")", heard->text);
  return {one_line(fmt::format("group {}: it is being renewed by rank {}{}; calls posted before are void",
                               group, rank, why)),
          blames ? heard->ranks : std::vector{world_ranks[static_cast<std::size_t>(rank)]}, 0};
}

Fault deadlock(const CallPlace& place, std::span<const Blocked> cycle) {
  std::string text = fmt::format("call #{} on channel {} of group {}: ranks wait for each other",
                                 place.sequence, place.channel, place.group);
  std::vector<int> blamed, all;
  for (const Blocked& b : cycle) {
    text += fmt::format("; rank {} of the world is in {}", b.world_rank, b.call);
    all.push_back(b.world_rank);
    blamed.insert(blamed.end(), b.blames.begin(), b.blames.end());
  }
  return {text + "; every rank makes its calls on all groups and channels in one order",
          blamed.empty() ? std::move(all) : std::move(blamed), place.sequence};
}

}  // namespace sherd
