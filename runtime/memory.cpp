#include "runtime/memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

namespace sherd {

std::string_view to_string(MemoryUse use) {
  constexpr std::array<std::string_view, memory_uses> names = {"activations", "gradients", "optimizer",
                                                               "gathered", "parameters"};
  return names[static_cast<std::size_t>(use)];
}

std::int64_t HeldMemory::total() const {
  return std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0});
}

std::string HeldMemory::text() const {
  std::string text = bytes_text(total());
  std::string_view before = ": ";
  for (std::size_t i = memory_uses; i-- > 0;) {
    if (bytes[i] == 0) continue;
    text += fmt::format("{}{} {}", before, to_string(static_cast<MemoryUse>(i)), bytes_text(bytes[i]));
    before = ", ";
  }
  return text;
}

void MemoryLedger::add_elsewhere(Counts& on, MemoryUse use, std::int64_t bytes) noexcept {
  on.elsewhere[static_cast<std::size_t>(use)].fetch_add(bytes, std::memory_order_relaxed);
  on.all_elsewhere.fetch_add(bytes, std::memory_order_relaxed);
}

void MemoryLedger::note_peak(Counts& on) noexcept {
  const std::int64_t elsewhere = on.all_elsewhere.load(std::memory_order_relaxed);
  on.peak = std::max(on.peak, on.all + elsewhere);
  on.most = on.peak - elsewhere;
}

HeldMemory MemoryLedger::held(DeviceType type) const {
  const Counts& on = counts_[static_cast<std::size_t>(type)];
  HeldMemory held;
  std::int64_t others = 0;
  for (std::size_t i = 1; i < memory_uses; ++i)
    others += held.bytes[i] = on.here[i] + on.elsewhere[i].load(std::memory_order_relaxed);
  held.bytes[0] = on.all + on.all_elsewhere.load(std::memory_order_relaxed) - others;
  return held;
}

void MemoryLedger::reset_peak(DeviceType type) {
  Counts& on = counts_[static_cast<std::size_t>(type)];
  on.peak = 0;
  note_peak(on);
}

std::string bytes_text(std::int64_t bytes) {
  const auto n = static_cast<double>(bytes);
  return bytes < 1000 ? fmt::format("{} bytes", bytes)
         : n < 1e6    ? fmt::format("{:.1f} kB", n / 1e3)
         : n < 1e9    ? fmt::format("{:.1f} MB", n / 1e6)
                      : fmt::format("{:.1f} GB", n / 1e9);
}

}  // namespace sherd
