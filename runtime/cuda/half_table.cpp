#include "runtime/cuda/half_table.h"

#include "runtime/cuda/rank.h"
#include "runtime/ops.h"

namespace sherd::cuda {

bool map_by_table(const void* op, Inputs in, Outputs out, ElementwiseKernel kernel) {
  constexpr std::int64_t worth = 1 << 22;  // elements; below, two launches more take as long
  const Tensor& x = in[0];
  if (size_of(x.dtype()) != 2 || !is_floating(x.dtype()) || x.numel() < worth || out[0].dtype() != x.dtype())
    return false;
  const Operands p = operands_of(in, out);
  if (!p.dense || !table_fits()) return false;
  const Tensor bits = empty(Shape{1 << 16}, {x.dtype(), x.device()});
  Tensor table = empty(bits.spec());
  launch_list_bits(bits.raw(), p.stream);
  kernel(op, Inputs(&bits, 1), Outputs(&table, 1));
  launch_map_by_table(table.raw(), p.data[1], p.data[0], p.numel, p.stream);
  return true;
}

}  // namespace sherd::cuda
