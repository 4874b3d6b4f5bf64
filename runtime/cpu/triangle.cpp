// What lies on one side of a diagonal: of each row a part is copied, the rest is zeros.
#include "runtime/ops/triangle.h"

#include <algorithm>
#include <cstring>

#include "runtime/parallel.h"

namespace sherd::cpu {
namespace {

void triangle(const ops::Triangle& op, Inputs in, Outputs out) {
  const Tensor& x = in[0];
  if (x.numel() == 0) return;
  const std::int64_t rows = x.shape()[x.rank() - 2], columns = x.shape().back(), size = size_of(x.dtype());
  const std::int64_t grain = std::max<std::int64_t>(1, (1 << 15) / columns), line = columns * size;
  parallel_for(x.numel() / columns, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const std::byte* from = x.raw() + r * line;
      std::byte* to = out[0].raw() + r * line;
      const std::int64_t first = std::clamp<std::int64_t>(r % rows + op.offset + op.lower, 0, columns) * size;
      const auto below = static_cast<std::size_t>(first), above = static_cast<std::size_t>(line - first);
      if (op.lower) {
        std::memcpy(to, from, below);
        std::memset(to + first, 0, above);
      } else {
        std::memset(to, 0, below);
        std::memcpy(to + first, from + first, above);
      }
    }
  });
}

}  // namespace

void add_triangle() { add_kernel<triangle>(DeviceType::cpu); }

}  // namespace sherd::cpu
