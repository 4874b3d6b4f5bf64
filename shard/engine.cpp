#include "shard/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "autograd/autograd.h"
#include "autograd/capture/capture.h"
#include "autograd/pass.h"
#include "autograd/tape.h"
#include "collectives/observe.h"
#include "runtime/apply.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "shard/early_steps.h"
#include "shard/unit.h"

namespace sherd::shard {
namespace {

/// A mark in the graph behind a root's outputs, by which every backward that reaches them hears of it before
/// it walks, also on a rank whose outputs depend on no parameter. Its first input, unchanged; the second,
/// empty one is the leaf whose sink hears.
struct Anchor {
  static constexpr std::string_view name = "anchor";
  static constexpr Arity arity = 2;
  static constexpr Reads reads{};
  sherd::Layout view(const Tensor& x) const { return x.layout(); }
  Tensors grad(const GradArgs& args) const { return {args.gy[0], empty(args.specs[1])}; }
  bool operator==(const Anchor&) const = default;
};

/// Puts the mark behind `output`.
void anchor(Tensor& output, std::shared_ptr<GradSink> sink) {
  Tensor leaf = empty({0}, {DType::f32, output.device()});
  leaf.requires_grad_();
  set_sink(leaf, std::move(sink));
  output = apply(Anchor{}, output, leaf);
}

bool is(const std::weak_ptr<Gathered>& a, const Gathered& b) { return a.lock().get() == &b; }

/// Those that are gone are looked for when as many were added as were there: a few steps for each.
template <class T>
void remember(std::vector<std::weak_ptr<T>>& list, const std::shared_ptr<T>& one) {
  if (list.size() == list.capacity()) {
    std::erase_if(list, [](const auto& weak) { return weak.expired(); });
    list.reserve(2 * list.size() + 1);
  }
  list.push_back(one);
}

/// What modules that the program named have, those that are gone left out.
std::vector<std::shared_ptr<ParameterGroup>> groups_in(std::span<const std::weak_ptr<Unit>> units) {
  std::vector<std::shared_ptr<ParameterGroup>> groups;
  for (const auto& weak : units)
    if (const auto unit = weak.lock())
      for (const Members& m : unit->members()) groups.push_back(m.group);
  return groups;
}

}  // namespace

// ---- records ----

void Record::add(Gathered& gathered, Moment moment) {
  auto region = recording_region();
  const bool planned = Context::current().grad_enabled() || region != nullptr;
  uses_.push_back({gathered.shared(), moment, next_place(), planned, std::move(region)});
}

std::uint64_t Record::next_place() { return Context::current().slot<Tape>().next_sequence(); }

void Record::set_freed_at(const Gathered& gathered, std::uint64_t place) {
  const auto last =
      std::find_if(uses_.rbegin(), uses_.rend(), [&](const Use& u) { return is(u.gathered, gathered); });
  if (last != uses_.rend()) last->freed_at = place;
}

bool Record::planned() const { return std::ranges::any_of(uses_, &Use::planned); }

bool Record::trainable() const {
  return std::ranges::any_of(uses_, [](const Use& use) {
    const auto gathered = use.gathered.lock();
    return use.planned && gathered && gathered->group().trainable();
  });
}

void Record::begin(PassInfo pass, Leaf&) { Engine::current().begin(pass.number, *this); }
void EngineSink::begun(PassInfo pass) { Engine::current().begun(pass.number); }
void EngineSink::finish(PassInfo pass) { Engine::current().finish(pass.number); }
void EngineSink::abort(PassInfo pass) noexcept { Engine::current().abort(pass.number); }

// ---- plans ----

std::vector<std::shared_ptr<ParameterGroup>> Plan::groups() const {
  std::vector<std::shared_ptr<ParameterGroup>> groups;
  for (const Step& step : steps_)
    if (step.kind == Step::Kind::reduce) groups.push_back(step.group().shared_from_this());
  return groups;
}

/// Backwards through the records: a group is gathered before its last use and reduced after its first one.
void Plan::make(std::span<const std::weak_ptr<ParameterGroup>> all) {
  made_ = true;
  struct Event {
    std::shared_ptr<Gathered> gathered;
    std::uint64_t place;
    Step::Kind kind;
  };
  std::unordered_map<const ParameterGroup*, const Record::Use*> first;
  std::unordered_map<const ParameterGroup*, std::shared_ptr<Gathered>> widest;  // of those that were used
  std::unordered_set<const Gathered*> read;                                     // maybe, by a backward
  std::ranges::sort(records, {}, &Record::number);
  for (const Record* record : records) {
    bool frozen = !record->inputs_want_grad();  // so far: no gradient comes to here
    for (const Record::Use& use : record->uses()) {
      const auto gathered = use.gathered.lock();
      if (!gathered || !use.planned) continue;
      frozen = frozen && !gathered->group().trainable() && !use.region;
      first.emplace(&gathered->group(), &use);
      if (auto& wide = widest[&gathered->group()];
          !wide || gathered->dtype() == gathered->group().shard().dtype())
        wide = gathered;
      if (!frozen) read.insert(gathered.get());
    }
  }
  std::vector<Event> events;
  std::unordered_set<const ParameterGroup*> reduced;
  std::vector<const Root*> roots;  // theirs
  const auto reduce = [&](const std::shared_ptr<Gathered>& gathered, std::uint64_t place) {
    concern(gathered);
    events.push_back({gathered, place, Step::Kind::reduce});
    reduced.insert(&gathered->group());
    const Root* root = gathered->group().root().get();
    if (std::ranges::find(roots, root) == roots.end()) roots.push_back(root);
  };
  std::ranges::reverse(records);
  for (const Record* record : records)
    for (auto use = record->uses().rbegin(); use != record->uses().rend(); ++use) {
      const auto gathered = use->gathered.lock();
      if (!gathered || !use->planned) continue;
      if (!concerns(*gathered) && read.contains(gathered.get()) && !gathered->kept_whole())
        events.push_back({gathered, use->last_read(), Step::Kind::gather});
      concern(gathered);
      if (first[&gathered->group()] == &*use) reduce(widest[&gathered->group()], use->place);
    }
  for (const auto& group : begun) {  // used outside every record
    if (reduced.contains(group.get())) continue;
    const auto gathered = group->in_use().shared();
    if (!gathered->kept_whole()) events.push_back({gathered, 0, Step::Kind::gather});
    reduce(gathered, 0);
  }
  for (const auto& weak : all) {
    const auto group = weak.lock();
    if (group && group->gradients().pending() && group->reduces() && !reduced.contains(group.get()) &&
        std::ranges::find(roots, group->root().get()) != roots.end())
      reduce(group->in_use().shared(), 0);
  }

  // A gather, or a reduction, brings those ahead of it.
  std::vector<std::shared_ptr<Gathered>> gathers;
  for (const Event& event : events)
    if (event.kind == Step::Kind::gather) gathers.push_back(event.gathered);
  std::unordered_set<const Gathered*> listed;
  const auto list = [&](const std::shared_ptr<Gathered>& gathered, bool early) {
    if (listed.insert(gathered.get()).second) steps_.push_back({Step::Kind::gather, gathered, early});
  };
  std::size_t due = 0;
  for (const Event& event : events) {
    const ParameterGroup& group = event.gathered->group();
    const BackwardPrefetch ahead = group.root()->policy.backward_prefetch;
    const bool reduces = event.kind == Step::Kind::reduce;
    if (reduces) {
      steps_.push_back({Step::Kind::reduce, event.gathered});
    } else {
      list(event.gathered, false);
      ++due;
    }
    if (group.switches.backward_prefetch) {
      for (const auto& next : groups_in(*group.switches.backward_prefetch))
        for (const auto& gathered : gathers)
          if (!reduces && &gathered->group() == next.get()) list(gathered, false);
    } else if (reduces == ahead.after_reduction()) {
      for (std::size_t i = due; i < gathers.size() && i < due + static_cast<std::size_t>(ahead.groups()); ++i)
        list(gathers[i], reduces);
    }
    if (reduces) continue;
    turn_of_[event.gathered.get()] = steps_.size();
    turns_.push_back({event.place, steps_.size()});
  }
}

std::size_t Plan::turn_at(std::uint64_t place) const {
  std::size_t end = 0;
  for (const Turn& turn : turns_)
    if (turn.place > place) end = std::max(end, turn.end);
  return end;
}

std::string Plan::text() const {
  std::string text;
  for (const Step& step : steps_)
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ",
                        step.kind == Step::Kind::reduce ? "reduce"
                        : step.early                    ? "gather early"
                                                        : "gather",
                        step.group().label());
  return text;
}

