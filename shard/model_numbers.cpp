#include "shard/model_numbers.h"

#include <algorithm>
#include <iterator>
#include <set>

#include "shard/engine.h"

namespace sherd::shard {

ModelAmong* ModelNumbers::find(const GroupKey& key) {
  const auto known = std::ranges::find(known_, key, &ModelAmong::key);
  return known != known_.end() ? &*known : nullptr;
}

ModelNumber ModelNumbers::among(const Group& ranks) {
  if (!ranks.defined()) return {};
  if (const ModelAmong* known = find(ranks.key())) return known->number;
  std::erase_if(known_,
                [&](const ModelAmong& old) { return old.ranks.expired() || watches(old.ranks, ranks); });
  known_.push_back({ranks.watch(), ranks.key(), {Engine::current().count_model(ranks)}});
  return known_.back().number;
}

/// The first of their numbers is that of all of them. The others are given to later models if none that is
/// not a part has come between.
void ModelNumbers::take(std::span<ModelNumbers* const> parts) {
  for (const ModelNumbers* part : parts) take_over(*part);
  for (ModelAmong& own : known_) {
    std::set<int> numbers{own.number.model};
    for (ModelNumbers* part : parts)
      if (const ModelAmong* its = part->find(own.key)) numbers.insert(its->number.model);
    own.number = {*numbers.begin()};
    for (std::size_t i = 0; i < parts.size(); ++i)
      if (ModelAmong* its = parts[i]->find(own.key))
        its->number = {own.number.model, static_cast<int>(i) + 1};
    Engine::current().count_as_one(own.key, *numbers.begin(), std::ssize(numbers));
  }
}

void ModelNumbers::take_over(const ModelNumbers& part) {
  for (const ModelAmong& its : part.known_)
    if (find(its.key) == nullptr) known_.push_back({its.ranks, its.key, {its.number.model}});
}

}  // namespace sherd::shard
