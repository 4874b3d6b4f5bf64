// The one way the library uses several cores: work cut into fixed tiles. Which thread runs a tile never
// changes a bit of the result.
#pragma once

#include <cstdint>
#include <type_traits>

#include "runtime/export.h"

namespace sherd {

/// Threads this rank may use inside an op, at least 1 (and 1 on a thread without a `Context`). Set with
/// `Context::set_threads`.
SHERD_API int intra_op_threads() noexcept;

namespace detail {
using TileBody = void (*)(const void* body, std::int64_t begin, std::int64_t end);
SHERD_API void run_tiles(std::int64_t n, std::int64_t grain, TileBody call, const void* body);
}  // namespace detail

/// Calls `body(begin, end)` for the tiles [0,grain), [grain,2*grain), ... of [0,n), some of them at the same
/// time; returns when all are done. The tiles depend on `n` and `grain` only, so a result that depends on its
/// tile alone has the same bits for any number of threads. When `body` throws, tiles that have not begun are
/// skipped, and the first exception is thrown to the caller once no tile runs any more. A call from within
/// `body` runs all its tiles on the thread that makes it.
template <class F>
void parallel_for(std::int64_t n, std::int64_t grain, const F& body) {
  if (n <= 0) return;
  if (n <= grain) return body(std::int64_t{0}, n);
  detail::run_tiles(
      n, grain,
      [](const void* b, std::int64_t begin, std::int64_t end) { (*static_cast<const F*>(b))(begin, end); },
      &body);
}

}  // namespace sherd
