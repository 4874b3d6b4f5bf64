// Writing rows by their numbers, and elements by a mask.
#include "runtime/ops/index.h"

#include <cstring>

#include "runtime/cpu/elementwise_loop.h"
#include "runtime/cpu/positions.h"
#include "runtime/ops.h"
#include "runtime/ops/where.h"
#include "runtime/parallel.h"

namespace sherd::cpu {
namespace {

/// One after another, so that the last of equal positions stays; of wide rows all, a piece of each at a time.
void write_each(const std::int64_t* at, std::int64_t n, std::int64_t bytes, const std::byte* from,
                std::byte* to) {
  constexpr std::int64_t piece = 1 << 10;
  parallel_for(bytes, n * bytes > 1 << 16 ? piece : bytes, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = 0; i < n; ++i)
      std::memcpy(to + at[i] * bytes + begin, from + i * bytes + begin,
                  static_cast<std::size_t>(end - begin));
  });
}

void write_rows(const ops::WriteRows& op, Inputs in, Outputs out) {
  const Tensor &index = in[1], &values = in[2];
  const Tensor rows = out[0].is_contiguous() ? out[0] : clone(out[0]);
  const std::int64_t* at = index.data<std::int64_t>();
  const std::int64_t n = index.numel();
  check_positions(op.call, at, n, rows.shape()[0]);
  if (values.numel() == 0) return;
  if (values.numel() == n)
    with_bits(values.dtype(), [&]<class T>(T) {
      const T* from = reinterpret_cast<const T*>(values.raw());
      T* to = reinterpret_cast<T*>(rows.raw());
      for (std::int64_t i = 0; i < n; ++i) to[at[i]] = from[i];
    });
  else
    write_each(at, n, values.spec().bytes() / n, values.raw(), rows.raw());
  if (!rows.is(out[0])) copy_(alias(out[0], out[0].layout()), rows);
}

void fill_where(const ops::FillWhere&, Inputs in, Outputs out) {
  const Tensor chosen[] = {in[1], in[2], in[0]};  // every element stays in its place
  sherd::detail::run_elementwise(ops::Where{}, chosen, out);
}

}  // namespace

void add_index() {
  add_kernel<write_rows>(DeviceType::cpu);
  add_kernel<fill_where>(DeviceType::cpu);
}

}  // namespace sherd::cpu
