#include "runtime/cpu/embedding.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "runtime/cpu/element_bits.h"
#include "runtime/cpu/positions.h"
#include "runtime/instances.h"
#include "runtime/ops/embedding.h"
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

void gather_elements(const void* table, std::int64_t element_size, const std::int64_t* indices,
                     std::int64_t n, void* out) {
  with_bits(element_size, [&]<class T>(T) {
    const T* from = static_cast<const T*>(table);
    T* to = static_cast<T*>(out);
    parallel_for(n, 1 << 14, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) to[i] = from[indices[i]];
    });
  });
}

/// The numbers of the gradients of each row of the table, in order; those of row r begin at first[r].
struct ByRow {
  std::vector<std::int64_t> first, order;
  ByRow(const std::int64_t* indices, std::int64_t n, std::int64_t rows)
      : first(static_cast<std::size_t>(rows) + 1), order(static_cast<std::size_t>(n)) {
    for (std::int64_t i = 0; i < n; ++i) ++first[static_cast<std::size_t>(indices[i]) + 1];
    std::partial_sum(first.begin(), first.end(), first.begin());
    for (std::int64_t i = 0; i < n; ++i) {
      auto& next = first[static_cast<std::size_t>(indices[i])];
      order[static_cast<std::size_t>(next++)] = i;
    }
    for (std::size_t r = static_cast<std::size_t>(rows); r > 0; --r)
      first[r] = first[r - 1];  // moved up by the loop
    first[0] = 0;
  }
};

/// Row by row of the table: each of them is read and written once.
template <class T>
void add_by_row(const T* g, const std::int64_t* indices, std::int64_t n, std::int64_t table_rows,
                std::int64_t width, bool accumulate, T* gtable) {
  using C = compute_t<T>;
  const ByRow by_row(indices, n, table_rows);
  constexpr std::int64_t piece = 256;  // columns of one task: rows that are named often are shared too
  const std::int64_t across = (width + piece - 1) / piece;
  const std::int64_t work = (table_rows + n) / std::max<std::int64_t>(table_rows, 1) * std::min(width, piece);
  parallel_for(table_rows * across, std::max<std::int64_t>(1, (1 << 14) / work),
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t t = begin; t < end; ++t) {
                   const std::int64_t r = t / across, c = t % across * piece, w = std::min(piece, width - c);
                   T* to = gtable + r * width + c;
                   const std::int64_t *i = by_row.order.data() + by_row.first[static_cast<std::size_t>(r)],
                                      *last =
                                          by_row.order.data() + by_row.first[static_cast<std::size_t>(r) + 1];
                   if (i == last) {
                     if (!accumulate) std::fill_n(to, w, T(C(0)));
                     continue;
                   }
                   // Halves would lose every small addition, so the sums are floats until the end.
                   C sums[piece] = {};
                   if (std::is_same_v<T, C> && accumulate)
                     for (std::int64_t j = 0; j < w; ++j) sums[j] = C(to[j]);
                   for (; i != last; ++i) {
                     const T* from = g + *i * width + c;
                     for (std::int64_t j = 0; j < w; ++j) sums[j] += C(from[j]);
                   }
                   const bool add = accumulate && !std::is_same_v<T, C>;
                   for (std::int64_t j = 0; j < w; ++j) to[j] = T(add ? C(to[j]) + sums[j] : sums[j]);
                 }
               });
}

}  // namespace

std::int64_t gather_rows(const void* table, std::int64_t element_size, std::int64_t table_rows,
                         std::int64_t width, const std::int64_t* indices, std::int64_t n, void* out) {
  if (const std::int64_t bad = first_outside(indices, n, table_rows); bad >= 0) return bad;
  const std::int64_t bytes = width * element_size;
  if (bytes == 0) return -1;
  if (width == 1) {
    gather_elements(table, element_size, indices, n, out);
    return -1;
  }
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
  if (width >= 16) return add_by_row(g, indices, n, table_rows, width, accumulate, gtable);
  if (!accumulate) std::fill_n(gtable, table_rows * width, T(C(0)));
  // A tile owns columns: all its sums run over the indices in order.
  parallel_for(width, n * width <= (1 << 14) ? width : 8, [&](std::int64_t begin, std::int64_t end) {
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

[[gnu::used]] const auto embedding_instances =
    instances_for<floating_dtypes>([]<class T>() { return std::tuple(&scatter_add_rows<T>); });

namespace {

void embedding(const ops::Embedding& op, Inputs in, Outputs out) {
  const Tensor &table = in[0], &index = in[1];
  if (index.numel() == 0) return;
  const std::int64_t rows = table.shape()[0], width = out[0].numel() / index.numel();
  const std::int64_t* at = index.data<std::int64_t>();
  const std::int64_t bad =
      gather_rows(table.raw(), size_of(table.dtype()), rows, width, at, index.numel(), out[0].raw());
  check<ValueError>(bad < 0, "{}: index {} at position {} is outside [0, {})", op.call,
                    at[std::max<std::int64_t>(bad, 0)], bad, rows);
}

void embedding_grad(const ops::EmbeddingGrad& op, Inputs in, Outputs out) {
  const std::int64_t width = op.rows == 0 ? 0 : out[0].numel() / op.rows;
  with_floating(op.name, in[0].dtype(), [&]<class T>() {
    scatter_add_rows(in[0].data<T>(), in[1].data<std::int64_t>(), in[1].numel(), op.rows, width, false,
                     reinterpret_cast<T*>(out[0].raw()));
  });
}

}  // namespace

void add_embedding() {
  add_kernel<embedding>(DeviceType::cpu);
  add_kernel<embedding_grad>(DeviceType::cpu);
}

}  // namespace sherd::cpu
