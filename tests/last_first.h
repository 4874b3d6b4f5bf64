// The order of a recording's parts that is furthest from the one in which they were given, for devices of
// tests: what is not said to follow another part comes before it.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "runtime/device_recording.h"

namespace sherd::test {

using Tasks = std::vector<std::function<void()>>;

/// Gives all parts of `work`, which add to `tasks`, and puts those in the other order.
inline void record_last_first(const WorkInParts& work, Tasks& tasks) {
  std::vector<Tasks> of;
  std::vector<std::uint32_t> missing;
  std::vector<std::vector<std::uint32_t>> behind(work.parts.size());
  for (std::uint32_t i = 0; i < work.parts.size(); ++i) {
    work.give(i);
    of.push_back(std::exchange(tasks, {}));
    missing.push_back(static_cast<std::uint32_t>(work.parts[i].after.size()));
    for (const std::uint32_t before : work.parts[i].after) behind[before].push_back(i);
  }
  std::vector<bool> taken(of.size());
  for (std::size_t times = 0; times < of.size(); ++times) {
    std::size_t i = of.size() - 1;
    while (taken[i] || missing[i] > 0) --i;
    taken[i] = true;
    for (const std::uint32_t next : behind[i]) --missing[next];
    for (auto& task : of[i]) tasks.push_back(std::move(task));
  }
}

}  // namespace sherd::test