// ---- the engine ----

Engine& Engine::current() { return Context::current().slot<Engine>(); }

Engine::Engine()
    : calls_(before_calls([this] { before_call(); })),
      renewals_(after_renewals([this](const Group& ranks) { renewed(ranks); })) {}

Engine::OwnCalls::OwnCalls() : engine_(current()), outer_(std::exchange(engine_.own_calls_, true)) {}
Engine::OwnCalls::~OwnCalls() { engine_.own_calls_ = outer_; }

void Engine::add(const std::shared_ptr<ParameterGroup>& group) { remember(all_, group); }

void Engine::add(const std::shared_ptr<Unit>& unit) { remember(units_, unit); }

std::vector<std::shared_ptr<Unit>> Engine::units() const {
  std::vector<std::shared_ptr<Unit>> units;
  for (const auto& weak : units_)
    if (auto unit = weak.lock()) units.push_back(std::move(unit));
  return units;
}

Engine::Gathereds Engine::leased(const Root& root, Lease owner) const {
  Gathereds leased;
  for (const auto& weak : all_)
    if (const auto group = weak.lock(); group && group->root().get() == &root)
      group->each_gathered([&](Gathered& gathered) {
        if (gathered.leased(owner)) leased.push_back(gathered.shared());
      });
  return leased;
}

