// The largest elements of rows.
#include "runtime/ops/topk.h"

#include <algorithm>
#include <vector>

#include "runtime/cpu/row_order.h"
#include "runtime/parallel.h"

namespace sherd::cpu {
namespace {

template <class Word, class T>
void topk_of_rows(const T* x, std::int64_t rows, std::int64_t columns, std::int64_t k, T* values,
                  std::int64_t* indices) {
  parallel_for(rows, std::max<std::int64_t>(1, (1 << 12) / columns),
               [&](std::int64_t begin, std::int64_t end) {
                 RowOrder<T, Word> order;
                 for (std::int64_t row = begin; row < end; ++row) {
                   const T* at = x + row * columns;
                   order.find(at, columns, k);
                   for (std::int64_t j = 0; j < k; ++j) {
                     indices[row * k + j] = order[static_cast<std::size_t>(j)];
                     values[row * k + j] = at[indices[row * k + j]];
                   }
                 }
               });
}

void topk(const ops::TopK& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Tensor& x = in[0];
  const std::int64_t columns = x.shape().back(), rows = x.numel() / columns;
  with_element(x.dtype(), [&]<class T>() {
    auto* values = reinterpret_cast<T*>(out[0].raw());
    auto* indices = reinterpret_cast<std::int64_t*>(out[1].raw());
    if (sizeof(T) <= 4 && columns <= UINT32_MAX)
      topk_of_rows<std::uint64_t>(x.data<T>(), rows, columns, op.k, values, indices);
    else
      topk_of_rows<row_order::Wide>(x.data<T>(), rows, columns, op.k, values, indices);
  });
}

}  // namespace

void add_topk() { add_kernel<topk>(DeviceType::cpu); }

}  // namespace sherd::cpu
