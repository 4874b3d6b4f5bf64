#include "shard/sharded_state.h"

#include <algorithm>
#include <functional>
#include <set>

#include "nn/state_names.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "runtime/shown.h"
#include "shard/agree.h"
#include "shard/group.h"
#include "shard/holders.h"
#include "shard/state_source.h"

namespace sherd::shard {
namespace {

/// Elements of a run that this rank gives of those that several ranks have of it.
struct Given {
  std::int64_t offset = 0, numel = 0;
};

Given given_by(const ShardedTensor& t, int rank) {
  const std::int64_t numel = t.values.numel();
  if (t.replicas == 0) return {.numel = rank > 0 ? 0 : numel};
  const std::int64_t begin = numel * t.replica / t.replicas;
  return {begin, numel * (t.replica + 1) / t.replicas - begin};
}

/// What a rank says of a tensor before any reads it.
struct Announcement {
  std::int64_t name, shape;  // `key_of` their texts
  std::int64_t begin, numel, steps, dtype;
};
constexpr std::size_t numbers_of_announcement = sizeof(Announcement) / sizeof(std::int64_t);

/// What ranks hold together. All of them read the same tensors in the same order, so what one refuses of a
/// tensor the others have to refuse before anyone reads: all announce their runs first.
class RanksSource final : public StateSource {
 public:
  /// Collective.
  RanksSource(std::string_view call, const ShardedStateDict& state, const Group& ranks, EntryGroups groups)
      : call_(call), ranks_(ranks), groups_(groups) {
    together(ranks, call, [&] { add(state); });
    std::vector<std::int64_t> numbers;
    for (const ShardedTensor& t : state) {
      const Given own = given(t);
      numbers.insert(numbers.end(), {key_of(t.name), key_of(to_string(t.shape)), t.begin + own.offset,
                                     own.numel, t.steps, static_cast<std::int64_t>(t.values.dtype())});
    }
    const auto lists = lists_of_all(ranks, numbers, {.label = std::string(call)});
    for (const std::vector<std::int64_t>& list : lists) {
      auto& of_rank = announced_.emplace_back();
      for (std::size_t i = 0; i < list.size(); i += numbers_of_announcement)
        of_rank[list[i]] = {list[i], list[i + 1], list[i + 2], list[i + 3], list[i + 4], list[i + 5]};
    }
  }
  std::vector<std::string> names() const override { return names_; }
  std::optional<Shape> shape(const std::string& name) const override {
    const auto found = tensors_.find(name);
    return found == tensors_.end() ? std::nullopt : std::optional(found->second->shape);
  }
  std::int64_t steps(const std::string& name) const override {
    const auto found = tensors_.find(name);
    return found == tensors_.end() ? 0 : found->second->steps;
  }
  const ShardedTensor& own(const std::string& name) const { return *tensors_.at(name); }
  Tensor read(const std::string& name, std::int64_t begin, std::int64_t numel) const override {
    const ShardedTensor& mine = own(name);
    const Group& holders = holders_of(name);
    const int rank = RankOfGroup(holders).rank;
    const Tensor whole = empty({mine.shape.numel()}, {mine.values.dtype(), mine.values.device()});
    for (const Run& run : runs_of(name)) {
      if (run.numel == 0) continue;
      const Tensor part = narrow(whole, 0, run.begin, run.numel);
      if (run.rank == rank) copy_(part, narrow(mine.values, 0, given(mine).offset, run.numel));
      if (holders.defined())
        holders.broadcast(part, run.rank, {.label = fmt::format("{} of {}", call_, name)});
    }
    return clone(narrow(whole, 0, begin, numel));
  }
  /// ValueError where the runs of all that hold a tensor are not the whole of one. No call: all of them find
  /// the same.
  void check_runs(const std::string& name) const {
    const ShardedTensor& mine = own(name);
    std::int64_t filled = 0;
    const std::vector<Run> runs = runs_of(name);
    const Group& holders = holders_of(name);
    check<ValueError>(
        std::ssize(runs) == RankOfGroup(holders).ranks,
        "{}: {} of the {} ranks that hold '{}' have it in their states; take all from one state", call_,
        runs.size(), RankOfGroup(holders).ranks, name);
    for (const Run& run : runs) {
      const Run& first = runs[0];
      const int one = among_all(holders, first.rank), other = among_all(holders, run.rank);
      check<ValueError>(run.shape == first.shape,
                        "{}: of '{}' the ranks {} and {} have unlike shapes, here {}", call_, name, one,
                        other, mine.shape);
      check<ValueError>(run.dtype == first.dtype, "{}: of '{}' rank {} has values of {} and rank {} of {}",
                        call_, name, one, static_cast<DType>(first.dtype), other,
                        static_cast<DType>(run.dtype));
      check<ValueError>(
          run.steps == first.steps,
          "{}: of '{}' rank {} has the values of {} steps and rank {} those of {}; take all from one "
          "state",
          call_, name, one, first.steps, other, run.steps);
      if (run.numel == 0) continue;
      check<ValueError>(run.begin == filled, "{}: of '{}' the next elements after the first {} begin at {}",
                        call_, name, filled, run.begin);
      filled += run.numel;
    }
    check<ValueError>(filled == mine.shape.numel(),
                      "{}: the ranks have {} of the {} elements of '{}'; give the group of all that hold it",
                      call_, filled, mine.shape.numel(), name);
  }

