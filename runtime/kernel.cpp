#include "runtime/kernel.h"

#include <memory>
#include <mutex>
#include <unordered_map>

namespace sherd {

KernelRow& kernel_row(std::type_index op) {
  // Never destroyed: objects that outlive main may still apply ops.
  static auto& rows = *std::make_unique<std::unordered_map<std::type_index, KernelRow>>().release();
  static std::mutex mutex;
  const std::scoped_lock lock(mutex);
  return rows[op];
}

}  // namespace sherd
