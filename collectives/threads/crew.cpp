#include "collectives/threads/crew.h"

#include <algorithm>

#include "collectives/threads/exchange.h"

namespace sherd::threads {

void Bell::wake() {
  rings_.fetch_add(1, std::memory_order_seq_cst);
  rings_.notify_one();
}

bool Need::over() const {
  return posted->load(std::memory_order_seq_cst) > sequence || (!renews && core->fault() != nullptr);
}

bool Need::in_sight() const { return over() || promised->load(std::memory_order_relaxed) > sequence; }

void Crew::leave(int rank, Presence how, std::string_view reason) {
  Seat& gone = seat(rank);
  gone.parting = parting(how == Presence::threw ? Departure::threw : Departure::left, reason,
                         gone.heard ? &*gone.heard : nullptr);
  gone.presence.store(how, std::memory_order_seq_cst);
  for (Seat& s : seats_) s.bell.ring();
}

std::vector<int> Crew::circle_from(int rank) {
  std::vector<int> path;
  while (std::ranges::find(path, rank) == path.end()) {
    const std::optional<Need>& need = seat(rank).need;
    if (!need || need->in_sight()) return {};
    path.push_back(rank);
    rank = need->seat;
  }
  path.erase(path.begin(), std::ranges::find(path, rank));
  std::ranges::rotate(path, std::ranges::min_element(path));  // one circle, one text
  return path;
}

void Crew::begin_wait(int rank, Need need) {
  const std::scoped_lock lock(needs_mutex_);
  seat(rank).need = std::move(need);
  const std::vector<int> circle = circle_from(rank);
  std::vector<Blocked> blocked;
  for (int r : circle) {
    const Need& n = *seat(r).need;
    const std::optional<Fault>& heard = seat(r).heard;
    if (n.renews)
      blocked.push_back({r, describe_renewal(n.core->name(), heard ? &*heard : nullptr),
                         heard ? heard->ranks : std::vector<int>()});
    else
      blocked.push_back({r, describe(n.place, n.signature)});
  }
  const bool all_renew = std::ranges::all_of(circle, [&](int r) { return seat(r).need->renews; });
  for (int r : circle) {
    const Need& n = *seat(r).need;
    if (!n.renews)
      n.core->fail(deadlock(n.place, blocked));
    else if (all_renew)  // else ranks whose groups fail may wake and renew too
      n.core->fail_renewal(deadlock(n.place, blocked));
  }
}

void Crew::end_wait(int rank) {
  const std::scoped_lock lock(needs_mutex_);
  seat(rank).need.reset();
}

// ---- a group's shared part ----

Core::Core(std::shared_ptr<Crew> crew, std::vector<int> seats, std::string name)
    : crew_(std::move(crew)), seats_(std::move(seats)), name_(std::move(name)), renewal_(seats_.size()) {}

Exchange& Core::exchange(int channel, int source, int destination) {
  const std::scoped_lock lock(exchanges_mutex_);
  std::unique_ptr<Exchange>& exchange = exchanges_[{channel, source, destination}];
  if (!exchange) exchange = std::make_unique<Exchange>(source < 0 ? seats_.size() : 2);
  return *exchange;
}

std::int64_t Core::offer(std::shared_ptr<Core> made) {
  const std::scoped_lock lock(offers_mutex_);
  const int members = made->size();
  offers_[++last_offer_] = {std::move(made), members};
  return last_offer_;
}

std::shared_ptr<Core> Core::accept(std::int64_t number) {
  const std::scoped_lock lock(offers_mutex_);
  const auto found = offers_.find(number);
  if (found == offers_.end()) return nullptr;
  std::shared_ptr<Core> made = found->second.made;
  if (--found->second.waiting == 0) offers_.erase(found);
  return made;
}

void Core::fail(Fault fault) {
  {
    const std::scoped_lock lock(fault_mutex_);
    if (first_fault_) return;
    first_fault_ = std::make_unique<const Fault>(std::move(fault));
    fault_.store(first_fault_.get(), std::memory_order_seq_cst);
  }
  ring_all();
  meetings_.give_up();
}

void Core::fail_renewal(Fault fault) {
  {
    const std::scoped_lock lock(renewal_.mutex);
    if (renewal_.first_fault || renewal_.ready.load()) return;
    renewal_.first_fault = std::make_unique<const Fault>(std::move(fault));
    renewal_.fault.store(renewal_.first_fault.get(), std::memory_order_seq_cst);
  }
  ring_all();
}

void Core::ring_all() {
  for (int s : seats_) crew_->seat(s).bell.ring();
}

}  // namespace sherd::threads
