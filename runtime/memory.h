// What a rank's tensors hold, by what it is for: an error for lack of memory says it.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "runtime/device.h"
#include "runtime/export.h"

namespace sherd {

/// What a tensor's memory is for. `activations` is whatever an op makes outside of the others' scopes.
enum class MemoryUse : std::uint8_t { activations, gradients, optimizer, gathered, parameters };
inline constexpr std::size_t memory_uses = 5;
/// "activations", "gradients", ...
SHERD_API std::string_view to_string(MemoryUse use);

/// Bytes by what they are for.
struct HeldMemory {
  std::array<std::int64_t, memory_uses> bytes{};
  std::int64_t operator[](MemoryUse use) const { return bytes[static_cast<std::size_t>(use)]; }
  SHERD_API std::int64_t total() const;
  /// "3.0 MB: parameters 1.0 MB, gradients 2.0 MB"; what holds nothing is left out.
  SHERD_API std::string text() const;
};

/// The bytes that storages made by one rank hold on each type of device. The rank's own thread counts without
/// atomic operations; what other threads free is counted beside it. Memory that the caller brought is not
/// counted, nor what the back ends keep for later.
class SHERD_API MemoryLedger {
 public:
  /// `own`: the caller is the rank's own thread.
  void add(DeviceType type, MemoryUse use, std::int64_t bytes, bool own) noexcept {
    Counts& on = counts_[static_cast<std::size_t>(type)];
    if (!own) [[unlikely]]
      return add_elsewhere(on, use, bytes);
    on.all += bytes;
    if (use != MemoryUse::activations) on.here[static_cast<std::size_t>(use)] += bytes;
    if (on.all > on.most) [[unlikely]]
      note_peak(on);
  }

  // ---- own thread only ----
  HeldMemory held(DeviceType type) const;
  /// The most that was held at once since the start or the last `reset_peak`.
  std::int64_t peak(DeviceType type) const { return counts_[static_cast<std::size_t>(type)].peak; }
  void reset_peak(DeviceType type);

 private:
  /// Of one type of device. What is neither here nor elsewhere for another use is activations.
  struct Counts {
    std::int64_t all = 0, most = 0, peak = 0;  // `most`: of `all`, above which there may be a new peak
    std::array<std::int64_t, memory_uses> here{};
    std::array<std::atomic<std::int64_t>, memory_uses> elsewhere{};
    std::atomic<std::int64_t> all_elsewhere{0};
  };
  static void add_elsewhere(Counts& on, MemoryUse use, std::int64_t bytes) noexcept;
  static void note_peak(Counts& on) noexcept;
  std::array<Counts, device_type_limit> counts_{};
};

/// "512 bytes", "1.5 kB", "3.0 MB", "2.0 GB"; powers of ten.
SHERD_API std::string bytes_text(std::int64_t bytes);

}  // namespace sherd
