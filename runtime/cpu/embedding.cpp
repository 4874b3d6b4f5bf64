#include "runtime/cpu/embedding.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "runtime/parallel.h"

namespace sherd::cpu {
namespace {

/// `columns` columns of every row, summed into `sums`, whose rows are `row` elements apart.
template <class T, class C>
void add_columns(const T* g, const std::int64_t* indices, std::int64_t n, std::int64_t width,
                 std::int64_t columns, C* sums, std::int64_t row) {
  for (std::int64_t i = 0; i < n; ++i) {
    const T* from = g + i * width;
    C* to = sums + indices[i] * row;
    for (std::int64_t j = 0; j < columns; ++j) to[j] += C(from[j]);
  }
}

}  // namespace

std::int64_t gather_rows(const void* table, std::int64_t element_size, std::int64_t table_rows,
                         std::int64_t width, const std::int64_t* indices, std::int64_t n, void* out) {
  for (std::int64_t i = 0; i < n; ++i) {
    if (indices[i] < 0 || indices[i] >= table_rows) return i;
  }
  const std::int64_t bytes = width * element_size;
  if (bytes == 0) return -1;
  const auto* from = static_cast<const char*>(table);
  auto* to = static_cast<char*>(out);
  parallel_for(n, std::max<std::int64_t>(1, (1 << 16) / bytes), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      std::memcpy(to + i * bytes, from + indices[i] * bytes, static_cast<std::size_t>(bytes));
    }
  });
  return -1;
}

template <class T>
void scatter_add_rows(const T* g, const std::int64_t* indices, std::int64_t n, std::int64_t table_rows,
                      std::int64_t width, bool accumulate, T* gtable) {
  using C = compute_t<T>;
  if (!accumulate) std::fill_n(gtable, table_rows * width, T(C(0)));
  // A tile owns columns: all its sums run over the indices in order.
  const std::int64_t columns = n * width <= (1 << 14) ? width : 64;
  parallel_for(width, std::max<std::int64_t>(columns, 1), [&](std::int64_t begin, std::int64_t end) {
    if constexpr (std::is_same_v<T, C>) {
      add_columns(g + begin, indices, n, width, end - begin, gtable + begin, width);
    } else {
      // Halves would lose every small addition, so the sums are floats until the end.
      const std::int64_t w = end - begin;
      std::vector<C> sums(static_cast<std::size_t>(table_rows * w));
      add_columns(g + begin, indices, n, width, w, sums.data(), w);
      for (std::int64_t r = 0; r < table_rows; ++r) {
        T* to = gtable + r * width + begin;
        for (std::int64_t j = 0; j < w; ++j) to[j] = T(C(to[j]) + sums[r * w + j]);
      }
    }
  });
}

template void scatter_add_rows(const double*, const std::int64_t*, std::int64_t, std::int64_t, std::int64_t,
                               bool, double*);
template void scatter_add_rows(const float*, const std::int64_t*, std::int64_t, std::int64_t, std::int64_t,
                               bool, float*);
template void scatter_add_rows(const Half*, const std::int64_t*, std::int64_t, std::int64_t, std::int64_t,
                               bool, Half*);
template void scatter_add_rows(const BFloat16*, const std::int64_t*, std::int64_t, std::int64_t, std::int64_t,
                               bool, BFloat16*);

}  // namespace sherd::cpu
