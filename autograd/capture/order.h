// Which ops of a list must follow which others, by the bytes that they use.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

namespace sherd {

/// Bytes [first, past) that an op reads, or writes and may read.
struct Use {
  std::uintptr_t first, past;
  bool writes;
};

/// The order that ops need: any in which each follows those that it must leaves every byte as the list's own
/// order does.
class OpOrder {
 public:
  /// The earlier ops that the list's next one must follow: who wrote what it uses last, and who has read
  /// since what it writes. Ascending, each once.
  std::vector<std::uint32_t> next(std::span<const Use> uses);
  /// The same for an op that follows all before it, and that all behind it follow.
  std::vector<std::uint32_t> next_alone();

 private:
  static constexpr std::uint32_t nobody = 0xffff'ffff;
  struct Bytes {  // from its key in the map
    std::uintptr_t past;
    std::uint32_t writer = nobody;
    std::vector<std::uint32_t> readers{};  // since
  };
  void split(std::uintptr_t at);
  void cover(std::uintptr_t first, std::uintptr_t past);

  std::map<std::uintptr_t, Bytes> bytes_;
  std::uint32_t count_ = 0, alone_ = nobody;
};

}  // namespace sherd
