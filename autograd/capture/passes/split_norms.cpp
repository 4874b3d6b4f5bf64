#include "autograd/capture/passes/split_norms.h"

#include <utility>

#include "autograd/capture/passes/rewrite.h"
#include "runtime/elementwise.h"
#include "runtime/fused_region.h"
#include "runtime/ops/batch_norm.h"
#include "runtime/ops/copy.h"
#include "runtime/ops/normalise.h"

namespace sherd {
namespace {

template <class O>
Ref<const AnyOp> op_of(O op) {
  return make_ref<const OpModel<O>>(std::move(op));
}

/// Whether elements of a channel lie one channel's number apart, and nothing is between.
bool channels_lie_side_by_side(const Layout& layout) {
  const int rank = layout.shape.rank();
  if (rank == 2) return layout.strides == contiguous_strides(layout.shape);
  std::int64_t step = layout.shape[1];
  if (rank < 3 || layout.strides[1] != 1) return false;
  for (int axis = rank - 1; axis != 1; axis = axis == 2 ? 0 : axis - 1) {
    if (layout.strides[axis] != step) return false;
    step *= layout.shape[axis];
    if (axis == 0) break;
  }
  return true;
}

class SplittingNorms {
 public:
  explicit SplittingNorms(Recorded program) : program_(std::move(program)) {}

  Recorded run() {
    std::vector<std::size_t> place;
    for (const TracedOp& traced : std::exchange(program_.trace.ops, {})) {
      place.push_back(ops_.size());
      if (can_split(traced))
        split(traced);
      else
        ops_.push_back(traced);
    }
    place.push_back(ops_.size());
    replace_ops(program_, std::move(ops_), place);
    return std::move(program_);
  }

 private:
  bool can_split(const TracedOp& traced) const {
    if (&traced.op->kernels() != &kernel_row<ops::BatchNorm>()) return false;
    const TracedTensor &x = traced.in[0], &y = traced.out[0];
    const Device device = program_.trace.storages[y.storage].device;
    return device.type == DeviceType::cuda &&
           static_cast<const ops::BatchNorm*>(traced.op->value())->training && y.layout.shape.numel() > 0 &&
           y.layout.offset == 0 && channels_lie_side_by_side(y.layout) &&
           x.layout.strides == y.layout.strides && ops::joins_regions(*normalise_, device.type) &&
           ops::joins_regions(*cast(y.dtype), device.type);
  }

  void split(const TracedOp& traced) {
    const TracedTensor &x = traced.in[0], &y = traced.out[0];
    const DType wide = traced.out[1].dtype;
    const double eps = static_cast<const ops::BatchNorm*>(traced.op->value())->eps;
    const auto of_channels = [&] { return made(traced.out[1].layout, wide, y); };
    const TracedTensor factor = of_channels(), shift = of_channels();
    add(traced, op_of(ops::BatchNormStatistics{eps}), {x, traced.in[1], traced.in[2]},
        {traced.out[1], traced.out[2], factor, shift});
    const auto each = [&](TracedTensor t) {  // of a channel, beside all elements
      const std::int64_t channels = t.layout.shape[0];
      t.layout.shape = {channels};
      t.layout.strides = {1};
      for (int axis = 2; axis < y.layout.shape.rank(); ++axis)
        t.layout.shape.push_back(1), t.layout.strides.push_back(1);
      return t;
    };
    const bool casts = x.dtype != wide;
    const TracedTensor in = casts ? made(y.layout, wide, y) : x, out = casts ? made(y.layout, wide, y) : y;
    if (casts) add(traced, cast(wide), {x}, {in});
    add(traced, normalise_, {in, each(traced.out[1]), each(factor), each(shift)}, {out});
    if (casts) add(traced, cast(y.dtype), {out}, {y});
  }

  static Ref<const AnyOp> cast(DType to) { return op_of(ops::Cast{to}); }
  /// A new tensor, on the device of `beside`.
  TracedTensor made(const Layout& layout, DType dtype, const TracedTensor& beside) {
    std::vector<TracedStorage>& storages = program_.trace.storages;
    TracedStorage storage;
    storage.device = storages[beside.storage].device;
    storage.bytes = static_cast<std::size_t>(layout.shape.numel() * size_of(dtype));
    storage.maker = 0;  // found anew
    storages.push_back(storage);
    return {static_cast<std::uint32_t>(storages.size() - 1), dtype, {layout.shape, layout.strides, 0}};
  }
  void add(const TracedOp& of, Ref<const AnyOp> op, std::vector<TracedTensor> in,
           std::vector<TracedTensor> out) {
    ops_.push_back(
        {std::move(op), std::move(in), std::move(out), of.once, of.precision, of.recorded, of.place});
  }

  Recorded program_;
  Ref<const AnyOp> normalise_ = op_of(ops::Normalise{});
  std::vector<TracedOp> ops_;
};

}  // namespace

Recorded split_norms(Recorded program) { return SplittingNorms(std::move(program)).run(); }

}  // namespace sherd
