// Writing rows by their numbers.
#include "runtime/ops/index.h"

#include <cstring>

#include "runtime/ops.h"

namespace sherd::cpu {
namespace {

void write_rows(const ops::WriteRows& op, Inputs in, Outputs out) {
  const Tensor &index = in[1], &values = in[2];
  const Tensor rows = out[0].is_contiguous() ? out[0] : clone(out[0]);
  const std::int64_t* at = index.data<std::int64_t>();
  const std::int64_t count = rows.shape()[0];
  for (std::int64_t i = 0; i < index.numel(); ++i)
    check<ValueError>(at[i] >= 0 && at[i] < count, "{}: index {} at position {} is outside [0, {})", op.call,
                      at[i], i, count);
  if (values.numel() == 0) return;
  const std::int64_t bytes = values.spec().bytes() / index.numel();
  // One after another, so that the last of equal positions stays.
  for (std::int64_t i = 0; i < index.numel(); ++i)
    std::memcpy(rows.raw() + at[i] * bytes, values.raw() + i * bytes, static_cast<std::size_t>(bytes));
  if (!rows.is(out[0])) copy_(alias(out[0], out[0].layout()), rows);
}

}  // namespace

void add_index() { add_kernel<write_rows>(DeviceType::cpu); }

}  // namespace sherd::cpu
