// Images whose channels are neighbours in memory, as kernels on tensor cores want them: which tensors are
// such, and which results become such.
#pragma once

#include "runtime/cuda/kernels.h"
#include "runtime/tensor.h"

namespace sherd::cuda {

/// Whether the elements of (N, C, ...) lie densely in the order N, ..., C, and not in row-major order too.
bool is_channels_last(const Tensor& t);
/// The same of images that lie so with gaps, as a part of the channels of others does.
bool runs_channels_last(const Tensor& t);
/// Gives a dense result that its kernel is about to fill that order, unless the two are one in memory.
void lay_channels_last(const Tensor& out);
/// `t`, or a copy of it, dense in that order.
Tensor channels_last(const Tensor& t);

/// Lays the result of an elementwise call out so, if one of its operands is, if only with gaps, and all
/// others are too, are spread over others, or are brought into that order as fast as they are read
/// (`lies_across`). What was laid out before, and what is written in place, stays.
void follow_operands(Inputs in, const Tensor& out);
/// The same of parts that are joined.
void join_channels_last(Inputs parts, const Tensor& out);
/// Whether `t` has the shape of `out` and lies in the other order of the two, and is of 16 bits and channels
/// by eights, which kernels of ours turn.
bool lies_across(const Tensor& t, const Tensor& out);
/// The operands of an elementwise call, however the result is laid out.
Operands operands_as_they_lie(Inputs in, Outputs out);

}  // namespace sherd::cuda