Group Engine::block_of(const Group& shard, int ranks) {
  std::erase_if(blocks_, [](const Block& known) { return known.shard.expired(); });
  for (const Block& known : blocks_)
    if (known.of(shard) && known.ranks == ranks) return known.block;
  blocks_.push_back({shard.watch(), shard.blocks(ranks), ranks});
  return blocks_.back().block;
}

/// What was gathered or guessed before a fault is not what the peers have.
void Engine::renewed(const Group& ranks) {
  for (const auto& weak : std::vector(all_)) {
    const auto group = weak.lock();
    if (!group) continue;
    const Ranks& its = group->spec().ranks;
    if (its.shard != ranks && its.replicas != ranks && its.block != ranks) continue;
    group->each_gathered([](Gathered& gathered) { gathered.end_all(); });
    group->gradients().renewed();
    group->root()->last = nullptr;
  }
  for (const Block& known : blocks_)
    if (known.of(ranks)) known.block.renew();
}

// ---- forward ----

void Engine::enter(Root& root, std::span<Tensor* const> inputs) {
  if (root.depth++ > 0) return;
  const bool want_grad =
      std::ranges::any_of(inputs, [](const Tensor* t) { return t->defined() && t->requires_grad(); });
  root.now = std::make_shared<Record>(++last_record_, want_grad);
  // What was read since the last forward is here on every rank, but for one that wrote its part.
  for (const auto& gathered : leased(root, Lease::cache)) gathered->end(Lease::cache);
  drop_stale(leased(root, Lease::policy));
}

