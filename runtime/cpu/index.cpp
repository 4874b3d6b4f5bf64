// Numbers of elements, and elements written by a mask.
#include "runtime/ops/index.h"

#include <algorithm>
#include <atomic>
#include <functional>

#include "runtime/cpu/elementwise_loop.h"
#include "runtime/ops/where.h"
#include "runtime/parallel.h"
#include "runtime/wrapping.h"

namespace sherd::cpu {
namespace {

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
  add_kernel<element_numbers>(DeviceType::cpu);
  add_kernel<fill_where>(DeviceType::cpu);
}

}  // namespace sherd::cpu