 private:
  struct Run : Announcement {
    int rank;  ///< among the holders
  };
  void add(const ShardedStateDict& state) {
    for (const ShardedTensor& t : state) {
      check<ValueError>(tensors_.emplace(t.name, &t).second, "{}: the state has '{}' twice", call_, t.name);
      check<ValueError>(t.values.defined() && t.values.rank() == 1,
                        "{}: the values of '{}' are no tensor of one dimension", call_, t.name);
      check<ValueError>(t.replica >= 0 && t.replica < std::max(t.replicas, 1),
                        "{}: '{}' is replica {} of {}; they count from 0", call_, t.name, t.replica,
                        t.replicas);
      check<ValueError>(t.replicas > 0 || (t.begin == 0 && t.values.numel() == t.shape.numel()),
                        "{}: '{}' has {} elements from {} on, where each rank has all {}", call_, t.name,
                        t.values.numel(), t.begin, t.shape.numel());
      names_.push_back(t.name);
    }
  }
  Given given(const ShardedTensor& t) const {
    const GroupOfName& group = groups_.of(t.name);
    const Ranks& holders = group.holders;
    const bool replicas_read_apart =
        !group.words.empty() && holders.shard.defined() == holders.replicas.defined();
    if (replicas_read_apart && t.replicas > 0) return {.numel = t.values.numel()};
    return given_by(t, RankOfGroup(holders_of(t.name)).rank);
  }
  /// Of the ranks that read a tensor together, those that have its runs; none: this rank alone.
  const Group& holders_of(const std::string& name) const {
    const GroupOfName& group = groups_.of(name);
    if (group.words.empty()) return ranks_;
    return group.holders.shard.defined() ? group.holders.shard : group.holders.replicas;
  }
  /// Of all holders that announced one, by their begin; the same on every rank of them.
  std::vector<Run> runs_of(const std::string& name) const {
    const Group& holders = holders_of(name);
    std::vector<Run> runs;
    for (int rank = 0; rank < RankOfGroup(holders).ranks; ++rank) {
      const auto& of_rank = announced_[static_cast<std::size_t>(among_all(holders, rank))];
      const auto found = of_rank.find(key_of(name));
      if (found != of_rank.end()) runs.push_back({found->second, rank});
    }
    std::ranges::stable_sort(runs, {}, &Run::begin);
    return runs;
  }
  /// The number among all ranks of one of a tensor's holders.
  int among_all(const Group& holders, int rank) const {
    if (!ranks_.defined()) return 0;
    if (!holders.defined()) return ranks_.rank();
    const int wanted = holders.world_ranks()[static_cast<std::size_t>(rank)];
    return static_cast<int>(std::ranges::find(ranks_.world_ranks(), wanted) - ranks_.world_ranks().begin());
  }

  std::string_view call_;
  const Group& ranks_;
  EntryGroups groups_;
  std::vector<std::string> names_;
  std::unordered_map<std::string, const ShardedTensor*> tensors_;
  std::vector<std::unordered_map<std::int64_t, Announcement>> announced_;  ///< of each rank, by name
};

/// The same without a call: what other ranks have counts as zeros.
class OwnSource final : public StateSource {
 public:
  explicit OwnSource(const RanksSource& all) : all_(all) {}
  std::vector<std::string> names() const override { return all_.names(); }
  std::optional<Shape> shape(const std::string& name) const override { return all_.shape(name); }
  std::int64_t steps(const std::string& name) const override { return all_.steps(name); }
  Tensor read(const std::string& name, std::int64_t begin, std::int64_t numel) const override {
    all_.check_runs(name);
    const ShardedTensor& own = all_.own(name);
    const Tensor part = zeros({numel}, {own.values.dtype(), own.values.device()});
    const std::int64_t from = std::max(begin, own.begin),
                       to = std::min(begin + numel, own.begin + own.values.numel());
    if (from < to)
      copy_(narrow(part, 0, from - begin, to - from), narrow(own.values, 0, from - own.begin, to - from));
    return part;
  }

