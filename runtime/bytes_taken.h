// What memory of a size takes.
#pragma once

#include <cstddef>

#include "runtime/device.h"

namespace sherd {

/// Bytes that the ledger counts for a storage of `bytes`: what its back end gives it, on the CPU the size
/// class of the pool.
std::size_t bytes_taken(Device device, std::size_t bytes);

}  // namespace sherd
