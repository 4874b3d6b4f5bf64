// Lists of what may be gone.
#pragma once

#include <memory>
#include <span>
#include <vector>

namespace sherd::shard {

/// Adds to a list of what may be gone. Those that are gone are looked for when as many were added as were
/// there: a few steps for each.
template <class T>
void remember(std::vector<std::weak_ptr<T>>& list, const std::shared_ptr<T>& one) {
  if (list.size() == list.capacity()) {
    std::erase_if(list, [](const auto& weak) { return weak.expired(); });
    list.reserve(2 * list.size() + 1);
  }
  list.push_back(one);
}

/// Those of such a list that are not.
template <class T>
std::vector<std::shared_ptr<T>> alive(std::span<const std::weak_ptr<T>> list) {
  std::vector<std::shared_ptr<T>> alive;
  for (const auto& weak : list)
    if (auto one = weak.lock()) alive.push_back(std::move(one));
  return alive;
}

}  // namespace sherd::shard
