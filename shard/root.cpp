#include "shard/root.h"

#include <algorithm>
#include <utility>

#include "autograd/autograd.h"
#include "autograd/capture/effects.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "shard/agree.h"
#include "shard/anchor.h"
#include "shard/engine.h"
#include "shard/unit.h"

namespace sherd::shard {
namespace {

using Moment = Record::Moment;

/// Of what modules that the program named compute with, those that are gone left out.
std::vector<std::shared_ptr<Gathered>> in_use(std::span<const std::weak_ptr<Unit>> units) {
  std::vector<std::shared_ptr<Gathered>> wholes;
  for (const auto& unit : alive(units))
    for (const Members& m : unit->members()) wholes.push_back(m.group->in_use().shared());
  return wholes;
}

}  // namespace

void Root::add(const std::shared_ptr<ParameterGroup>& group) { remember(groups_, group); }

void Root::add(const std::shared_ptr<Unit>& unit) { remember(units_, unit); }

std::vector<std::shared_ptr<Unit>> Root::units() const {
  auto units = alive<Unit>(units_);
  std::erase_if(units, [this](const auto& unit) { return &unit->root() != this; });
  return units;
}

std::vector<std::shared_ptr<ParameterGroup>> Root::groups_of_graphs() const {
  auto groups = alive<ParameterGroup>(groups_);
  std::erase_if(groups, [this](const auto& group) { return group->root().get() != this; });
  return groups;
}

std::vector<std::shared_ptr<ParameterGroup>> Root::groups() const {
  auto groups = groups_of_graphs();
  std::erase_if(groups, [](const auto& group) { return group->retired(); });
  return groups;
}

// ---- the cursor ----

/// The one place of a forward where gathers are posted.
void Root::advance(Engine& engine, Gathered& wanted, Moment moment) {
  engine.check_unstepped(wanted.group());
  end_reads(&wanted);
  const bool recorded = now_ && (moment == Moment::begin || !engine.walking());
  if (recorded) now_->add(wanted, moment);
  wanted.start();
  if (recorded) gather_ahead(wanted, moment);
}

/// The program says what comes next, or the last forward does.
void Root::gather_ahead(const Gathered& from, Moment moment) {
  const bool listed = follows(from, moment);
  const auto gather = [this](const std::shared_ptr<Gathered>& next) {
    if (next->leased(Lease::policy) || next->leased(Lease::forward) || next->here() || next->on_its_way())
      return;
    next->lease(Lease::list);
    ahead_.push_back(next);
    next->start();
  };
  if (const auto& named = from.group().switches.forward_prefetch; named && moment == Moment::begin) {
    for (const auto& next : in_use(*named)) gather(next);
    return;
  }
  if (!listed) return;
  int ahead = 0;
  const auto uses = last_->listed();
  for (std::size_t i = now_->listed().size(); i < uses.size() && ahead < policy_.forward_prefetch; ++i) {
    if (uses[i].moment != Moment::begin && uses[i].moment != Moment::read) continue;
    ++ahead;
    if (const auto next = uses[i].gathered.lock(); next && !next->group().retired()) gather(next);
  }
}

/// Whether this forward has come to its last place as the last forward did.
bool Root::follows(const Gathered& wanted, Moment moment) {
  if (!last_ || departed_) return false;
  const auto uses = last_->listed();
  const std::size_t at = now_->listed().size() - 1;
  departed_ = at >= uses.size() || uses[at].moment != moment || uses[at].gathered.lock().get() != &wanted;
  return !departed_;
}

/// What was read outside its module is given back when the cursor goes on, unless an op reads it now.
void Root::end_reads(const Gathered* but) {
  std::erase_if(reads_, [&](const std::weak_ptr<Gathered>& weak) {
    const auto gathered = weak.lock();
    if (gathered && (gathered.get() == but || gathered->pinned())) return false;
    if (gathered) gathered->end(Lease::list);
    return true;
  });
}

void Root::end_listed() {
  for (auto* list : {&ahead_, &reads_})
    for (const auto& weak : std::exchange(*list, {}))
      if (const auto gathered = weak.lock()) gathered->end(Lease::list);
}

void Root::take_over(Root& inner) {
  numbers_.take_over(inner.numbers_);
  inner.end_listed();
  left_ = std::min(left_, inner.left_);
}

bool Root::trains() const { return now_ && Context::current().grad_enabled() && now_->trainable(*this); }

// ---- forward ----

void Root::enter(Engine& engine, std::span<const std::shared_ptr<ParameterGroup>> tied) {
  if (depth_++ > 0) return;
  now_ = std::make_shared<Record>(engine.next_record());
  departed_ = false;
  // What was read since the last forward is here on every rank, but for one that wrote its part.
  end_listed();
  for (const auto& group : tied)
    if (!group->root()->running()) group->root()->end_listed();
  std::vector<std::shared_ptr<Gathered>> kept;
  const auto look = [&](const std::shared_ptr<ParameterGroup>& group) {
    group->each_gathered([&](Gathered& gathered) {
      if (gathered.leased(Lease::policy) || gathered.leased(Lease::forward))
        kept.push_back(gathered.shared());
    });
  };
  for (const auto& group : groups()) look(group);
  const auto own = static_cast<std::ptrdiff_t>(kept.size());
  for (const auto& group : tied) look(group);
  drop_stale(kept);
  kept.resize(static_cast<std::size_t>(own));  // those of other roots are in the list as ties
  engine.outside().add_to(now_, *this);
  find_kept(engine, kept);
  for (const auto& group : tied) now_->add(group->in_use(), Moment::tied);
  now_->begin_list();
}

/// Nobody notices who reads what is kept, in this forward or since it was gathered. So a backward has it for
/// all of that, also on ranks whose graphs do not read it there.
void Root::find_kept(Engine& engine, std::span<const std::shared_ptr<Gathered>> kept) {
  for (const auto& gathered : kept) {
    if (!gathered->here() && !gathered->on_its_way()) continue;
    Record::Use use = Record::use_of(*gathered, Moment::kept);
    use.place = left_;
    if (!gathered->is_shard_itself()) use.since = gathered->since();
    if (!use.planned) continue;
    now_->add(use);
    engine.outside().found_kept(use);
  }
}

/// What is kept goes on all ranks if any one of them wrote its part since: also what a forward that begins
/// reads outside its module. One call for all that the same ranks share.
void Root::drop_stale(std::vector<std::shared_ptr<Gathered>> kept) const {
  if (capturing_calls()) {  // a program begins with nothing kept, whatever its replays find
    for (const auto& gathered : kept)
      for (const Lease owner : {Lease::forward, Lease::policy}) gathered->end(owner);
    return;
  }
  const Housekeeping guard;
  const Engine::OwnCalls own_calls;
  while (!kept.empty()) {
    const Group ranks = kept[0]->group().spec().ranks.shard;
    const auto others = std::ranges::stable_partition(
        kept, [&](const auto& g) { return g->group().spec().ranks.shard == ranks; });
    std::vector<bool> stale;
    for (auto g = kept.begin(); g != others.begin(); ++g) stale.push_back((*g)->stale());
    stale = said_by_any(ranks, stale, "kept parameters");
    for (std::size_t i = 0; i < stale.size(); ++i)
      if (stale[i]) kept[i]->drop();
    kept.erase(kept.begin(), others.begin());
  }
}

void Root::begin_use(Engine& engine, ParameterGroup& group) {
  Gathered& gathered = group.in_use();
  if (gathered.stale()) gathered.drop();
  gathered.lease(Lease::module);
  advance(engine, gathered, Moment::begin);
  gathered.end(Lease::list);
  gathered.finish();
}

void Root::end_use(ParameterGroup& group, AfterForward after) {
  Gathered& gathered = group.in_use();
  if (now_) now_->add(gathered, Moment::end);
  const bool grad = Context::current().grad_enabled();
  if (gathered.modules() == 1 && gathered.here()) {
    // Without gradients, only what an earlier forward left for its backward.
    const bool sliced = after == AfterForward::slice && (grad || gathered.leased(Lease::policy)) &&
                        !gathered.leased(Lease::backward);
    if (after == AfterForward::free) gathered.end(Lease::policy);
    if (after == AfterForward::keep) {
      gathered.lease(grad ? Lease::forward : Lease::policy);
      gathered.end(grad ? Lease::policy : Lease::forward);
    }
    if (sliced) gathered.slice();
  }
  gathered.end(Lease::module);
}

void Root::leave(std::span<Tensor* const> outputs) {
  if (--depth_ > 0) return;
  end_listed();  // guesses that were wrong, and what was used outside its module
  last_ = std::move(now_);
  left_ = Record::next_place();
  if (!Context::current().grad_enabled() || !last_->planned(*this)) return;
  // Frozen groups are gathered in a backward too, when it goes on to the inputs.
  const bool any = std::ranges::any_of(outputs, [](Tensor* t) { return t->defined() && t->requires_grad(); });
  if (any || last_->trainable(*this)) anchor(outputs, with_groups(last_));
}

void Root::fail(std::span<const std::shared_ptr<ParameterGroup>> of_module) noexcept {
  for (const auto& group : of_module) group->in_use().end(Lease::module);
  if (--depth_ > 0) return;
  now_ = last_ = nullptr;
  ahead_.clear(), reads_.clear();
  Engine::current().outside().forget(*this);
  for (const auto& group : groups_of_graphs())
    group->each_gathered([](Gathered& gathered) { gathered.end_all(); });
}

void Root::unshard(Engine& engine, Gathered& gathered) {
  const bool walking = engine.walking();
  if (!now_ && !walking && gathered.leased_elsewhere()) drop_stale({gathered.shared()});
  if (walking) gathered.check_unwritten();
  if (!now_ && !walking) engine.outside().read(gathered);
  gathered.lease(Lease::policy);
  advance(engine, gathered, Moment::read);
  gathered.end(Lease::list);
  gathered.show();
}

void Root::read(Engine& engine, Gathered& gathered) {
  // What a backward gathered and left is here on ranks whose graphs read it, and nobody notices there.
  if (gathered.on_its_way() && (gathered.leased(Lease::policy) || gathered.leased(Lease::forward))) return;
  const bool walking = engine.walking();
  if (walking || !now_) gathered.check_unwritten();
  if (!walking && !now_) engine.outside().read(gathered);
  gathered.lease(Lease::list);
  reads_.push_back(gathered.shared());
  advance(engine, gathered, Moment::read);
}

}  // namespace sherd::shard
