// How many averages a gradient holds, as ranks tell each other.
#pragma once

#include <cstdint>

#include "runtime/tensor.h"

namespace sherd::shard {

/// How many averages the `.grad` of a leaf holds, as a number that ranks compare after a fault: also of what
/// was written over them since, as by clipping, which a fault may have kept from some ranks. Clippings count
/// by leaf, since the version of a storage counts writes of all gradients that this rank has in it.
class HeldAverages {
 public:
  HeldAverages() = default;
  /// `leaf` shows an average now; `added`: to what was there.
  void put(const Tensor& leaf, bool added);
  void clear() { count_ = 0; }
  /// Of `grad`, which `leaf` shows when no sum of this rank's own is in its place. Averages are to be added
  /// to it, or to others in its storage; then `take_version`.
  void look(const Tensor& leaf, const Tensor& grad);
  void take_version(const Tensor& grad) {
    if (grad.defined() && grad.storage().id() == storage_) version_ = std::int64_t{grad.storage().version()};
  }
  std::int64_t number(const Tensor& leaf, const Tensor& grad) const;
  static std::int64_t count_in(std::int64_t number) { return number / (base * base); }

 private:
  static constexpr std::int64_t base = 10'000;
  HeldAverages(std::uint64_t storage, std::int64_t scalings) : storage_(storage), scalings_(scalings) {}
  bool written(const Tensor& leaf, const Tensor& grad) const;

  std::int64_t count_ = 0;
  std::uint64_t storage_ = 0;
  std::int64_t version_ = 0;
  std::int64_t scalings_ = 0;  ///< of the leaf, when the first one was put there
  std::int64_t writes_ = 0;    ///< looks that found what others wrote, or put there
};

}  // namespace sherd::shard
