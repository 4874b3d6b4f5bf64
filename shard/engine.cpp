#include "shard/engine.h"

#include <algorithm>
#include <utility>

#include "autograd/capture/effects.h"
#include "autograd/pass.h"
#include "collectives/observe.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "shard/unit.h"

namespace sherd::shard {

Engine& Engine::current() { return Context::current().slot<Engine>(); }

Engine::Engine()
    : calls_(before_calls([this] { before_call(); })),
      renewals_(after_renewals([this](const Group& ranks) { renewed(ranks); })) {}

Engine::OwnCalls::OwnCalls() : engine_(current()), outer_(std::exchange(engine_.own_calls_, true)) {}
Engine::OwnCalls::~OwnCalls() { engine_.own_calls_ = outer_; }

Group Engine::block_of(const Group& shard, int ranks) {
  std::erase_if(blocks_, [](const Block& known) { return known.shard.expired(); });
  for (const Block& known : blocks_)
    if (watches(known.shard, shard) && known.ranks == ranks) return known.block;
  blocks_.push_back({shard.watch(), shard.blocks(ranks), ranks});
  return blocks_.back().block;
}

int Engine::count_model(const Group& ranks) {
  std::erase_if(models_, [&](const ModelAmong& last) {
    return last.ranks.expired() || (watches(last.ranks, ranks) && last.key != ranks.key());
  });
  for (ModelAmong& last : models_)
    if (last.key == ranks.key()) return ++last.number.model;
  models_.push_back({ranks.watch(), ranks.key(), {1}});
  return 1;
}

void Engine::count_as_one(const GroupKey& ranks, int first, std::ptrdiff_t models) {
  for (ModelAmong& last : models_)
    if (last.key == ranks && last.number.model == first + models - 1) last.number.model = first;
}

/// What was gathered or guessed before a fault is not what the peers have; nor need they have come to
/// forwards that made modules parts of a root, and gave their calls names.
void Engine::renewed(const Group& ranks) {
  std::unordered_set<const Root*> roots;
  for (const auto& root : alive<Root>(roots_))
    for (const auto& group : root->groups_of_graphs()) {
      const Ranks& its = group->spec().ranks;
      if (its.shard != ranks && its.replicas != ranks && its.block != ranks) continue;
      group->each_gathered([](Gathered& gathered) { gathered.end_all(); });
      group->gradients().renewed();
      root->renewed();
      outside_.forget(*root);
      roots.insert(root.get());
    }
  for (const auto& unit : units())
    if (roots.contains(&unit->root())) unit->leave_root();
  for (const Block& known : blocks_)
    if (watches(known.shard, ranks)) known.block.renew();
}

// ---- reads ----

void Engine::unshard(ParameterGroup& group) {
  refuse_in_frames("compile: unshard is called inside");
  Gathered& gathered = group.in_use();
  if (gathered.is_shard_itself()) return;
  check_steps(group);
  if (!walking() || !plan().concerns(gathered)) return group.root()->unshard(*this, gathered);
  // Once a backward: ranks whose walks come here at unlike steps of the plan make no call of their own.
  gather_up_to(plan().turn_of(gathered));
  gathered.show();
}

void Engine::demand(Gathered& gathered) {
  if (recording_region()) refuse_in_frames("compile: recompute reads a group outside its module");
  check_steps(gathered.group());
  if (walking() && plan().concerns(gathered)) {
    gathered.check_unwritten();
    hold(gathered);
  } else {
    gathered.group().root()->read(*this, gathered);
  }
  gathered.finish();
}

/// The program reads what the walk has not come to, or has left: a hook. The first is the plan's own gather,
/// early; the second one of its own, held to the end, by all ranks whose hooks read it.
void Engine::hold(Gathered& gathered) {
  const ParameterGroup& group = gathered.group();
  check<StateError>(
      group.spec().backward_gather == BackwardGather::yes,
      "backward: it comes to '{}' ({}), which was sharded with BackwardGather::no; that is for what lies "
      "before all that is trained and gives no gradient to inputs: shard it with BackwardGather::yes",
      group.spec().names[0], group.label());
  gather_up_to(plan().turn_of(gathered));
  check_unstepped(gathered.group());
  gathered.lease(Lease::backward);
  gathered.start();
}

// ---- backward ----

const Plan& Engine::plan() const {
  static const Plan none;
  return backward_ ? backward_->plan : none;
}

Engine::Backward& Engine::in_run(std::uint64_t run) {
  if (!backward_) backward_.emplace(run);
  check<StateError>(backward_->run == run,
                    "backward: it reaches sharded parameters and was started within another backward that "
                    "does (in a hook); start it after that one, or use grad()");
  return *backward_;
}

void Engine::begin(std::uint64_t run, ParameterGroup& group) {
  Backward& backward = in_run(run);
  if (backward.known.insert(&group).second) backward.groups.push_back(group.shared_from_this());
}

void Engine::begin(std::uint64_t run, Record& record) {
  Backward& backward = in_run(run);
  if (std::ranges::find(backward.records, &record) == backward.records.end())
    backward.records.push_back(&record);
}

/// From here on the backward holds what it concerns, and the policy lets go of it, or takes it for longer.
void Engine::begun(std::uint64_t run) {
  Backward* const backward = of_run(run);
  if (backward == nullptr || backward->begun) return;
  backward->begun = true;
  for (const auto& group : backward->groups)
    check<StateError>(
        group->spec().backward_gather == BackwardGather::yes,
        "backward: '{}' ({}) is trained, and was sharded with BackwardGather::no; freeze it, or "
        "shard it with BackwardGather::yes",
        group->spec().names[0], group->label());
  backward->plan = Plan(backward->records, backward->groups);
  early_.begin();
  for (const auto& [gathered, until] : plan().held())
    check<StateError>(!gathered->group().summoned,
                      "backward: it reaches '{}', which summon_full_params shows whole; end that scope first",
                      gathered->group().spec().names[0]);
  tell_units();
  for (const auto& group : plan().groups())
    if (group->trainable() && group->reduces()) group->gradients().check_average();
  for (const auto& [gathered, until] : plan().held()) {
    gathered->lease(Lease::backward);
    for (const Lease owner : {Lease::list, Lease::forward}) gathered->end(owner);
    if (gathered->group().switches.reshard_after_backward)
      gathered->end(Lease::policy);
    else
      gathered->lease(Lease::policy);
  }
  pass_state().innermost->watch(std::uint64_t(-1), [this](std::uint64_t place) { return passes(place); });
}

void Engine::tell_units() const {
  std::vector<const Root*> roots;
  for (const auto& [gathered, until] : plan().held())
    if (const Root* root = gathered->group().root().get(); std::ranges::find(roots, root) == roots.end())
      roots.push_back(root);
  for (const Root* root : roots) {
    const auto units = root->units();
    check_backward(units);
    for (const auto& unit : units) unit->begin_backward(plan());
  }
}

/// The walk comes to `place`, which is the cursor: what is due before it is done in the order of places,
/// whatever this rank's graph has there. Says where the next of it is due.
std::uint64_t Engine::passes(std::uint64_t place) {
  Backward& b = *backward_;
  const auto& steps = plan().steps();
  const auto& held = plan().held();
  const auto release_at = [&] { return b.released < held.size() ? held[b.released].until : 0; };
  const auto step_at = [&] { return b.passed < steps.size() ? steps[b.passed].place : 0; };
  while (std::max(release_at(), step_at()) > place) {
    if (release_at() >= step_at()) {
      held[b.released++].gathered->end(Lease::backward);
    } else if (steps[b.passed++].kind == Plan::Step::Kind::gather) {
      gather_up_to(b.passed);
    } else {
      reduce_in_turn(When::complete);
    }
  }
  bring_down();
  step_early();
  return std::max(release_at(), step_at());
}

void Engine::gather_up_to(std::size_t end) {
  for (std::size_t& next = backward_->gathered; next < end; ++next) {
    const Plan::Step& step = plan().steps()[next];
    if (step.kind != Plan::Step::Kind::gather) continue;
    check_unstepped(step.group());
    step.gathered->start();
  }
}

void Engine::arrived(std::uint64_t run) {
  if (of_run(run) == nullptr) return;
  reduce_in_turn(When::complete);
  bring_down();
  step_early();
}

/// While the backward runs nothing waits for a reduction: a peer may bring its part only after a gather that
/// this rank still has to post. A reduction follows the gathers before it, which read what it may have
/// stepped.
void Engine::reduce_in_turn(When when) {
  Backward& b = *backward_;
  for (; b.reduced < plan().steps().size(); ++b.reduced) {
    const Plan::Step& step = plan().steps()[b.reduced];
    if (step.kind != Plan::Step::Kind::reduce) {
      if (b.reduced >= b.gathered) return;
      continue;
    }
    ParameterGroup& group = step.group();
    Gradients& gradients = group.gradients();
    if (when == When::complete && (!gradients.complete() || group.spec().reduce_at_end)) return;
    if (!group.trainable() && !gradients.pending())
      gradients.drop();
    else if (group.reduces())
      gradients.reduce(step.gathered->dtype(), step.name);
    else
      gradients.keep(step.gathered->dtype());
  }
}

/// Averages come down in the order of the plan, each while the device is at work on what follows it: one is
/// waited for when the next one is given. When that is depends on the peers, so nothing but this rank's own
/// copies does.
void Engine::bring_down() {
  Backward& b = *backward_;
  for (; b.down < b.reduced; ++b.down) {
    const Plan::Step& step = plan().steps()[b.down];
    if (step.kind != Plan::Step::Kind::reduce) continue;
    Gradients& gradients = step.group().gradients();
    if (!gradients.set_out()) return;
    if (Gradients* before = std::exchange(b.coming, &gradients)) before->land();
  }
}

/// Whether it is stepped while the walk goes on: what graphs read of it is a copy, so that the shard may be
/// written, and its average comes to the host, whose steps the device needs not wait for.
bool Engine::steps_in_walk(ParameterGroup& group) {
  if (!early_.any() || !group.reduces() || group.gradients().calls_follow()) return false;
  bool copied = group.shard().device().is_cpu();
  group.each_gathered([&](const Gathered& gathered) { copied = copied && !gathered.is_shard_itself(); });
  return copied && early_.steps(group);
}

/// Steps groups whose averages are here, in the order of the plan, when this rank's graph has read their
/// values for the last time: a write makes graphs from before refuse. Peers have posted all their gathers of
/// a group before its reduction. How far this comes depends on them, so no call may follow from it; what a
/// step throws waits for the end.
void Engine::step_early() {
  Backward& b = *backward_;
  if (b.step_failed) return;
  for (; b.settled < b.reduced; ++b.settled) {
    const Plan::Step& step = plan().steps()[b.settled];
    if (step.kind != Plan::Step::Kind::reduce) continue;
    ParameterGroup& group = step.group();
    Gradients& gradients = group.gradients();
    if (!gradients.averaging() || !steps_in_walk(group)) continue;
    int reads = 0;
    group.each_gathered([&](const Gathered& gathered) { reads += gathered.reads(); });
    if (reads > 0 || !gradients.here()) return;
    gradients.wait();
    gradients.commit();
    b.stepped.push_back(&group);
    try {
      early_.step(group, EarlySteps::When::in_walk);
    } catch (...) {
      b.step_failed = std::current_exception();
      return;
    }
  }
}

void Engine::check_unstepped(ParameterGroup& group) {
  const std::string& name = group.spec().names[0];
  check<StateError>(!early_.stepping(),
                    "StepInBackward: an optimizer's step reads the whole '{}', which ranks would gather at "
                    "different moments of the backward; step after it",
                    name);
  const bool stepped = backward_ && std::ranges::find(backward_->stepped, &group) != backward_->stepped.end();
  check<StateError>(!stepped && !(group.gradients().averaging() && steps_in_walk(group)),
                    "backward: the whole '{}' is read again when its gradient is complete, and it is stepped "
                    "while the backward goes on (StepInBackward), on some ranks before others; read it "
                    "earlier, or step after the backward",
                    name);
}

/// The program's own call. A region does not repeat it, since whether and when it would depends on what this
/// rank's graph reads.
void Engine::before_call() {
  if (own_calls_) return;
  check<StateError>(!early_.stepping(),
                    "StepInBackward: an optimizer's step makes a call among ranks, which come to it at "
                    "different moments of the backward; step after it");
  keep_results_in_region();
}

void Engine::finish(std::uint64_t run) {
  Backward* const b = of_run(run);
  if (b == nullptr) return;
  passes(0);
  reduce_in_turn(When::now);
  const auto groups = plan().groups();
  for (const auto& group : groups) group->gradients().pass_on();
  const bool stepping = early_.any();
  early_.check_whole();
  if (b->step_failed) std::rethrow_exception(b->step_failed);
  Gradients::wait_on_device(groups);
  for (const auto& group : groups) {
    group->gradients().wait();
    if (std::ranges::find(b->stepped, group.get()) != b->stepped.end())
      early_.written(*group);
    else if (stepping && group->gradients().commit())
      early_.step(*group, EarlySteps::When::at_end);
  }
  if (!stepping)
    for (const auto& group : groups) group->gradients().commit();
  early_.over();
  const Plan done = std::move(b->plan);
  outside_.backward_over(b->records);
  backward_.reset();
  for (const auto& [gathered, until] : done.held()) gathered->end(Lease::backward);
  std::vector<Gradients::Added> added;  // of all groups before the first hook, which may throw
  for (const auto& group : groups)
    std::ranges::move(group->gradients().take_added(), std::back_inserter(added));
  for (const auto& [of, shown] : added)
    of->after_accumulate.each([&](const std::function<void(Leaf&)>& hook) { hook(*shown); });
}

void Engine::abort(std::uint64_t run) noexcept {
  if (of_run(run) == nullptr) return;
  early_.broke_off();
  const Backward failed = std::move(*backward_);
  backward_.reset();
  const auto give_up = [](ParameterGroup& group) {
    group.gradients().drop();
    group.each_gathered([](Gathered& gathered) {
      for (const Lease owner : {Lease::backward, Lease::forward, Lease::policy, Lease::list})
        gathered.end(owner);
    });
  };
  for (const Plan::Held& held : failed.plan.held()) give_up(held.gathered->group());
  // Without a plan the records tell the same on all ranks, which the graph does not.
  for (const Record* record : failed.records)
    for (const Record::Use& use : record->uses())
      if (const auto gathered = use.gathered.lock(); gathered && use.planned) give_up(gathered->group());
  for (const auto& group : failed.groups) give_up(*group);
}

}  // namespace sherd::shard
