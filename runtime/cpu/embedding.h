// Rows of a table by index, and the gradient of that.
#pragma once

#include <cstdint>

#include "runtime/dtype.h"

namespace sherd::cpu {

/// out[i] = table[indices[i]] for rows of `width` contiguous elements. Returns the first position whose index
/// is outside [0, table_rows), with nothing written, or -1. `element_size` is in bytes; any dtype.
std::int64_t gather_rows(const void* table, std::int64_t element_size, std::int64_t table_rows,
                         std::int64_t width, const std::int64_t* indices, std::int64_t n, void* out);

/// gtable[indices[i]] += g[i] for i in order, so bits do not depend on the threads; `gtable` is set to zero
/// first unless `accumulate`. The indices must be those a `gather_rows` accepted. T is double, float, Half or
/// BFloat16.
template <class T>
void scatter_add_rows(const T* g, const std::int64_t* indices, std::int64_t n, std::int64_t table_rows,
                      std::int64_t width, bool accumulate, T* gtable);

}  // namespace sherd::cpu
