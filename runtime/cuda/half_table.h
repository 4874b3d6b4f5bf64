// Functions of one 16-bit float have 65536 values: where there are many more elements, all are computed once
// and looked up. Safe to include in device code.
#pragma once

#include "runtime/cuda/kernels.h"

namespace sherd::cuda {

using ElementwiseKernel = void (*)(const void* op, Inputs in, Outputs out);

/// Whether it has computed `op`, of one input of 16 bits and as many out, with a table that `kernel` makes;
/// its bits are those of `kernel`. False where that is no faster, or the operands are not dense.
bool map_by_table(const void* op, Inputs in, Outputs out, ElementwiseKernel kernel);

/// Whether a block of the current device has memory for a table.
bool table_fits();
/// bits[i] = i, of all numbers of 16 bits.
void launch_list_bits(void* bits, cudaStream_t stream);
/// y[i] = table[x[i]], all aligned to 16 bytes; `y` may be `x`.
void launch_map_by_table(const void* table, const void* x, void* y, std::int64_t n, cudaStream_t stream);

}  // namespace sherd::cuda
