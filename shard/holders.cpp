#include "shard/holders.h"

#include <algorithm>
#include <set>
#include <unordered_map>
#include <utility>

#include "runtime/error.h"
#include "shard/agree.h"
#include "shard/build.h"
#include "shard/replicas.h"
#include "shard/unit.h"

namespace sherd::shard {

namespace {

std::optional<Ranks> replicas(const std::optional<Group>& group) {
  return group ? std::optional(Ranks{.shard = {}, .replicas = *group, .block = {}}) : std::nullopt;
}

}  // namespace

std::optional<Ranks> sharers_of(const nn::Parameter& p) {
  if (const ParameterGroup* group = group_of(p)) return group->spec().ranks;
  return replicas(replicas_of(p));
}

std::string words_of(const Ranks& holders) {
  std::vector<std::string> words;
  for (const Group& group : {holders.shard, holders.replicas})
    if (group.defined())
      words.push_back(fmt::format("{} of the ranks {}", group.name(), fmt::join(group.world_ranks(), ", ")));
  return words.empty() ? "one rank alone" : fmt::format("{}", fmt::join(words, " with "));
}

std::int64_t key_of(std::string_view text) {
  return static_cast<std::int64_t>(std::hash<std::string_view>{}(text) >> 1);
}

/// Shards and replicas of holders, as all ranks know them.
using Pair = std::pair<std::int64_t, std::int64_t>;

/// What a rank announces of a name in place of the first of its holders.
constexpr std::int64_t nobody_says = -1, all_hold = -2;

/// What all ranks announced of names, by the names' keys.
struct FirstsOfNames {
  std::unordered_map<std::int64_t, std::set<std::int64_t>> groups{};  ///< by their first ranks
  std::set<std::int64_t> held_by_all{};
};

/// Which ranks of all announced which holders.
class Announced {
 public:
  explicit Announced(const std::vector<std::vector<std::int64_t>>& lists);
  /// The first rank of those that hold a whole together with `rank`.
  int first_with(const Pair& holders, int rank) const;