/// What is kept goes on all ranks if any one of them wrote its part since: also what a forward that begins
/// reads outside its module. One call for all that the same ranks share.
void Engine::drop_stale(Gathereds kept) const {
  if (capturing()) {  // a program begins with nothing kept, whatever its replays find
    for (const auto& gathered : kept)
      for (const Lease owner : {Lease::policy, Lease::cache}) gathered->end(owner);
    return;
  }
  const Housekeeping guard;
  const OwnCalls own_calls;
  while (!kept.empty()) {
    const Group ranks = kept[0]->group().spec().ranks.shard;
    const auto others = std::ranges::stable_partition(
        kept, [&](const auto& g) { return g->group().spec().ranks.shard == ranks; });
    std::vector<int> stale;
    for (auto g = kept.begin(); g != others.begin(); ++g) stale.push_back((*g)->stale());
    const Tensor any = Tensor::from(stale, {std::ssize(stale)}, Device::cpu());
    if (ranks.defined())
      ranks.all_reduce(any, ReduceOp::max(), {.label = "kept parameters", .channel = gather_channel});
    stale = any.to_vector<int>();
    for (std::size_t i = 0; i < stale.size(); ++i)
      if (stale[i] != 0) kept[i]->drop();
    kept.erase(kept.begin(), others.begin());
  }
}

void Engine::begin_use(ParameterGroup& group) {
  Gathered& gathered = group.in_use();
  check_unstepped(group);
  group.root()->now->add(gathered, Record::Moment::begin);
  if (gathered.stale()) gathered.drop();
  gathered.lease(Lease::module);
  gathered.end(Lease::cache);
  gathered.start();
  gather_ahead(gathered);
  gathered.finish();
}

void Engine::end_use(ParameterGroup& group, AfterForward after) {
  Gathered& gathered = group.in_use();
  group.root()->now->add(gathered, Record::Moment::end);
  if (gathered.modules() == 1 && gathered.here()) {
    if (after == AfterForward::free) gathered.end(Lease::policy);
    if (after == AfterForward::keep) gathered.lease(Lease::policy);
    // Without gradients, only what an earlier forward left for its backward.
    const bool sliced = Context::current().grad_enabled() || gathered.leased(Lease::policy);
    if (after == AfterForward::slice && sliced && !gathered.leased(Lease::backward)) gathered.slice();
  }
  gathered.end(Lease::module);
}

void Engine::prefetch(Gathered& next) {
  if (next.leased(Lease::policy) || next.here() || next.on_its_way()) return;
  next.lease(Lease::cache);
  next.start();
}

/// The program says what comes next, or the last forward does.
void Engine::gather_ahead(const Gathered& gathered) {
  if (const auto& named = gathered.group().switches.forward_prefetch) {
    for (const auto& group : groups_in(*named)) prefetch(group->in_use());
    return;
  }
  const Root& root = *gathered.group().root();
  if (!root.last) return;
  const auto& guess = root.last->uses();
  const std::size_t now = root.now->uses().size() - 1;
  if (now >= guess.size() || !is(guess[now].gathered, gathered)) return;
  int ahead = 0;
  for (std::size_t i = now + 1; i < guess.size() && ahead < root.policy.forward_prefetch; ++i) {
    if (guess[i].moment == Record::Moment::end) continue;
    ++ahead;
    if (const auto next = guess[i].gathered.lock()) prefetch(*next);
  }
}

void Engine::leave(Root& root, std::span<Tensor* const> outputs) {
  if (--root.depth > 0) return;
  // Guesses that were wrong, and what was used outside its module.
  for (const auto& gathered : leased(root, Lease::cache)) gathered->end(Lease::cache);
  root.last = std::move(root.now);
  if (!Context::current().grad_enabled() || !root.last->planned()) return;
  // Frozen groups are gathered in a backward too, when it goes on to the inputs.
  const bool any = std::ranges::any_of(outputs, [](Tensor* t) { return t->defined() && t->requires_grad(); });
  if (!any && !root.last->trainable()) return;
  for (Tensor* output : outputs)
    if (output->defined() && is_floating(output->dtype()) && (!any || output->requires_grad()))
      anchor(*output, root.last);
}

void Engine::fail(Root& root, std::span<const std::shared_ptr<ParameterGroup>> groups) noexcept {
  for (const auto& group : groups) group->in_use().end(Lease::module);
  if (--root.depth > 0) return;
  root.now = root.last = nullptr;
  for (const auto& weak : all_)
    if (const auto group = weak.lock(); group && group->root().get() == &root)
      group->each_gathered([](Gathered& gathered) { gathered.end_all(); });
}

