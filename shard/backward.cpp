#include "shard/backward.h"

#include <algorithm>
#include <utility>

#include "runtime/context.h"
#include "shard/schedule.h"

namespace sherd::shard {
namespace {

/// Of the rank.
struct CallCounter {
  std::uint64_t last = 0;
};

constexpr std::size_t never = ~std::size_t{0};

bool same(const std::weak_ptr<ParameterGroup>& a, const ParameterGroup& b) { return a.lock().get() == &b; }

}  // namespace

// ---- root calls ----

RootCall::RootCall() : number_(++Context::current().slot<CallCounter>().last) {}

void RootCall::add(ParameterGroup& group) {
  if (std::exchange(group.marks.call, number_) != number_) order_.push_back(group.weak_from_this());
}
bool RootCall::trainable() const {
  return std::ranges::any_of(order_, [](const auto& weak) {
    const auto group = weak.lock();
    return group && group->trainable();
  });
}
void RootCall::begin(PassInfo pass, Leaf&) { Backward::current().begin(pass.number, *this); }
void RootCall::finish(PassInfo pass) { Backward::current().finish(pass.number); }
void RootCall::abort(PassInfo pass) noexcept { Backward::current().abort(pass.number); }

// ---- backward ----

Backward& Backward::current() { return Context::current().slot<Backward>(); }

void Backward::begin_run(std::uint64_t run) {
  if (agenda_.run == run) return;
  agenda_ = Agenda{};
  agenda_.run = run;
}

void Backward::begin(std::uint64_t run, ParameterGroup& group) {
  begin_run(run);
  if (std::exchange(group.marks.begun, run) != run) agenda_.begun.push_back(group.shared_from_this());
}

void Backward::begin(std::uint64_t run, RootCall& call) {
  begin_run(run);
  if (std::ranges::find(agenda_.calls, &call) == agenda_.calls.end()) agenda_.calls.push_back(&call);
}

void Backward::add(const std::shared_ptr<ParameterGroup>& group) {
  if (!group || std::exchange(group->marks.on_agenda, agenda_.run) == agenda_.run) return;
  group->marks.gather_turn = never;
  agenda_.order.push_back(group);
}

void Backward::make_agenda() {
  if (agenda_.made) return;
  agenda_.made = true;
  std::ranges::sort(agenda_.calls, {}, [](const RootCall* c) { return c->number(); });
  for (const RootCall* call : agenda_.calls)
    for (const auto& group : call->order()) add(group.lock());
  std::ranges::reverse(agenda_.order);
  for (const auto& group : agenda_.begun) add(group);  // used outside every root call
  for (const auto& group : agenda_.order) {
    if (group->gathered()) continue;
    group->marks.gather_turn = agenda_.to_gather.size();
    agenda_.to_gather.push_back(group);
  }
  const std::size_t reached = agenda_.order.size();
  for (std::size_t i = 0; i < reached; ++i)
    for (const auto& weak : agenda_.order[i]->schedule->owed())
      if (const auto group = weak.lock(); group && group->synchronising) add(group);
}

void Backward::gather_before(ParameterGroup& group) {
  make_agenda();
  if (group.marks.on_agenda == agenda_.run && group.marks.gather_turn < agenda_.to_gather.size())
    gather_in_turn(group.marks.gather_turn);
}

/// Gathers up to `index`, which is needed now, and prefetches beyond. What this rank's graph does not read is
/// posted for the peers and let go.
void Backward::gather_in_turn(std::size_t index) {
  const bool needed = index < agenda_.to_gather.size();
  const auto prefetch =
      needed ? static_cast<std::size_t>(agenda_.to_gather[index]->schedule->policy().backward_prefetch) : 0;
  const std::size_t ahead = index + 1 + prefetch;
  for (const std::size_t end = std::min(agenda_.to_gather.size(), ahead); agenda_.gathered < end;
       ++agenda_.gathered) {
    ParameterGroup& group = *agenda_.to_gather[agenda_.gathered];
    if (group.gathered() || group.under_way()) continue;
    group.schedule->start(group);
    if (agenda_.gathered != index && group.reads() == 0) group.release();
  }
}

void Backward::arrived(std::uint64_t run) {
  if (agenda_.run != run) return;
  make_agenda();
  reduce_in_turn(Turn::when_complete);
}

/// While the backward runs nothing waits for a reduction: a peer may bring its part only after a gather that
/// this rank still has to post. So few are posted ahead, fewer than a channel holds.
bool Backward::may_reduce(const ParameterGroup& group) {
  if (!group.complete() || group.spec().reduce_at_end) return false;
  while (agenda_.over < agenda_.reducing.size() && !agenda_.reducing[agenda_.over]->reducing())
    ++agenda_.over;
  return agenda_.reducing.size() - agenda_.over < 4;
}

void Backward::reduce_in_turn(Turn turn) {
  for (; agenda_.reduced < agenda_.order.size(); ++agenda_.reduced) {
    ParameterGroup& group = *agenda_.order[agenda_.reduced];
    if (turn == Turn::when_complete && !may_reduce(group)) return;
    auto& owed = group.schedule->owed();
    std::erase_if(owed, [&](const auto& g) { return g.expired() || same(g, group); });
    if (!group.trainable()) {
      group.drop_gradients();
    } else if (!group.synchronising) {
      group.keep_gradients();
      owed.push_back(group.weak_from_this());
    } else {
      group.post_reduction();
      agenda_.reducing.push_back(agenda_.order[agenda_.reduced]);
    }
  }
}

void Backward::finish(std::uint64_t run) {
  if (agenda_.run != run) return;
  make_agenda();
  gather_in_turn(agenda_.to_gather.size());
  reduce_in_turn(Turn::now);
  for (const auto& group : agenda_.reducing) group->finish_reduction();
  for (const auto& group : agenda_.reducing) group->end_reduction();
  const Agenda done = std::exchange(agenda_, {});
  for (const auto& group : done.order)
    if (group->reshard_after_backward && group->forwards == 0 && !group->whole()) group->release();
}

void Backward::abort(std::uint64_t run) noexcept {
  if (agenda_.run != run) return;
  const Agenda failed = std::exchange(agenda_, {});
  for (const auto* list : {&failed.order, &failed.begun})
    for (const auto& group : *list) {
      group->drop_gradients();
      if (group->forwards == 0 && !group->whole()) group->release();
    }
}

}  // namespace sherd::shard
