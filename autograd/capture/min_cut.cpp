#include "autograd/capture/min_cut.h"

#include <algorithm>

namespace sherd {

void MinCut::add(std::size_t from, std::size_t to, std::int64_t capacity) {
  const auto number = static_cast<std::uint32_t>(arcs_.size());
  arcs_.push_back({static_cast<std::uint32_t>(to), first_[from], capacity});
  arcs_.push_back({static_cast<std::uint32_t>(from), first_[to], 0});
  first_[from] = number;
  first_[to] = number + 1;
}

/// How far each node is from the source over arcs with something left; whether the sink can be reached.
bool MinCut::measure(std::size_t source, std::size_t sink) {
  distance_.assign(first_.size(), none);
  distance_[source] = 0;
  std::vector<std::uint32_t> queue{static_cast<std::uint32_t>(source)};
  for (std::size_t i = 0; i < queue.size(); ++i)
    for (std::uint32_t a = first_[queue[i]]; a != none; a = arcs_[a].next)
      if (arcs_[a].left > 0 && distance_[arcs_[a].to] == none) {
        distance_[arcs_[a].to] = distance_[queue[i]] + 1;
        queue.push_back(arcs_[a].to);
      }
  return distance_[sink] != none;
}

/// Sends what one more way from the source to the sink takes; 0 where there is none. Not by recursion: a
/// program may have more ops than a stack has frames.
std::int64_t MinCut::push(std::size_t source, std::size_t sink) {
  way_.clear();
  auto at = static_cast<std::uint32_t>(source);
  while (at != sink) {
    std::uint32_t& a = next_[at];
    while (a != none && (arcs_[a].left == 0 || distance_[arcs_[a].to] != distance_[at] + 1))
      a = arcs_[a].next;
    if (a != none) {
      way_.push_back(a);
      at = arcs_[a].to;
      continue;
    }
    if (way_.empty()) return 0;
    at = arcs_[way_.back() ^ 1].to;  // no way on from there
    way_.pop_back();
    next_[at] = arcs_[next_[at]].next;
  }
  std::int64_t amount = never;
  for (const std::uint32_t a : way_) amount = std::min(amount, arcs_[a].left);
  for (const std::uint32_t a : way_) {
    arcs_[a].left -= amount;
    arcs_[a ^ 1].left += amount;
  }
  return amount;
}

std::vector<bool> MinCut::run(std::size_t source, std::size_t sink) {
  while (measure(source, sink)) {
    next_ = first_;
    while (push(source, sink) > 0) continue;
  }
  std::vector<bool> side(first_.size());
  for (std::size_t n = 0; n < side.size(); ++n) side[n] = distance_[n] != none;
  return side;
}

}  // namespace sherd