void Engine::unshard(ParameterGroup& group) {
  Gathered& gathered = group.in_use();
  if (gathered.is_shard_itself()) return;
  check_steps(group);
  if (plan_.made() &&
      plan_.concerns(gathered)) {  // once a backward: whether it was read is this rank's alone
    gather_up_to(plan_.turn_of(gathered), &gathered);
    gathered.show();
    return;
  }
  const Root& root = *group.root();
  if (const auto place = pass_state().place; plan_.made() && place)
    gather_up_to(plan_.turn_at(*place));
  else if (root.now)
    root.now->add(gathered, Record::Moment::read);
  else if (gathered.leased(Lease::policy) || gathered.leased(Lease::cache))
    drop_stale({gathered.shared()});
  gathered.lease(Lease::policy);
  gathered.end(Lease::cache);
  gathered.start();
  gathered.show();
}

void Engine::demand(Gathered& gathered) {
  check_steps(gathered.group());
  if (plan_.made() || !gathered.group().root()->now) gathered.check_unwritten();
  if (plan_.made() && plan_.concerns(gathered)) {
    gather_up_to(plan_.turn_of(gathered), &gathered);
    gathered.lease(Lease::backward);
  } else {
    const Root& root = *gathered.group().root();
    if (!plan_.made() && root.now)
      root.now->add(gathered, Record::Moment::read);
    else if (!plan_.made() && root.last)
      root.last->read_later(gathered);
    make_room(gathered);
    gathered.lease(Lease::cache);
  }
  gathered.start();
  gathered.finish();
}

/// Of what is read outside its module the least needed goes: by the last forward, what comes last.
void Engine::make_room(const Gathered& wanted) {
  const Root& root = *wanted.group().root();
  const auto next_use = [&](const std::shared_ptr<Gathered>& gathered) {
    if (!root.last || !root.now) return std::size_t{0};
    const auto& guess = root.last->uses();
    std::size_t i = root.now->uses().size();
    while (i < guess.size() && !is(guess[i].gathered, *gathered)) ++i;
    return i;
  };
  Gathereds cached = leased(root, Lease::cache);
  std::erase_if(cached, [&](const auto& g) { return g.get() == &wanted || g->pinned(); });
  while (static_cast<int>(cached.size()) >= std::max(1, root.policy.cached_gathers)) {
    const auto farthest = std::ranges::max_element(cached, {}, next_use);
    (*farthest)->end(Lease::cache);
    cached.erase(farthest);
  }
}

/// Here alone, not on the peers: it frees memory, and what is gathered next stays the same, since a backward
/// ends all its leases. Without a plan (in `grad`) what is here stays, as on peers that do not read it.
void Engine::read_over(Gathered& gathered) {
  if (!gathered.pinned() && plan_.made() && plan_.concerns(gathered)) gathered.end(Lease::backward);
}

// ---- backward ----

void Engine::begin_run(std::uint64_t run) {
  if (plan_.run == run) return;
  check<StateError>(plan_.run == 0,
                    "backward: it reaches sharded parameters and was started within another backward that "
                    "does (in a hook); start it after that one, or use grad()");
  plan_.run = run;
}

void Engine::begin(std::uint64_t run, ParameterGroup& group) {
  begin_run(run);
  if (plan_.knows_begun.insert(&group).second) plan_.begun.push_back(group.shared_from_this());
}

void Engine::begin(std::uint64_t run, Record& record) {
  begin_run(run);
  if (std::ranges::find(plan_.records, &record) == plan_.records.end()) plan_.records.push_back(&record);
}

/// From here on the backward holds what it concerns, and the policy lets go of it, or takes it for longer.
void Engine::begun(std::uint64_t run) {
  if (plan_.run != run || plan_.made()) return;
  plan_.make(all_);
  EarlySteps::current().begin();
  for (const auto& gathered : plan_.gathereds())
    check<StateError>(!gathered->group().summoned,
                      "backward: it reaches '{}', which summon_full_params shows whole; end that scope first",
                      gathered->group().spec().names[0]);
  tell_units();
  for (const auto& group : plan_.groups())
    if (group->trainable() && group->reduces()) group->gradients().check_average();
  for (const auto& gathered : plan_.gathereds()) {
    gathered->lease(Lease::backward);
    gathered->end(Lease::cache);
    if (gathered->group().switches.reshard_after_backward)
      gathered->end(Lease::policy);
    else
      gathered->lease(Lease::policy);
  }
}

