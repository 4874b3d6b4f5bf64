// Memory that owners bring, and keep, while a program runs.
#pragma once

#include <span>
#include <vector>

#include "autograd/region.h"
#include "runtime/storage.h"

namespace sherd {

/// Whether an owner brings the values of a storage from elsewhere: not a region of `recompute`, which makes
/// them again by ops.
inline bool is_brought(const Storage& storage) {
  return storage.owned() && region_trace(*storage.owner()) == nullptr;
}

/// Brings the memory of those with such an owner, all of it before any op, and keeps it to its end.
class Resident {
 public:
  explicit Resident(std::span<const Ref<Storage>> storages) {
    for (const Ref<Storage>& storage : storages) {
      if (!storage || !is_brought(*storage)) continue;
      storage->pin();
      pinned_.push_back(storage);
    }
    try {
      for (const Ref<Storage>& storage : pinned_)
        if (!storage->resident()) storage->owner()->need(*storage);
    } catch (...) {
      unpin();
      throw;
    }
  }
  ~Resident() { unpin(); }
  Resident(const Resident&) = delete;
  Resident& operator=(const Resident&) = delete;

 private:
  void unpin() noexcept {
    for (const Ref<Storage>& storage : pinned_) storage->unpin();
  }
  std::vector<Ref<Storage>> pinned_;
};

}  // namespace sherd
