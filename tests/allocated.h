// Bytes that a process has allocated and uses.
#pragma once

#include <malloc.h>

#include <cstdint>

#include "runtime/context.h"
#include "tests/sanitizer.h"
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
extern "C" std::size_t __sanitizer_get_current_allocated_bytes();  // no header of gcc declares it
#endif

namespace sherd::test {

/// Without what this rank's pool keeps for later.
inline std::int64_t allocated_bytes() {
  Context::current().cpu_pool().trim();
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return static_cast<std::int64_t>(__sanitizer_get_current_allocated_bytes());
#else
  const struct mallinfo2 now = ::mallinfo2();
  return static_cast<std::int64_t>(now.uordblks + now.hblkhd);
#endif
}

}  // namespace sherd::test
