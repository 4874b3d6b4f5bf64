#include "autograd/capture/order.h"

#include <algorithm>
#include <iterator>
#include <numeric>

namespace sherd {

/// Has what lies around `at` end and begin there.
void OpOrder::split(std::uintptr_t at) {
  auto around = bytes_.upper_bound(at);
  if (around == bytes_.begin()) return;
  --around;
  if (around->first == at || around->second.past <= at) return;
  Bytes behind = around->second;
  around->second.past = at;
  bytes_.emplace_hint(std::next(around), at, std::move(behind));
}

/// Has the entries between the two bytes lie within them, and leave none out.
void OpOrder::cover(std::uintptr_t first, std::uintptr_t past) {
  split(first);
  split(past);
  while (first < past) {
    auto its = bytes_.lower_bound(first);
    if (its == bytes_.end() || its->first != first)
      its = bytes_.emplace_hint(its, first, Bytes{its == bytes_.end() ? past : std::min(past, its->first)});
    first = its->second.past;
  }
}

std::vector<std::uint32_t> OpOrder::next(std::span<const Use> uses) {
  const std::uint32_t self = count_++;
  std::vector<std::uint32_t> after;
  if (alone_ != nobody) after.push_back(alone_);
  const auto each = [&](bool writes, auto&& body) {
    for (const Use& use : uses) {
      if (use.writes != writes || use.first == use.past) continue;
      cover(use.first, use.past);
      for (auto its = bytes_.find(use.first); its != bytes_.end() && its->first < use.past; ++its)
        body(its->second);
    }
  };
  const auto follow_writer = [&](const Bytes& bytes) {
    if (bytes.writer != nobody && bytes.writer != self) after.push_back(bytes.writer);
  };
  each(false, [&](Bytes& bytes) {
    follow_writer(bytes);
    if (bytes.readers.empty() || bytes.readers.back() != self) bytes.readers.push_back(self);
  });
  each(true, [&](Bytes& bytes) {
    follow_writer(bytes);
    std::ranges::copy_if(bytes.readers, std::back_inserter(after), [&](auto r) { return r != self; });
    bytes.writer = self;
    bytes.readers.clear();
  });
  std::ranges::sort(after);
  after.erase(std::unique(after.begin(), after.end()), after.end());
  return after;
}

std::vector<std::uint32_t> OpOrder::next_alone() {
  const std::uint32_t since = alone_ == nobody ? 0 : alone_;
  std::vector<std::uint32_t> after(count_ - since);
  std::iota(after.begin(), after.end(), since);
  alone_ = count_++;
  bytes_.clear();
  return after;
}

}  // namespace sherd
