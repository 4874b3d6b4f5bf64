#include "shard/sharded_state.h"

#include <algorithm>
#include <functional>

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

/// What ranks hold together. All of them read the same tensors in the same order.
class RanksSource final : public StateSource {
 public:
  RanksSource(std::string_view call, const ShardedStateDict& state, const Group& ranks, EntryGroups groups)
      : call_(call), ranks_(ranks), groups_(groups) {
    for (const ShardedTensor& t : state) {
      check<ValueError>(tensors_.emplace(t.name, &t).second, "{}: the state has '{}' twice", call_, t.name);
      names_.push_back(t.name);
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
    const ShardedTensor& own = this->own(name);
    const GroupOfName& group = groups_.of(name);
    if (group.words.empty()) return read(share_of(own, RankOfGroup(ranks_).rank), begin, numel, ranks_);
    if (own.replicas == 0) return clone(narrow(own.values, 0, begin, numel));
    const auto& [shards, replicas, block] = group.holders;
    if (shards.defined() && replicas.defined()) return read(own, begin, numel, shards);
    return read(share_of(own, 0), begin, numel, shards.defined() ? shards : replicas);
  }

 private:
  struct Owned {
    std::int64_t begin, numel, steps;
    int rank;
  };
  /// From runs of which each is on one of `ranks`.
  Tensor read(const ShardedTensor& mine, std::int64_t begin, std::int64_t numel, const Group& ranks) const {
    const std::string& name = mine.name;
    const Tensor whole = empty({mine.shape.numel()}, {mine.values.dtype(), mine.values.device()});
    std::int64_t filled = 0;
    const std::vector<Owned> runs = everyones_runs(mine, ranks);
    for (const Owned& run : runs) {
      check<ValueError>(
          run.steps == runs[0].steps,
          "{}: of '{}' rank {} has the values of {} steps and rank {} those of {}; take all from one "
          "state",
          call_, name, runs[0].rank, runs[0].steps, run.rank, run.steps);
      check<ValueError>(run.begin == filled, "{}: of '{}' the next elements after the first {} begin at {}",
                        call_, name, filled, run.begin);
      const Tensor part = narrow(whole, 0, run.begin, run.numel);
      if (run.rank == RankOfGroup(ranks).rank) copy_(part, mine.values);
      if (ranks.defined()) ranks.broadcast(part, run.rank, {.label = fmt::format("{} of {}", call_, name)});
      filled += run.numel;
    }
    check<ValueError>(filled == whole.numel(),
                      "{}: the ranks have {} of the {} elements of '{}'; give the group of all that hold it",
                      call_, filled, whole.numel(), name);
    return clone(narrow(whole, 0, begin, numel));
  }
  /// All runs that have elements, by their begin; the same on every rank.
  std::vector<Owned> everyones_runs(const ShardedTensor& mine, const Group& ranks) const {
    const std::int64_t bounds[] = {mine.begin, mine.values.numel(), mine.steps};
    const auto numbers = of_all_ranks(ranks, bounds, {.label = fmt::format("{} of {}", call_, mine.name)});
    std::vector<Owned> runs;
    for (std::size_t i = 0; i < numbers.size(); i += 3)
      if (numbers[i + 1] > 0)
        runs.push_back({numbers[i], numbers[i + 1], numbers[i + 2], static_cast<int>(i / 3)});
    std::ranges::stable_sort(runs, {}, &Owned::begin);
    return runs;
  }

  std::string_view call_;
  const Group& ranks_;
  EntryGroups groups_;
  std::vector<std::string> names_;
  std::unordered_map<std::string, const ShardedTensor*> tensors_;
};

/// The same without a call: what other ranks have counts as zeros.
class OwnSource final : public StateSource {
 public:
  explicit OwnSource(const RanksSource& all) : all_(all) {}
  std::vector<std::string> names() const override { return all_.names(); }
  std::optional<Shape> shape(const std::string& name) const override { return all_.shape(name); }
  std::int64_t steps(const std::string& name) const override { return all_.steps(name); }
  Tensor read(const std::string& name, std::int64_t begin, std::int64_t numel) const override {
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
  std::optional<RanksSource> source;
  together(ranks, call, [&] {
    source.emplace(call, state, ranks, groups);
    act(OwnSource(*source));
  });
  together(ranks, call, [&] { act(*source); });
}

}  // namespace

ShardedTensor share_of(const ShardedTensor& t, int rank) {
  ShardedTensor share = t;
  const std::int64_t numel = t.values.numel();
  std::int64_t begin = 0, end = numel;
  if (t.replicas == 0) {
    if (rank > 0) end = 0;
  } else {
    begin = numel * t.replica / t.replicas;
    end = numel * (t.replica + 1) / t.replicas;
  }
  share.begin += begin;
  share.values = narrow(t.values, 0, begin, end - begin);
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
  const NameGroups groups(call, [&] { return held_in_state(optimizer, model); }, ranks);
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