void Engine::tell_units() const {
  std::vector<const Root*> roots;
  for (const auto& gathered : plan_.gathereds())
    if (const Root* root = gathered->group().root().get(); std::ranges::find(roots, root) == roots.end())
      roots.push_back(root);
  for (const Root* root : roots) {
    check_backward(root->units);
    for (const auto& weak : root->units)
      if (const auto unit = weak.lock()) unit->begin_backward(plan_);
  }
}

/// Posts the gathers up to `end`. What this rank's graph does not read is posted for the peers.
void Engine::gather_up_to(std::size_t end, const Gathered* needed) {
  for (; plan_.gathered < end; ++plan_.gathered) {
    const Plan::Step& step = plan_.steps()[plan_.gathered];
    if (step.kind != Plan::Step::Kind::gather) continue;
    step.gathered->start();
    if (step.gathered.get() != needed && step.gathered->reads() == 0) step.gathered->end(Lease::backward);
  }
}

void Engine::arrived(std::uint64_t run) {
  if (plan_.run != run) return;
  reduce_in_turn(When::complete);
  bring_down();
  step_early();
}

/// While the backward runs nothing waits for a reduction: a peer may bring its part only after a gather that
/// this rank still has to post.
void Engine::reduce_in_turn(When when) {
  for (; plan_.reduced < plan_.steps().size(); ++plan_.reduced) {
    const Plan::Step& step = plan_.steps()[plan_.reduced];
    if (step.kind != Plan::Step::Kind::reduce) continue;
    ParameterGroup& group = step.group();
    Gradients& gradients = group.gradients();
    if (when == When::complete && (!gradients.complete() || group.spec().reduce_at_end)) return;
    gather_up_to(plan_.reduced);
    if (!group.trainable() && !gradients.pending())
      gradients.drop();
    else if (group.reduces())
      gradients.reduce(step.gathered->dtype());
    else
      gradients.keep(step.gathered->dtype());
    gather_early(plan_.reduced + 1);
  }
}

/// Averages come down in the order of the plan, each while the device is at work on what follows it: one is
/// waited for when the next one is given. When that is depends on the peers, so nothing but this rank's own
/// copies does.
void Engine::bring_down() {
  for (; plan_.down < plan_.reduced; ++plan_.down) {
    const Plan::Step& step = plan_.steps()[plan_.down];
    if (step.kind != Plan::Step::Kind::reduce) continue;
    Gradients& gradients = step.group().gradients();
    if (!gradients.set_out()) return;
    if (Gradients* before = std::exchange(plan_.coming, &gradients)) before->land();
  }
}

/// Whether it is stepped while the walk goes on: what graphs read of it is a copy, so that the shard may be
/// written, and its average comes to the host, whose steps the device needs not wait for.
bool Engine::steps_in_walk(ParameterGroup& group) {
  if (!EarlySteps::current().any() || !group.reduces() || group.gradients().calls_follow()) return false;
  bool copied = group.shard().device().is_cpu();
  group.each_gathered([&](const Gathered& gathered) { copied = copied && !gathered.is_shard_itself(); });
  return copied && EarlySteps::current().steps(group);
}

