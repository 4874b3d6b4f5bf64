// Writing rows by their numbers, and elements by a mask.
#include "runtime/ops/index.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>

#include "runtime/cpu/element_bits.h"
#include "runtime/cpu/elementwise_loop.h"
#include "runtime/cpu/positions.h"
#include "runtime/ops.h"
#include "runtime/ops/where.h"
#include "runtime/parallel.h"
#include "runtime/wrapping.h"

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

void element_numbers(const ops::ElementNumbers& op, Inputs in, Outputs out) {
  auto* to = reinterpret_cast<std::int64_t*>(out[0].raw());
  std::atomic<bool> outside = false;
  parallel_for(out[0].numel(), 1 << 14, [&](std::int64_t begin, std::int64_t end) {
    for (std::size_t k = 0; k < in.size(); ++k) {
      const std::int64_t* at = in[k].data<std::int64_t>();
      const std::int64_t size = op.sizes[static_cast<int>(k)];
      std::uint64_t most = 0;  // of which negative ones are; found by vectors
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t here = at[i] + (at[i] < 0 ? size : 0);
        most = std::max(most, static_cast<std::uint64_t>(here));
        to[i] = k == 0 ? here
                       : math::wrapping(std::plus<>{}, to[i] * size, here);  // one outside is refused below
      }
      if (most < static_cast<std::uint64_t>(size)) continue;
      outside = true;
      return;
    }
  });
  if (!outside) return;
  for (std::size_t k = 0; k < in.size(); ++k) {
    const std::int64_t* at = in[k].data<std::int64_t>();
    const std::int64_t size = op.sizes[static_cast<int>(k)];
    for (std::int64_t i = 0; i < out[0].numel(); ++i)
      check<ValueError>(at[i] >= -size && at[i] < size, "{}: index {} at position {} is outside [0, {})",
                        op.call, at[i], i, size);
  }
}

void fill_where(const ops::FillWhere&, Inputs in, Outputs out) {
  const Tensor chosen[] = {in[1], in[2], in[0]};  // every element stays in its place
  sherd::detail::run_elementwise(ops::Where{}, chosen, out);
}

}  // namespace

void add_index() {
  add_kernel<write_rows>(DeviceType::cpu);
  add_kernel<element_numbers>(DeviceType::cpu);
  add_kernel<fill_where>(DeviceType::cpu);
}

}  // namespace sherd::cpu
