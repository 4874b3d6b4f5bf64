#include "shard/schedule.h"

#include <algorithm>
#include <utility>

#include "autograd/recompute.h"
#include "runtime/context.h"
#include "shard/backward.h"

namespace sherd::shard {
namespace {

bool same(const std::weak_ptr<ParameterGroup>& a, const ParameterGroup& b) { return a.lock().get() == &b; }

}  // namespace

// ---- forward ----

void Schedule::enter() {
  if (depth_++ > 0) return;
  uses_.clear();
  call_ = Context::current().grad_enabled() ? std::make_shared<RootCall>() : nullptr;
}

/// A backward will ask for it: for gradients, or to run a region again.
void Schedule::record(ParameterGroup& group) {
  if (call_ && (Context::current().grad_enabled() || recording_region())) call_->add(group);
}

void Schedule::use(ParameterGroup& group) {
  uses_.push_back(group.weak_from_this());
  record(group);
  if (!group.fresh() && group.forwards == 0) group.release();
  start(group);
  prefetch_after(group);
  if (group.under_way()) group.finish_gather();
  ++group.forwards;
}

void Schedule::done(ParameterGroup& group, AfterForward after) {
  if (--group.forwards > 0 || group.whole() || !group.gathered()) return;
  if (after == AfterForward::keep)
    group.held = true;
  else if (after == AfterForward::slice && Context::current().grad_enabled())
    group.slice();
  else if (group.reads() == 0)
    group.release();
}

std::shared_ptr<RootCall> Schedule::leave() {
  if (--depth_ > 0) return nullptr;
  // Guesses that were wrong, and what was used outside its module.
  std::erase_if(here_, [&](const auto& weak) {
    const auto group = weak.lock();
    if (group && idle(*group)) group->release();
    const bool gone = !group || (!group->gathered() && !group->under_way());
    if (group && gone) group->marks.listed = false;
    return gone;
  });
  std::swap(last_uses_, uses_);
  return std::exchange(call_, nullptr);
}

void Schedule::fail(std::span<const std::shared_ptr<ParameterGroup>> groups) noexcept {
  for (const auto& group : groups)
    if (group->forwards > 0 && --group->forwards == 0) group->release();
  if (--depth_ > 0) return;
  call_ = nullptr;
  last_uses_.clear();
  for (const auto& weak : std::vector(here_))
    if (const auto group = weak.lock()) {
      group->forwards = 0;
      group->release();
    }
}

/// Gathered, but no module, backward or policy wants it.
bool Schedule::idle(const ParameterGroup& group) const {
  return !group.whole() && !group.held && group.forwards == 0 && group.reads() == 0 && !group.pinned() &&
         (group.gathered() || group.under_way());
}

void Schedule::start(ParameterGroup& group) {
  if (group.gathered() || group.under_way()) return;
  if (!std::exchange(group.marks.listed, true)) here_.push_back(group.weak_from_this());
  group.start_gather();
}

void Schedule::bring(ParameterGroup& group) {
  start(group);
  if (group.under_way()) group.finish_gather();
}

/// The last root call says what may come next.
void Schedule::prefetch_after(const ParameterGroup& group) {
  const std::size_t now = uses_.size() - 1;
  if (now >= last_uses_.size() || !same(last_uses_[now], group)) return;
  const std::size_t end =
      std::min(last_uses_.size(), now + 1 + static_cast<std::size_t>(policy_.forward_prefetch));
  for (std::size_t i = now + 1; i < end; ++i) {
    const auto next = last_uses_[i].lock();
    if (!next || next->whole()) continue;
    if (!next->fresh() && next->forwards == 0) next->release();
    start(*next);
  }
}

void Schedule::demand(ParameterGroup& group) {
  Backward& backward = Backward::current();
  if (backward.under_way()) {
    backward.gather_before(group);
  } else {
    if (in_forward()) {
      uses_.push_back(group.weak_from_this());
      record(group);
    }
    evict(group);
  }
  bring(group);
}

std::size_t Schedule::next_use(const ParameterGroup& group) const {
  for (std::size_t i = uses_.size(); i < last_uses_.size(); ++i)
    if (same(last_uses_[i], group)) return i;
  return last_uses_.size();
}

void Schedule::evict(const ParameterGroup& wanted) {
  Groups cached;
  for (const auto& weak : here_)
    if (auto group = weak.lock(); group && group.get() != &wanted && idle(*group))
      cached.push_back(std::move(group));
  while (static_cast<int>(cached.size()) >= std::max(1, policy_.cached_gathers)) {
    const auto farthest = std::ranges::max_element(cached, {}, [&](const auto& g) { return next_use(*g); });
    (*farthest)->release();
    cached.erase(farthest);
  }
}

void Schedule::read_over(ParameterGroup& group) {
  if (group.whole() || group.forwards > 0 || group.pinned()) return;
  if (Backward::current().walking() ? group.reshard_after_backward : !group.held) group.release();
}

}  // namespace sherd::shard
