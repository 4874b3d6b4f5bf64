// Folds over axes: sums and means, products, variances.
#include <limits>
#include <optional>

#include "runtime/cuda/image_order.h"
#include "runtime/cuda/launchers.h"
#include "runtime/cuda/rank.h"
#include "runtime/cuda/three_axes.h"
#include "runtime/ops.h"
#include "runtime/ops/prod.h"
#include "runtime/ops/sum.h"

namespace sherd::cuda {
namespace {

/// `x` with channels last as it lies, and `axes` with it, where the axes that stay keep their order.
Tensor as_it_lies(const Tensor& x, Mask& axes) {
  const auto stays = [&](int axis) { return ((axes >> axis) & 1) == 0; };
  bool inner = false;
  for (int i = 2; i < x.rank(); ++i) inner = inner || stays(i);
  if (!runs_channels_last(x) || (stays(1) && inner)) return x;
  Shape order{0};
  for (int i = 2; i < x.rank(); ++i) order.push_back(i);
  order.push_back(1);
  Mask moved = 0;
  for (int i = 0; i < order.rank(); ++i)
    if (!stays(static_cast<int>(order[i]))) moved |= Mask{1} << i;
  axes = moved;
  return permute(x, order);
}

/// A fold of `given` over `axes`, which keeps what is read, and room for pieces with accumulators of `bytes`;
/// of 0, as gradients want it, none.
struct Fold {
  Tensor x, partial;

  Fold(FoldCall& call, const Tensor& given, Mask axes, std::int64_t bytes) {
    const Tensor lying = bytes > 0 ? as_it_lies(given, axes) : given;
    const std::optional<ThreeAxes> rows = bytes > 0 ? as_rows_with_gaps(lying, axes) : std::nullopt;
    const ThreeAxes three = rows ? *rows : as_three_axes(lying, axes);
    x = three.x;
    call.dtype = x.dtype();
    call.outer = three.outer;
    call.reduce = three.reduce;
    call.inner = three.inner;
    call.pitch = three.pitch;
    call.x = x.raw();
    call.stream = stream_of(x.device());
    const std::int64_t pieces = call.reduce > 0 && bytes > 0 ? call.pieces() : 1;
    if (pieces == 1) return;
    partial = empty(Shape{pieces * call.outer * call.inner * bytes / 8}, {DType::i64, x.device()});
    call.partial = partial.raw();
  }
};

void fill_with_nan(const Tensor& y) { fill_(alias(y, y.layout()), std::numeric_limits<double>::quiet_NaN()); }

void sum(const ops::Sum& op, Inputs in, Outputs out) {
  const Tensor& y = out[0];
  if (y.numel() == 0) return;
  SumCall call;
  const Fold fold(call, in[0], op.axes, 8);
  if (op.mean && call.reduce == 0) return fill_with_nan(y);  // the mean of nothing
  call.divisor = op.mean ? static_cast<double>(call.reduce) : 1.0;
  call.out = y.raw();
  launch_sum(call);
  check_launch(op.name);
}

double* doubles(const Tensor& t) { return reinterpret_cast<double*>(t.raw()); }

/// Sums of powers in f64, or if `root` their roots; and in the dtype of x unless `narrow` is an empty handle.
template <class O>
void sum_powers(const O& op, const Tensor& x, bool root, const Tensor& wide, const Tensor& narrow) {
  if (wide.numel() == 0) return;
  PowerSumCall call;
  const Fold fold(call, x, op.axes, 8);
  call.power = op.power;
  call.root = root;
  call.wide = doubles(wide);
  call.out = raw_or_null(narrow);
  launch_power_sum(call);
  check_launch(op.name);
}

void power_sum(const ops::PowerSum& op, Inputs in, Outputs out) { sum_powers(op, in[0], false, out[0], {}); }
void norm(const ops::Norm& op, Inputs in, Outputs out) {
  sum_powers(op, in[0], op.power == 2, out[1], out[0]);
}

/// The last two of `out` are f64, the variance, or if `root` its root, and the mean; before them stands, of
/// three, the first in the dtype of x.
template <class O>
void deviate(const O& op, const ops::Variance& of, bool root, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  if (in[0].dtype() == DType::f64)  // needs the mean first: there is nothing wider to add squares up in
    return sherd::detail::adopt_reference(op.name, op.reference(in), out);
  VarianceCall call;
  const Fold fold(call, in[0], of.axes, 16);
  if (call.reduce == 0) {
    for (const Tensor& y : out) fill_with_nan(y);
    return;
  }
  call.left = of.left(call.reduce);
  call.root = root;
  call.variance = doubles(out[out.size() - 2]);
  call.mean = doubles(out.back());
  call.out = out.size() == 3 ? out[0].raw() : nullptr;
  launch_variance(call);
  check_launch(op.name);
}
void variance(const ops::Variance& op, Inputs in, Outputs out) { deviate(op, op, false, in, out); }
void spread(const ops::Spread& op, Inputs in, Outputs out) { deviate(op, op.of, op.root, in, out); }

void variance_grad(const ops::VarianceGrad& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  VarianceCall call;
  const Fold fold(call, in[1], op.of.axes, 0);
  if (in[1].dtype() == DType::f64 || call.x != in[1].raw())  // axes that are apart
    return sherd::detail::adopt_reference(op.name, op.reference(in), out);
  call.left = op.of.left(call.reduce);
  call.mean = doubles(in[2]);
  launch_variance_grad(call, doubles(in[0]), out[0].raw());
  check_launch(op.name);
}

void prod(const ops::Prod& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  ProductCall call;
  const Fold fold(call, in[0], op.axes, 8);
  if (call.reduce == 0) return void(fill_(alias(out[0], out[0].layout()), 1));  // the product of nothing
  call.out = out[0].raw();
  launch_product(call);
  check_launch(op.name);
}

void prod_grad(const ops::ProdGrad& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  ProductCall call;
  const Fold fold(call, in[1], 0b10, 0);
  const Tensor room = empty(Shape{product_grad_room(call)}, {DType::f64, in[1].device()});
  call.partial = room.raw();
  launch_product_grad(call, in[0].raw(), out[0].raw());
  check_launch(op.name);
}

}  // namespace

void add_folds() {
  add_kernel<sum>(DeviceType::cuda);
  add_kernel<power_sum>(DeviceType::cuda);
  add_kernel<norm>(DeviceType::cuda);
  add_kernel<prod>(DeviceType::cuda);
  add_kernel<prod_grad>(DeviceType::cuda);
  add_kernel<variance>(DeviceType::cuda);
  add_kernel<spread>(DeviceType::cuda);
  add_kernel<variance_grad>(DeviceType::cuda);
}

}  // namespace sherd::cuda
