// Memory that owners bring, and keep, while an op of a program runs.
#pragma once

#include <vector>

#include "autograd/region.h"
#include "runtime/storage.h"

namespace sherd {

/// Whether an owner brings the values of a storage from elsewhere: not a region of `recompute`, which makes
/// them again by ops.
inline bool is_brought(const Storage& storage) {
  return storage.owned() && region_trace(*storage.owner()) == nullptr;
}

/// A scope that keeps memory of owners, once it is brought.
class Resident {
 public:
  Resident() = default;
  ~Resident() {
    for (const Ref<Storage>& storage : pinned_) storage->unpin();
  }
  Resident(const Resident&) = delete;
  Resident& operator=(const Resident&) = delete;

  void bring(const Ref<Storage>& storage) {
    pinned_.push_back(storage);
    storage->pin();
    if (!storage->resident()) storage->owner()->need(*storage);
  }

 private:
  std::vector<Ref<Storage>> pinned_;
};

}  // namespace sherd