 private:
  const RanksSource& all_;
};

/// What `act` refuses by names, shapes and numbers it refuses on all ranks before any of them reads what
/// others have: groups of ranks read apart, and one of another group would wait for who does not come.
void in_two_passes(std::string_view call, const ShardedStateDict& state, const Group& ranks,
                   EntryGroups groups, const std::function<void(const StateSource&)>& act) {
  const RanksSource source(call, state, ranks, groups);
  together(ranks, call, [&] {
    groups.groups.check_complete(call);
    act(OwnSource(source));
  });
  together(ranks, call, [&] { act(source); });
}

}  // namespace

ShardedTensor share_of(const ShardedTensor& t, int rank) {
  ShardedTensor share = t;
  const Given given = given_by(t, rank);
  share.begin += given.offset;
  share.values = narrow(t.values, 0, given.offset, given.numel);
  return share;
}

WholeSource::WholeSource(std::string_view call, const nn::StateDict& state) {
  for (const auto& [name, tensor] : state) {
    check<ValueError>(tensors_.emplace(name, tensor).second, "{}: the state has '{}' twice", call, name);
    names_.push_back(name);
  }
  for (const auto& [name, why] : state.unread) names_.push_back(name);
  unread_.insert(state.unread.begin(), state.unread.end());
}

std::string StateSource::instead_of(const std::string& name) const { return nn::names_beside(names(), name); }

std::string WholeSource::instead_of(const std::string& name) const {
  const auto why = unread_.find(name);
  return why == unread_.end() ? StateSource::instead_of(name) : not_read(why->second);
}

std::vector<std::string> WholeSource::names() const { return names_; }

std::vector<std::string> UsedNames::others(const StateSource& from) const {
  std::vector<std::string> names = from.names();
  std::erase_if(names, [&](const std::string& name) { return used_.contains(name); });
  return names;
}

void check_none_left(std::string_view call, std::span<const std::string> left, std::string_view what) {
  check<ValueError>(left.empty(),
                    "{}: {} of the state's entries belong to no {} here, among them '{}'; load it into what "
                    "it was taken from, with the same groups, or take them out of the state",
                    call, left.size(), what, shown(left.empty() ? "" : *std::ranges::min_element(left)));
}

std::optional<Shape> WholeSource::shape(const std::string& name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? std::nullopt : std::optional(found->second.shape());
}

Tensor WholeSource::read(const std::string& name, std::int64_t begin, std::int64_t numel) const {
  const Tensor& whole = tensors_.at(name);
  return clone(narrow(reshape(whole, {whole.numel()}), 0, begin, numel));
}

nn::Mismatch load_sharded_state_dict(nn::Module& module, const ShardedStateDict& state, const Group& ranks,
                                     nn::Strict strict) {
  std::optional<StagedModel> staged;
  constexpr std::string_view call = "load_sharded_state_dict";
  const NameGroups groups(call, module, ranks);
  in_two_passes(call, state, ranks, {groups, entry_itself}, [&](const StateSource& source) {
    staged.emplace(call, module, source, strict);
    if (strict == nn::Strict::yes) check_none_left(call, staged->mismatch().unknown, StagedModel::what);
  });
  staged->commit();
  return staged->mismatch();
}

namespace {

void load(nn::Module* model, nn::Optimizer& optimizer, const ShardedStateDict& state, const Group& ranks) {
  const NoGrad guard;
  std::function<void()> commit;
  constexpr std::string_view call = "load_sharded_optimizer_state";
  std::set<std::string> in_state;
  for (const ShardedTensor& t : state) in_state.insert(parameter_of_state(t.name));
  const NameGroups groups(call, [&] { return held_in_state(optimizer, model, in_state); }, ranks);
  in_two_passes(call, state, ranks, {groups, parameter_of_state}, [&](const StateSource& source) {
    StagedOptimizer staged = staged_optimizer_state(optimizer, source, model);
    check_none_left("optimizer", staged.unknown, StagedOptimizer::what);
    commit = optimizer.stage_state_dict(std::move(staged.part));
  });
  commit();
}

}  // namespace

void load_sharded_optimizer_state(nn::Optimizer& optimizer, const ShardedStateDict& state,
                                  const Group& ranks) {
  load(nullptr, optimizer, state, ranks);
}
void load_sharded_optimizer_state(nn::Module& model, nn::Optimizer& optimizer, const ShardedStateDict& state,
                                  const Group& ranks) {
  load(&model, optimizer, state, ranks);
}

}  // namespace sherd::shard
