#include "runtime/cpu/operands.h"

#include <cstdlib>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "runtime/fused_region.h"
#include "runtime/tensor.h"

namespace sherd::detail {
namespace {

/// Dimensions d and d+1 are one when every operand steps over them as over one.
bool mergeable(const Operands& o, int d) {
  for (int k = 0; k < o.count; ++k)
    if (o.strides[k][d] != o.strides[k][d + 1] * o.sizes[d + 1]) return false;
  return true;
}

void erase_dimension(Operands& o, int d) {
  for (int i = d; i + 1 < o.rank; ++i) {
    o.sizes[i] = o.sizes[i + 1];
    for (int k = 0; k < o.count; ++k) o.strides[k][i] = o.strides[k][i + 1];
  }
  --o.rank;
}

void drop_ones(Operands& o) {
  for (int d = o.rank - 1; d >= 0; --d)
    if (o.sizes[d] == 1) erase_dimension(o, d);
}

/// Puts the dimensions, none of size 1, into the order of the output's memory, so that it is written from one
/// end to the other however its axes are permuted.
void follow_output(Operands& o) {
  const auto step = [&](int d) { return std::abs(o.strides[0][d]); };
  for (int end = 1; end < o.rank; ++end)
    for (int d = end; d > 0 && step(d - 1) < step(d); --d) {
      std::swap(o.sizes[d - 1], o.sizes[d]);
      for (int k = 0; k < o.count; ++k) std::swap(o.strides[k][d - 1], o.strides[k][d]);
    }
}

}  // namespace

void Operands::collapse() {
  drop_ones(*this);
  for (int d = rank - 2; d >= 0; --d) {
    if (!mergeable(*this, d)) continue;
    sizes[d + 1] *= sizes[d];
    erase_dimension(*this, d);
  }
}

Operands operands_of(Inputs in, const Tensor& out) {
  Operands o;
  o.count = 1 + static_cast<int>(in.size());
  o.data[0] = out.raw();
  o.dtypes[0] = out.dtype();
  const Shape& shape = out.shape();
  bool dense = out.is_contiguous();
  for (std::size_t k = 0; k < in.size(); ++k) {
    o.data[k + 1] = in[k].raw();
    o.dtypes[k + 1] = in[k].dtype();
    dense = dense && in[k].shape() == shape && in[k].is_contiguous();
  }
  if (dense) {  // the common case, without looking at dimensions
    o.rank = 1;
    o.sizes[0] = shape.numel();
    for (int k = 0; k < o.count; ++k) o.strides[k][0] = 1;
    return o;
  }
  o.rank = shape.rank();
  for (int d = 0; d < o.rank; ++d) {
    o.sizes[d] = shape[d];
    o.strides[0][d] = out.strides()[d];
    for (std::size_t k = 0; k < in.size(); ++k) {
      const int at = d - (o.rank - in[k].rank());
      o.strides[k + 1][d] = at < 0 || in[k].shape()[at] == 1 ? 0 : in[k].strides()[at];
    }
  }
  drop_ones(o);
  follow_output(o);
  o.collapse();
  return o;
}

namespace {
/// A loop, and the kernel that runs it: whoever has put another one in its place means that one.
struct LoopOfKernel {
  LoopOf loop;
  Kernel kernel;
};
struct Loops {
  std::mutex mutex;
  std::unordered_map<const KernelRow*, LoopOfKernel> of{};
};
/// Never destroyed, as rows of kernels are not.
Loops& loops() {
  static auto& all = *std::make_unique<Loops>().release();
  return all;
}
}  // namespace

LoopOf loop_of(const KernelRow& row) {
  const std::scoped_lock lock(loops().mutex);
  const auto known = loops().of.find(&row);
  const bool stands = known != loops().of.end() && row.on(DeviceType::cpu) == known->second.kernel;
  return stands ? known->second.loop : nullptr;
}
void add_loop(const KernelRow& row, LoopOf loop, bool light) {
  ops::set_effort(row, light ? ops::Effort::light : ops::Effort::heavy);
  const std::scoped_lock lock(loops().mutex);
  loops().of[&row] = {loop, row.on(DeviceType::cpu)};
}

void RunsRows::take(const Loop& loop, const void* functor, std::size_t) const {
  run_rows(operands_, loop, functor);
}

}  // namespace sherd::detail
