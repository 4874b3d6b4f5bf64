#include "shard/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "shard/root.h"
#include "shard/unit.h"

namespace sherd::shard {
namespace {

using Kind = Plan::Step::Kind;

/// A step in the order of its place, without those that it brings along.
struct Event {
  std::shared_ptr<Gathered> gathered;
  std::uint64_t place;
  Kind kind;
};

/// What the records, and the graph beside them, say of each group and of its wholes.
class Events {
 public:
  void add(const Record& record);
  void add_outside(std::span<const std::shared_ptr<ParameterGroup>> begun);
  void add_pending();
  std::vector<Event> sorted() const;
  std::vector<Plan::Held> held() const;

 private:
  struct OfGathered {
    std::shared_ptr<Gathered> gathered;
    std::uint64_t first, last;  ///< places between which it may be read
  };
  struct OfGroup {
    std::shared_ptr<Gathered> widest;  ///< of those that were used: whose dtype gradients come in
    std::uint64_t first;
    bool used = false;  ///< `widest`, and not only found there
  };
  OfGathered& concern(const std::shared_ptr<Gathered>& gathered);
  OfGroup& reduce(const std::shared_ptr<Gathered>& gathered);

  // In the order in which they were met, and where to find them.
  std::vector<OfGathered> gathereds_;
  std::unordered_map<const Gathered*, std::size_t> gathered_at_;
  std::vector<OfGroup> groups_;
  std::unordered_map<const ParameterGroup*, std::size_t> group_at_;
};

Events::OfGathered& Events::concern(const std::shared_ptr<Gathered>& gathered) {
  const auto [at, fresh] = gathered_at_.emplace(gathered.get(), gathereds_.size());
  if (fresh) gathereds_.push_back({gathered, std::uint64_t(-1), 0});
  return gathereds_[at->second];
}

Events::OfGroup& Events::reduce(const std::shared_ptr<Gathered>& gathered) {
  const auto [at, fresh] = group_at_.emplace(&gathered->group(), groups_.size());
  if (fresh) groups_.push_back({gathered, std::uint64_t(-1)});
  return groups_[at->second];
}

/// Of a group's uses in a record the last one says how long it may be read, also one without gradients: until
/// it was freed nobody noticed reads.
void Events::add(const Record& record) {
  std::unordered_map<const Gathered*, std::uint64_t> last;
  for (auto use = record.uses().rbegin(); use != record.uses().rend(); ++use) {
    const auto gathered = use->gathered.lock();
    if (!gathered) continue;
    const std::uint64_t last_read = last.emplace(gathered.get(), use->last_read()).first->second;
    if (!use->planned) continue;
    OfGathered& of = concern(gathered);
    of.last = std::max(of.last, last_read);
    of.first = std::min(of.first, use->first_read());
    OfGroup& group = reduce(gathered);
    group.first = std::min(group.first, use->place);
    if (use->moment == Record::Moment::kept) continue;  // an evaluation in full precision trains nothing
    if (!std::exchange(group.used, true) || gathered->dtype() == gathered->group().shard().dtype())
      group.widest = gathered;
  }
}

/// Used where no record says when: held throughout.
void Events::add_outside(std::span<const std::shared_ptr<ParameterGroup>> begun) {
  for (const auto& group : begun) {
    if (group_at_.contains(group.get())) continue;
    const auto gathered = group->in_use().shared();
    reduce(gathered).first = 0;
    OfGathered& of = concern(gathered);
    of.first = 0;
    of.last = std::uint64_t(-1);
  }
}

/// What earlier backwards left to the next reduction of these roots.
void Events::add_pending() {
  std::vector<std::shared_ptr<Root>> roots;
  for (const OfGroup& of : groups_)
    if (const auto& root = of.widest->group().root(); std::ranges::find(roots, root) == roots.end())
      roots.push_back(root);
  for (const auto& root : roots)
    for (const auto& group : root->groups()) {
      if (!group->gradients().pending() || !group->reduces() || group_at_.contains(group.get())) continue;
      const auto gathered = group->in_use().shared();
      reduce(gathered).first = 0;
      concern(gathered).first = 0;  // no more is read of it than was
    }
}

/// A group is gathered before its last use and reduced after its first one.
std::vector<Event> Events::sorted() const {
  std::vector<Event> events;
  for (const OfGathered& of : gathereds_)
    if (of.last > 0 && !of.gathered->kept_whole() &&
        of.gathered->group().spec().backward_gather == BackwardGather::yes)
      events.push_back({of.gathered, of.last, Kind::gather});
  for (const OfGroup& of : groups_)
    if (of.widest->group().spec().backward_gather == BackwardGather::yes)
      events.push_back({of.widest, of.first, Kind::reduce});
  std::ranges::stable_sort(events, std::greater<>{}, &Event::place);
  return events;
}

std::vector<Plan::Held> Events::held() const {
  std::vector<Plan::Held> held;
  for (const OfGathered& of : gathereds_) held.push_back({of.gathered, of.first});
  std::ranges::stable_sort(held, std::greater<>{}, &Plan::Held::until);
  return held;
}

/// What modules that the program named have, those that are gone left out.
std::vector<const ParameterGroup*> groups_in(std::span<const std::weak_ptr<Unit>> units) {
  std::vector<const ParameterGroup*> groups;
  for (const auto& unit : alive(units))
    for (const Members& m : unit->members()) groups.push_back(m.group.get());
  return groups;
}

}  // namespace

/// A gather, or a reduction, brings those ahead of it.
Plan::Plan(std::vector<Record*>& records, std::span<const std::shared_ptr<ParameterGroup>> begun) {
  std::ranges::sort(records, std::greater<>{}, &Record::number);
  Events found;
  for (const Record* record : records) found.add(*record);
  found.add_outside(begun);
  found.add_pending();
  const std::vector<Event> events = found.sorted();
  std::vector<std::shared_ptr<Gathered>> gathers;
  for (const Event& event : events)
    if (event.kind == Kind::gather) gathers.push_back(event.gathered);
  std::unordered_set<const Gathered*> listed;
  std::size_t due = 0;
  for (const Event& event : events) {
    const bool reduces = event.kind == Kind::reduce;
    const auto list = [&](const std::shared_ptr<Gathered>& gathered) {
      if (listed.insert(gathered.get()).second)
        steps_.push_back({Kind::gather, gathered, event.place, gathered->group().name(), reduces});
    };
    if (reduces) {
      steps_.push_back({Kind::reduce, event.gathered, event.place, event.gathered->group().name()});
    } else {
      list(event.gathered);
      ++due;
    }
    const ParameterGroup& group = event.gathered->group();
    const BackwardPrefetch ahead = group.root()->policy().backward_prefetch;
    if (group.switches.backward_prefetch) {
      for (const ParameterGroup* next : groups_in(*group.switches.backward_prefetch))
        for (const auto& gathered : gathers)
          if (!reduces && &gathered->group() == next) list(gathered);
    } else if (reduces == ahead.after_reduction()) {
      for (std::size_t i = due; i < gathers.size() && i < due + static_cast<std::size_t>(ahead.groups()); ++i)
        list(gathers[i]);
    }
  }
  held_ = found.held();
  for (const Held& held : held_) turn_of_[held.gathered.get()] = 0;
  for (std::size_t i = 0; i < steps_.size(); ++i)
    if (steps_[i].kind == Kind::gather) turn_of_[steps_[i].gathered.get()] = i + 1;
}

std::vector<std::shared_ptr<ParameterGroup>> Plan::groups() const {
  std::vector<std::shared_ptr<ParameterGroup>> groups;
  for (const Step& step : steps_)
    if (step.kind == Kind::reduce) groups.push_back(step.group().shared_from_this());
  return groups;
}

std::string Plan::text() const {
  std::string text;
  for (const Step& step : steps_)
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ",
                        step.kind == Kind::reduce ? "reduce"
                        : step.early              ? "gather early"
                                                  : "gather",
                        step.name->module);
  return text;
}

}  // namespace sherd::shard
