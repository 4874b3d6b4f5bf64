#include "shard/step_check.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>

#include "autograd/capture/effects.h"
#include "autograd/node.h"
#include "collectives/observe.h"
#include "nn/shared_gradients.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "runtime/shown.h"
#include "shard/agree.h"
#include "shard/holders.h"
#include "shard/unit.h"

namespace sherd::shard {
namespace {

using Numbers = std::vector<std::int64_t>;

/// The renewals of a rank.
class Renewals {
 public:
  Renewals() : watching_(after_renewals([this](const Group& group) { add(group); })) {}
  static Renewals& current() { return Context::current().slot<Renewals>(); }
  std::uint64_t last() const { return last_; }

  /// Which ranks of a model have renewed a group with this one since renewal `seen`. Needs no call: who
  /// shares a group with this rank has renewed it too.
  enum class By : std::uint8_t { none, some, all };
  By renewed_by(const Ranks& ranks, std::uint64_t seen) const {
    bool any = false, shards = !ranks.shard.defined(), replicas = !ranks.replicas.defined();
    for (const Renewed& r : renewed_) {
      if (!counts(r, seen) || watches(r.group, ranks.block)) continue;
      any = true;
      shards = shards || has(r, ranks.shard);
      replicas = replicas || has(r, ranks.replicas);
    }
    return !any ? By::none : shards && replicas ? By::all : By::some;
  }
  std::string name_since(std::uint64_t seen) const {
    const auto found = std::ranges::find_if(renewed_, [&](const Renewed& r) { return counts(r, seen); });
    return found == renewed_.end() ? std::string() : found->name;
  }

 private:
  struct Renewed {
    std::weak_ptr<const void> group;
    std::vector<int> members;  ///< in the world
    std::string name;
    std::uint64_t number;  ///< the last time
  };
  static bool counts(const Renewed& r, std::uint64_t seen) { return r.number > seen && r.members.size() > 1; }
  static bool has(const Renewed& r, const Group& group) {
    if (!group.defined()) return true;
    return std::ranges::all_of(
        group.world_ranks(), [&](int rank) { return std::ranges::find(r.members, rank) != r.members.end(); });
  }
  /// One entry a group, however often it is renewed.
  void add(const Group& group) {
    ++last_;
    const auto known =
        std::ranges::find_if(renewed_, [&](const Renewed& r) { return watches(r.group, group); });
    if (known != renewed_.end()) return void(known->number = last_);
    std::erase_if(renewed_, [](const Renewed& r) { return r.group.expired(); });
    const auto members = group.world_ranks();
    renewed_.push_back({group.watch(), {members.begin(), members.end()}, group.name(), last_});
  }

