#include "shard/record.h"

#include <utility>

#include "autograd/tape.h"
#include "runtime/context.h"
#include "shard/engine.h"

namespace sherd::shard {

/// Program position, so that of two moments all ranks see the same one first.
std::uint64_t Record::next_place() { return Context::current().slot<Tape>().take_sequence(); }

Record::Use Record::use_of(Gathered& gathered, Moment moment) {
  auto region = recording_region();
  const bool planned = Context::current().grad_enabled() || region != nullptr;
  return {gathered.shared(), moment, next_place(), planned, std::move(region)};
}

void Record::add_unless_used(const Use& use) {
  const auto same = [&](const Use& u) { return u.planned && u.gathered.lock() == use.gathered.lock(); };
  if (std::ranges::any_of(uses_, same)) return;
  uses_.push_back(use);
  if (const auto kept = kept_.lock())
    if (auto gathered = use.gathered.lock()) kept->gathered.push_back(std::move(gathered));
}

void Record::freed(const Gathered& gathered) { set_freed_at(gathered, next_place()); }

void Record::set_freed_at(const Gathered& gathered, std::uint64_t place) {
  const auto last = std::find_if(uses_.rbegin(), uses_.rend(),
                                 [&](const Use& u) { return u.gathered.lock().get() == &gathered; });
  if (last != uses_.rend()) last->freed_at = place;
}

/// Of its planned uses.
template <class F>
bool Record::any_of(const Root& root, F&& holds) const {
  return std::ranges::any_of(uses_, [&](const Use& use) {
    const auto gathered = use.gathered.lock();
    if (!use.planned || !gathered) return false;
    const bool of_another = use.moment == Moment::outside && gathered->group().root().get() != &root;
    return !of_another && holds(gathered->group());
  });
}

bool Record::planned(const Root& root) const {
  return any_of(root, [](const ParameterGroup&) { return true; });
}

bool Record::trainable(const Root& root) const {
  return any_of(root, [](const ParameterGroup& group) { return group.trainable(); });
}

std::shared_ptr<GradSink> with_groups(const std::shared_ptr<Record>& record) {
  auto kept = std::make_shared<Record::Kept>(record);
  for (const Record::Use& use : record->uses())
    if (auto gathered = use.gathered.lock(); gathered && use.planned)
      kept->gathered.push_back(std::move(gathered));
  record->kept_ = kept;
  return {kept, record.get()};
}

void Record::begin(PassInfo pass, Leaf&) { engine().begin(pass.number, *this); }

}  // namespace sherd::shard