/// Steps groups whose averages are here, in the order of the plan, when this rank's graph has read their
/// values for the last time: a write makes graphs from before refuse. Peers have posted all their gathers of
/// a group before its reduction. How far this comes depends on them, so no call may follow from it; what a
/// step throws waits for the end.
void Engine::step_early() {
  if (plan_.step_failed) return;
  for (; plan_.settled < plan_.reduced; ++plan_.settled) {
    const Plan::Step& step = plan_.steps()[plan_.settled];
    if (step.kind != Plan::Step::Kind::reduce) continue;
    ParameterGroup& group = step.group();
    Gradients& gradients = group.gradients();
    if (!gradients.averaging() || !steps_in_walk(group)) continue;
    int reads = 0;
    group.each_gathered([&](const Gathered& gathered) { reads += gathered.reads(); });
    if (reads > 0 || !gradients.here()) return;
    gradients.wait();
    gradients.commit();
    plan_.stepped.push_back(&group);
    try {
      EarlySteps::current().step(group, EarlySteps::When::in_walk);
    } catch (...) {
      plan_.step_failed = std::current_exception();
      return;
    }
  }
}

void Engine::check_unstepped(ParameterGroup& group) const {
  const std::string& name = group.spec().names[0];
  check<StateError>(!EarlySteps::current().stepping(),
                    "StepInBackward: an optimizer's step reads the whole '{}', which ranks would gather at "
                    "different moments of the backward; step after it",
                    name);
  const bool stepped = std::ranges::find(plan_.stepped, &group) != plan_.stepped.end();
  check<StateError>(!stepped && !(group.gradients().averaging() && steps_in_walk(group)),
                    "backward: the whole '{}' is read again when its gradient is complete, and it is stepped "
                    "while the backward goes on (StepInBackward), on some ranks before others; read it "
                    "earlier, or step after the backward",
                    name);
}

/// The early gathers that follow from `begin` on, all before which is done.
void Engine::gather_early(std::size_t begin) {
  const auto& steps = plan_.steps();
  std::size_t end = begin;
  while (end < steps.size() && steps[end].early) ++end;
  gather_up_to(end);
}

/// The program's own call. Within a backward peers may wait for gathers that stand before it; a region does
/// not repeat it, since whether and when it would depends on what this rank's graph reads.
void Engine::before_call() {
  if (own_calls_) return;
  check<StateError>(!EarlySteps::current().stepping(),
                    "StepInBackward: an optimizer's step makes a call among ranks, which come to it at "
                    "different moments of the backward; step after it");
  keep_results_in_region();
  const std::optional<std::uint64_t> place = pass_state().place;
  if (!plan_.made() || !place) return;
  gather_up_to(plan_.turn_at(*place));
}

void Engine::finish(std::uint64_t run) {
  if (plan_.run != run) return;
  gather_up_to(plan_.steps().size());
  reduce_in_turn(When::now);
  const auto groups = plan_.groups();
  for (const auto& group : groups) group->gradients().pass_on();
  EarlySteps& early = EarlySteps::current();
  const bool stepping = early.any();
  early.check_whole();
  if (plan_.step_failed) std::rethrow_exception(plan_.step_failed);
  Gradients::wait_on_device(groups);
  for (const auto& group : groups) {
    group->gradients().wait();
    if (std::ranges::find(plan_.stepped, group.get()) != plan_.stepped.end())
      early.written(*group);
    else if (stepping && group->gradients().commit())
      early.step(*group, EarlySteps::When::at_end);
  }
  if (!stepping)
    for (const auto& group : groups) group->gradients().commit();
  early.over();
  const Plan done = std::exchange(plan_, {});
  for (const auto& gathered : done.gathereds()) gathered->end(Lease::backward);
  std::vector<Gradients::Added> added;  // of all groups before the first hook, which may throw
  for (const auto& group : groups)
    std::ranges::move(group->gradients().take_added(), std::back_inserter(added));
  for (const auto& [of, shown] : added)
    of->after_accumulate.each([&](const std::function<void(Leaf&)>& hook) { hook(*shown); });
}

void Engine::abort(std::uint64_t run) noexcept {
  if (plan_.run != run) return;
  EarlySteps::current().broke_off();
  const Plan failed = std::exchange(plan_, {});
  for (const auto& list : {failed.groups(), failed.begun})
    for (const auto& group : list) {
      group->gradients().drop();
      group->each_gathered([](Gathered& gathered) {
        for (const Lease owner : {Lease::backward, Lease::policy, Lease::cache}) gathered.end(owner);
      });
    }
}

}  // namespace sherd::shard