  std::uint64_t last_ = 0;
  std::vector<Renewed> renewed_;
  Subscription watching_;
};

/// "5 on ranks 0 and 2, 4 on rank 1", of what ranks have, `here` on this one.
std::string by_rank(const Compared& c, const Range& here, bool broken_off = false) {
  constexpr std::size_t words = 4, most_ranks = 8;
  const Group& own = c.ranks.shard.defined() ? c.ranks.shard : c.ranks.replicas;
  Numbers all{own.world_ranks()[static_cast<std::size_t>(own.rank())], here.least, here.most,
              broken_off ? 1 : 0};
  for (const Group& group : {c.ranks.shard, c.ranks.replicas})
    all = of_all_ranks(group, all, {.label = "unlike steps", .channel = c.channel});
  std::map<std::string, Numbers, std::greater<>> ranks;
  for (std::size_t i = 0; i < all.size(); i += words) {
    if (all[i + 1] == no_number) continue;
    std::string text = fmt::format("{}", all[i + 1]);
    if (all[i + 2] != all[i + 1]) text += fmt::format(" to {}", all[i + 2]);
    ranks[text + (all[i + 3] != 0 ? " and a part of one" : "")].push_back(all[i]);
  }
  std::string said;
  for (auto& [text, of] : ranks) {
    std::ranges::sort(of);
    const std::size_t left = of.size() > most_ranks ? of.size() - most_ranks : 0;
    of.resize(of.size() - left);
    said += fmt::format("{}{} on rank{} {}{}", said.empty() ? "" : ", ", text, of.size() == 1 ? "" : "s",
                        fmt::join(of, " and "), left > 0 ? fmt::format(" and {} others", left) : "");
  }
  return said;
}

/// What is told of the numbers of one kind that are unlike: the least and the most here of them.
[[noreturn]] void fail_steps(const Compared& c, std::span<const std::int64_t> mine,
                             std::span<const Range> ranges, std::size_t kind) {
  constexpr std::string_view what[] = {"steps", "steps with gradients", "steps in the optimizer's state"};
  Range here;
  bool broken_off = false;
  for (std::size_t i = kind; i < mine.size(); i += numbers_a_parameter) {
    if (whole(ranges, i)) continue;
    here.add(kind == 0 ? mine[i] / 2 : mine[i]);
    broken_off = broken_off || (kind == 0 && mine[i] % 2 != 0);
  }
  fail<StateError>(
      "{}: a fault, or batches of unlike numbers (join), cost some ranks of {} a step: {} are {}; {}{}",
      c.call, c.model, what[kind], by_rank(c, here, broken_off),
      c.ranks.replicas.defined() ? "bring_up(model, optimizer) on every rank, or " : "",
      load_a_checkpoint(c.parameters));
}

void compare_models(const Compared& c) {
  const CallOptions call{.label = "model after renew", .channel = c.channel};
  const auto alike = [&](std::int64_t identity, const Ranks& ranks) {
    return std::ranges::all_of(over_ranks(Numbers{identity, std::ssize(c.parameters)}, ranks, call),
                               &Range::alike);
  };
  const bool on_shard = alike(c.identity.on_shard, {.shard = c.ranks.shard, .replicas = {}, .block = {}});
  const bool on_replicas =
      alike(c.identity.on_replicas, {.shard = {}, .replicas = c.ranks.replicas, .block = {}});
  check<StateError>(
      over_ranks(Numbers{on_shard && on_replicas}, c.ranks, call)[0].least == 1,
      "{}: ranks go on with unlike calls after renew(), here of {}, which has {} parameters; go on "
      "with one call of one model on every rank",
      c.call, c.model, c.parameters.size());
}

void compare_steps(const Compared& c) {
  const Numbers mine = numbers_of(c.parameters);
  const std::vector<Range> ranges =
      over_ranks(mine, c.ranks, {.label = std::string(c.label), .channel = c.channel});
  for (std::size_t kind = 0; kind < c.kinds; ++kind)
    for (std::size_t i = kind; i < ranges.size(); i += numbers_a_parameter)
      if (!whole(ranges, i)) fail_steps(c, mine, ranges, kind);
}

void compare_gradients(const Compared& c) {
  const std::vector<Range> ranges =
      over_ranks(c.gradients, c.ranks, {.label = "gradients after renew", .channel = c.channel});
  if (std::ranges::all_of(ranges, &Range::alike)) return;
  Range here;
  for (std::size_t i = 0; i < ranges.size(); ++i)
    if (!ranges[i].alike() && c.gradients[i] != no_number) here.add(HeldAverages::count_in(c.gradients[i]));
  for (ParameterGroup* group : c.groups) group->gradients().forget_sums();  // which zero_grad leaves
  fail<StateError>(
      "{}: after a fault .grad of {} holds averages of unlike backwards, or some that only a part of the "
      "ranks has clipped or unscaled: {}; zero_grad() on every rank, and go on",
      c.call, c.model, by_rank(c, here));
}

/// `compare`, unless nothing was renewed since it last passed.
void check_after_renewal(const Compared& c, std::uint64_t StepCheck::* seen,
                         void (*compare)(const Compared&)) {
  const Renewals& renewals = Renewals::current();
  std::uint64_t first = renewals.last();
  for (const StepCheck* check : c.checks) first = std::min(first, check->*seen);
  if (first == renewals.last()) return;
  const Renewals::By by = renewals.renewed_by(c.ranks, first);
  check<StateError>(by != Renewals::By::some,
                    "{}: group {} was renewed after a fault, and not all ranks of {} are in it: the others "
                    "may have taken a step that this one lost; renew() the mesh, or a group of all of them",
                    c.call, renewals.name_since(first), c.model);
  const std::uint64_t now = renewals.last();
  if (by == Renewals::By::all && (c.ranks.shard.defined() || c.ranks.replicas.defined())) {
    const Housekeeping guard;
    compare(c);
  }
  for (StepCheck* check : c.checks) check->*seen = now;
}

}  // namespace

bool StepCheck::due() const {
  const std::uint64_t last = Renewals::current().last();
  return steps != last || gradients != last;
}

StepCheck::StepCheck() : steps(Renewals::current().last()), gradients(steps) {}

std::vector<Range> over_ranks(std::span<const std::int64_t> numbers, const Ranks& ranks,
                              const CallOptions& options) {
  Numbers ends;
  for (const std::int64_t n : numbers) {
    ends.push_back(n);
    ends.push_back(n == no_number ? n : -n);
  }
  for (const Group& group : {ranks.shard, ranks.replicas}) {
    if (!group.defined() || ends.empty()) continue;
    const Tensor all = Tensor::from(ends, {std::ssize(ends)}, Device::cpu());
    group.all_reduce(all, ReduceOp::max(), options);
    ends = all.to_vector<std::int64_t>();
  }
  std::vector<Range> ranges;
  for (std::size_t i = 0; i < ends.size(); i += 2)
    ranges.push_back({ends[i + 1] == no_number ? no_number : -ends[i + 1], ends[i]});
  return ranges;
}

Numbers numbers_of(std::span<const nn::Parameter> parameters) {
  Numbers numbers;
  for (const nn::Parameter& p : parameters) {
    const nn::StepCount& count = p.step_count();
    const bool here = p.local().numel() > 0;  // in the flat layout what is not has no gradient
    numbers.insert(numbers.end(), {2 * count.steps + (count.broken_off ? 1 : 0),
                                   here ? count.written : no_number, here ? count.state : no_number});
  }
  return numbers;
}

bool whole(std::span<const Range> ranges, std::size_t i) {
  return ranges[i].alike() && (i % numbers_a_parameter != 0 || ranges[i].most % 2 == 0);
}

void remember_checkpoint(const nn::Module& model, const std::string& folder) {
  const auto shared = std::make_shared<const std::string>(folder);
  for (const nn::NamedParameter& p : model.named_parameters()) p.parameter.step_count().checkpoint = shared;
}

std::string load_a_checkpoint(std::span<const nn::Parameter> parameters) {
  std::string said = "load a checkpoint of model and optimizer";
  for (const nn::Parameter& p : parameters)
    if (const auto& last = p.step_count().checkpoint)
      return said + fmt::format(", the last of which is '{}'", shown(*last, 300));
  return said;
}

void check_steps(const Compared& compared) {
  check_after_renewal(compared, &StepCheck::steps, [](const Compared& c) {
    compare_models(c);
    compare_steps(c);
  });
}

void check_saved_steps(const nn::Module& module, Saved saved, const Group& ranks) {
  if (!ranks.defined() || ranks.size() == 1) return;
  const Housekeeping guard;
  const Ranks all{.shard = {}, .replicas = ranks, .block = {}};
  Compared c{"save_checkpoint", std::string(module.type_name()), {}, all, 0};
  c.label = c.call;
  c.kinds = saved == Saved::values ? numbers_a_parameter - 1 : numbers_a_parameter;
  std::string names;
  for (const nn::NamedParameter& p : module.named_parameters()) {
    const bool shared = group_of(p.parameter) != nullptr ||
                        dynamic_cast<const nn::SharedGradients*>(sink_of(p.parameter.local())) != nullptr;
    if (!shared) continue;  // the program's own
    c.parameters.push_back(p.parameter);
    names += p.name + '\n';
  }
  const Numbers same{std::ssize(c.parameters), key_of(names)};
  if (std::ranges::all_of(over_ranks(same, all, {.label = std::string(c.label)}), &Range::alike))
    compare_steps(c);
}

void check_gradients(const Compared& compared) {
  check_after_renewal(compared, &StepCheck::gradients, compare_gradients);
}

// ---- of sharded modules ----

namespace {

using Units = std::vector<std::shared_ptr<Unit>>;

/// A list for each choice of ranks that groups live on, in the order of units.
std::deque<Compared> compared(std::string_view model, const Units& units) {
  std::deque<Compared> lists;
  for (const auto& unit : units)
    for (const Members& m : unit->members()) {
      const Ranks& ranks = m.group->spec().ranks;
      auto list = std::ranges::find_if(lists, [&](const Compared& c) {
        return c.ranks.shard == ranks.shard && c.ranks.replicas == ranks.replicas;
      });
      if (list == lists.end()) {
        const CallName& name = *m.group->name();
        const ModelNumber number = ranks.shard.defined() ? name.on_shard : name.on_replicas;
        lists.push_back(
            {"fully_shard", number.called(std::string(model)), m.group->identity(), ranks, gather_channel});
        list = lists.end() - 1;
      }
      if (m.flat.defined())
        list->parameters.push_back(m.flat);
      else
        list->parameters.insert(list->parameters.end(), m.parameters.begin(), m.parameters.end());
      std::ranges::copy(m.group->gradients().averages(), std::back_inserter(list->gradients));
      list->checks.push_back(&m.group->step_check);
      list->groups.push_back(m.group.get());
    }
  return lists;
}

/// Calls are the engine's own: nothing of a backward is due before them.
void check_units(std::string_view model, const Units& units, bool backward) {
  if (capturing_calls()) {  // the first replay after a renewal compares
    repeat_in_replays([model = std::string(model),
                       weak = std::vector<std::weak_ptr<Unit>>(units.begin(), units.end()),
                       backward] { check_units(model, alive<Unit>(weak), backward); });
    return;
  }
  const bool due = std::ranges::any_of(units, [](const auto& unit) {
    return std::ranges::any_of(unit->members(), [](const Members& m) { return m.group->step_check.due(); });
  });
  if (!due) return;
  const Engine::OwnCalls own_calls;
  for (const Compared& c : compared(model, units)) {
    check_steps(c);
    if (backward) check_gradients(c);
  }
}

Units units_in(nn::Module& module) {
  Units units;
  for (const NamedUnit& u : units_of(module)) units.push_back(u.unit->shared_from_this());
  return units;
}

std::string_view model_of(const Units& units) {
  return units.empty() ? std::string_view() : std::string_view(units.front()->policy().type);
}

}  // namespace

void check_steps(StepCheck& of_root, nn::Module& root) {
  const std::uint64_t now = Renewals::current().last();
  if (of_root.steps == now && !capturing_calls()) return;
  check_units(root.type_name(), units_in(root), false);
  if (!capturing_calls()) of_root.steps = now;  // else replays compare, and nobody has yet
}

void check_backward(const Units& units) {
  if (Renewals::current().last() == 0 && !capturing_calls()) return;
  check_units(model_of(units), units, true);
}

void check_steps(const ParameterGroup& group) {
  if (group.step_check.steps == Renewals::current().last() || capturing_calls()) return;
  const Units units = group.root()->units();
  check_units(model_of(units), units, false);
}

void check_steps(nn::Module& module) {
  if (Renewals::current().last() == 0 || capturing_calls()) return;
  check_units(module.type_name(), units_in(module), false);
  std::vector<Replicated*> replicated;
  for (const nn::NamedParameter& p : module.named_parameters()) {
    auto* const its = dynamic_cast<Replicated*>(sink_of(p.parameter.local()));
    if (its != nullptr && std::ranges::find(replicated, its) == replicated.end()) replicated.push_back(its);
  }
  for (Replicated* of : replicated) of->check_ranks();
}

void check_steps(std::span<const nn::Parameter> parameters) {
  if (Renewals::current().last() == 0 || capturing_calls()) return;
  Units units;
  for (const nn::Parameter& p : parameters)
    if (Unit* unit = unit_of(p);
        unit != nullptr && std::ranges::find(units, unit, &Units::value_type::get) == units.end())
      units.push_back(unit->shared_from_this());
  check_units("the optimizer's model", units, false);
}

}  // namespace sherd::shard
