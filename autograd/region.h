// What a region of `recompute` consists of, for code that makes it once more with other values.
#pragma once

#include <memory>

#include "autograd/trace.h"

namespace sherd {

/// The ops that `owner` runs again; null where it is no region.
const Trace* region_trace(const StorageOwner& owner);
/// The number in this trace of a storage that the region holds.
std::uint32_t region_index(const StorageOwner& owner, const Storage& storage);
/// A region that runs these ops again.
std::shared_ptr<StorageOwner> make_region(Trace trace);
/// A storage without memory that `region`, made so, fills: number `index` of its trace.
Ref<Storage> released_by(const std::shared_ptr<StorageOwner>& region, std::uint32_t index);

}  // namespace sherd