 private:
  std::vector<std::set<Pair>> pairs_;
};

namespace {

/// What of a group all of its ranks say alike; 0 for one rank alone.
std::int64_t key_of_ranks(const Group& group) {
  return group.defined() ? key_of(fmt::format("{}", fmt::join(group.world_ranks(), " "))) : 0;
}

Pair pair_of(const Ranks& holders) { return {key_of_ranks(holders.shard), key_of_ranks(holders.replicas)}; }

bool are_same(const Group& a, const Group& b) {
  return a == b || (a.defined() && b.defined() && std::ranges::equal(a.world_ranks(), b.world_ranks()));
}

bool alike(const Ranks& a, const Ranks& b) {
  return are_same(a.shard, b.shard) && are_same(a.replicas, b.replicas);
}

/// Of the parameters under `prefix` that have some; none where they have unlike ones. Whether there are any
/// parameters is the second.
std::pair<std::optional<Ranks>, bool> holders_below(std::span<const Held> parameters,
                                                    std::string_view prefix) {
  std::optional<Ranks> holders;
  bool any = false;
  for (const auto& [name, of_one] : parameters) {
    if (!name.starts_with(prefix)) continue;
    any = true;
    if (holders && of_one && !alike(*holders, *of_one)) return {{}, true};
    if (of_one) holders = of_one;
  }
  return {holders, any};
}

/// By those of the parameters of its module, or of the next one around it that has some.
std::optional<Ranks> holders_around(std::span<const Held> parameters, std::string prefix) {
  do {
    const std::size_t dot = prefix.rfind('.');
    prefix.resize(dot == std::string::npos ? 0 : dot);
    const auto [holders, any] = holders_below(parameters, prefix.empty() ? prefix : prefix + ".");
    if (any) return holders;
  } while (!prefix.empty());
  return {};
}

std::vector<Held> held_in(nn::Module& module) {
  const Found found = find_members(module);
  std::vector<Held> held;
  for (const FoundParameter& p : found.parameters) held.emplace_back(p.name, sharers_of(p.member->object()));
  const std::size_t parameters = held.size();
  const auto replicated = replicated_buffers();
  for (const FoundBuffer& b : found.buffers)
    if (b.member->persistence() == nn::Persistence::saved) {
      const auto shared = replicated.find(b.member);
      std::optional<Ranks> holders = shared != replicated.end()
                                         ? replicas(shared->second)
                                         : holders_around(std::span(held).first(parameters), b.name);
      held.emplace_back(b.name, std::move(holders));
    }
  return held;
}

/// A group of one rank is this one, which is among them.
bool are_among(const Ranks& holders, const std::set<int>& all) {
  for (const Group& group : {holders.shard, holders.replicas})
    if (group.defined() && group.size() > 1 &&
        !std::ranges::all_of(group.world_ranks(), [&](int rank) { return all.contains(rank); }))
      return false;
  return true;
}

int size_of(const Ranks& holders) {
  return RankOfGroup(holders.shard).ranks * RankOfGroup(holders.replicas).ranks;
}

/// A list of each rank of keys of names and what it says of them. Those who say nothing of a name that others
/// limit are a group each.
FirstsOfNames firsts_of(const std::vector<std::vector<std::int64_t>>& lists) {
  FirstsOfNames all;
  const auto for_all = [&](const auto& act) {
    for (std::size_t rank = 0; rank < lists.size(); ++rank)
      for (std::size_t i = 0; i + 1 < lists[rank].size(); i += 2)
        act(static_cast<std::int64_t>(rank), lists[rank][i], lists[rank][i + 1]);
  };
  for_all([&](std::int64_t, std::int64_t name, std::int64_t said) {
    if (said >= 0) all.groups[name].insert(said);
    if (said == all_hold) all.held_by_all.insert(name);
  });
  for_all([&](std::int64_t rank, std::int64_t name, std::int64_t said) {
    const auto found = all.groups.find(name);
    if (said == nobody_says && found != all.groups.end()) found->second.insert(rank);
  });
  return all;
}

}  // namespace

Announced::Announced(const std::vector<std::vector<std::int64_t>>& lists) {
  for (const auto& list : lists) {
    std::set<Pair>& pairs = pairs_.emplace_back();
    for (std::size_t i = 0; i + 1 < list.size(); i += 2) pairs.emplace(list[i], list[i + 1]);
  }
}

int Announced::first_with(const Pair& holders, int rank) const {
  const std::int64_t replicas = holders.second;
  std::set<std::int64_t> of_replicas;  // whose ranks hold all together
  for (const std::set<Pair>& pairs : pairs_)
    for (const Pair& pair : pairs)
      if (replicas != 0 && pair.second == replicas) of_replicas.insert(pair.first);
  const auto is_with = [&](const Pair& pair) {
    const bool both = holders.first != 0 && holders.second != 0;
    return both ? pair.second != 0 && of_replicas.contains(pair.first) : pair == holders && pair != Pair();
  };
  for (int other = 0; other < rank; ++other)
    if (std::ranges::any_of(pairs_[static_cast<std::size_t>(other)], is_with)) return other;
  return rank;
}

NameGroups::NameGroups(std::string_view call, nn::Module& module, const Group& ranks)
    : NameGroups(
          call,
          [&module] {
            write_back(module);
            return held_in(module);
          },
          ranks) {}

NameGroups::NameGroups(std::string_view call, const std::function<std::vector<Held>()>& list,
                       const Group& ranks)
    : rank_(RankOfGroup(ranks).rank), ranks_(RankOfGroup(ranks).ranks) {
  all_.is_first = rank_ == 0;
  const CallOptions options{.label = std::string(call)};
  std::vector<Held> held;
  together(ranks, call, [&] { held = list(); });
  std::set<int> all_ranks;
  if (ranks.defined()) all_ranks.insert(ranks.world_ranks().begin(), ranks.world_ranks().end());
  std::set<Pair> own;
  Said others;
  for (auto& [name, holders] : held) {
    if (limited_.contains(name)) continue;
    if (holders && !are_among(*holders, all_ranks)) {
      if (!beyond_) beyond_.emplace(name, *holders);
    } else if (holders && size_of(*holders) < ranks_) {
      own.insert(pair_of(*holders));
      limited_[name] = {.holders = *holders, .words = words_of(*holders)};
    } else {
      others.emplace(name, holders ? all_hold : nobody_says);
    }
  }
  if (ranks_ == 1) return;
  std::vector<std::int64_t> numbers;
  for (const auto& [shards, replicas] : own) numbers.insert(numbers.end(), {shards, replicas});
  const auto announced = lists_of_all(ranks, numbers, options);
  if (std::ranges::any_of(announced, [](const auto& list) { return !list.empty(); }))
    number(Announced(announced), others, ranks, options);
}

void NameGroups::number(const Announced& all, const Said& others, const Group& ranks,
                        const CallOptions& options) {
  std::vector<std::int64_t> names;
  for (auto& [name, group] : limited_) {
    group.first = all.first_with(pair_of(group.holders), rank_);
    group.is_first = group.first == rank_;
    names.insert(names.end(), {key_of(name), group.first});
  }
  for (const auto& [name, said] : others) names.insert(names.end(), {key_of(name), said});
  const FirstsOfNames firsts = firsts_of(lists_of_all(ranks, names, options));
  add_alone(firsts, others, ranks, options.label);
  for (auto& [name, group] : limited_) {
    const std::set<std::int64_t>& of_name = firsts.groups.at(key_of(name));
    group.groups = static_cast<int>(of_name.size());
    group.number = static_cast<int>(std::distance(of_name.begin(), of_name.find(group.first)));
  }
}

void NameGroups::add_alone(const FirstsOfNames& all, const Said& others, const Group& ranks,
                           std::string_view call) {
  together(ranks, call, [&] {
    for (const auto& [name, said] : others) {
      if (!all.groups.contains(key_of(name))) continue;
      check<ValueError>(said == nobody_says && !all.held_by_all.contains(key_of(name)),
                        "{}: all {} ranks of the call hold '{}' together on some of them, on others fewer "
                        "do; give it one group on all ranks, or each group's another name",
                        call, ranks_, name);
      limited_[name] = {
          .is_first = true,
          .first = rank_,
          .words = fmt::format("rank {} alone", ranks.world_ranks()[static_cast<std::size_t>(rank_)])};
    }
  });
}

const GroupOfName& NameGroups::of(const std::string& name) const {
  const auto found = limited_.find(name);
  return found == limited_.end() ? all_ : found->second;
}

void NameGroups::check_complete(std::string_view call) const {
  if (!beyond_) return;
  fail<ValueError>(
      "{}: the elements of '{}' lie on {}, which are not all among the {} ranks of the call; give the group "
      "of all that share the model",
      call, beyond_->first, words_of(beyond_->second), ranks_);
}

std::string parameter_of_state(const std::string& entry) {
  constexpr std::string_view before = "state.";
  const std::size_t end = entry.rfind('.');
  return entry.starts_with(before) && end > before.size() ? entry.substr(before.size(), end - before.size())
                                                          : std::string();
}

std::vector<bool> first_to_have(const Group& ranks, std::span<const std::int64_t> keys,
                                std::string_view call) {
  const RankOfGroup me(ranks);
  const CallOptions options{.label = std::string(call)};
  const std::int64_t digest[] = {key_of(fmt::format("{}", fmt::join(keys, " ")))};
  const std::vector<std::int64_t> digests = of_all_ranks(ranks, digest, options);
  if (std::ranges::all_of(digests, [&](std::int64_t other) { return other == digests[0]; }))
    return std::vector<bool>(keys.size(), me.rank == 0);
  std::set<std::int64_t> before;
  const auto lists = lists_of_all(ranks, keys, options);
  for (int rank = 0; rank < me.rank; ++rank)
    before.insert(lists[static_cast<std::size_t>(rank)].begin(), lists[static_cast<std::size_t>(rank)].end());
  std::vector<bool> first;
  for (const std::int64_t key : keys) first.push_back(!before.contains(key));
  return first;
}

}  // namespace sherd::shard
