#include "collectives/processes/circles.h"

#include <algorithm>
#include <set>

#include "collectives/processes/process.h"

namespace sherd::processes {
namespace {

/// How long a rank waits before it asks for the first time; calls that go well are over by then.
constexpr std::chrono::milliseconds before_asking{50};

}  // namespace

/// What this rank needs now; null when it does not wait.
const Need* Circles::look() {
  std::optional<Need> now = look_ ? look_() : std::nullopt;
  if (!now || !need_ || !now->is(*need_)) {
    ++number_;
    since_ = std::chrono::steady_clock::now();
    until_asking_ = before_asking;
  }
  need_ = std::move(now);
  return need_ ? &*need_ : nullptr;
}

void Circles::ask() {
  if (look() == nullptr || std::chrono::steady_clock::now() - since_ < until_asking_) return;
  until_asking_ *= 2;
  pass_on({});
}

void Circles::pass_on(std::vector<Waiter> chain) {
  chain.push_back({process_.rank(), need_->renews, need_->line, need_->sequence, number_,
                   process_.received_from(need_->process), need_->call(),
                   need_->heard != nullptr ? need_->heard->ranks : std::vector<int>()});
  Notice notice;
  notice.kind = Notice::Kind::chain;
  notice.waiters = std::move(chain);
  process_.tell(need_->process, notice);
}

void Circles::hear_chain(std::vector<Waiter> chain) {
  if (process_.has_done(chain.back()) || look() == nullptr) return;
  const auto is_own = [&](const Waiter& w) { return w.process == process_.rank(); };
  if (std::ranges::any_of(chain, [&](const Waiter& w) { return is_own(w) && w.wait != number_; })) return;
  if (std::ranges::count_if(chain, is_own) < 2) return pass_on(std::move(chain));
  const auto last = std::ranges::find_if(chain.rbegin(), chain.rend(), is_own);
  conclude({last.base() - 1, chain.end()});
}

/// Tells all of the circle, which begins with its lowest rank, so that all chains end in the same words.
void Circles::conclude(std::vector<Waiter> circle) {
  std::ranges::rotate(circle, std::ranges::min_element(circle, {}, &Waiter::process));
  Notice notice;
  notice.kind = Notice::Kind::circle;
  notice.waiters = circle;
  for (const Waiter& w : circle)
    if (w.process != process_.rank()) process_.tell(w.process, notice);
  hear_circle(circle);
}

/// The first of the circle that waits in a group makes it fail.
void Circles::hear_circle(const std::vector<Waiter>& circle) {
  const bool all_renew = std::ranges::all_of(circle, &Waiter::renews);
  std::vector<Blocked> blocked;
  for (const Waiter& w : circle) blocked.push_back({w.process, w.call, w.blames});
  std::set<GroupId> seen;
  for (const Waiter& w : circle) {
    const std::shared_ptr<GroupCore> core = process_.group(w.line.group);
    const bool first = seen.insert(w.line.group).second;
    if (!first || !core || (w.renews && !all_renew)) continue;
    Fault fault = deadlock(
        {core->name, core->members, w.line.channel, w.line.source, w.line.destination, w.sequence}, blocked);
    if (w.renews)
      process_.fail_renewal(*core, std::move(fault));
    else if (w.process == process_.rank())
      process_.fail(*core, std::move(fault));
  }
}

}  // namespace sherd::processes
