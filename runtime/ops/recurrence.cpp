#include "runtime/ops/recurrence.h"

#include "runtime/apply.h"
#include "runtime/given.h"
#include "runtime/ops.h"
#include "runtime/ops/slice.h"

namespace sherd {
namespace ops {
namespace {

/// `x` a place further along the last axis, or back; what comes in is `at_edge`.
Tensor shifted(const Tensor& x, bool back, int at_edge = 0) {
  const std::int64_t n = x.shape().back();
  const Tensor rest = narrow(x, -1, back && n > 0 ? 1 : 0, n > 0 ? n - 1 : 0);
  Shape edge = x.shape();
  edge[edge.rank() - 1] = n > 0 ? 1 : 0;
  const Tensor comes_in = full(edge, at_edge, {x.dtype(), x.device()});
  return back ? cat({rest, comes_in}, -1) : cat({comes_in, rest}, -1);
}

Tensor run_recurrence(const Tensor& b, const Tensor& a, bool reverse) {
  const Tensor in[] = {b, a};
  return apply_many(Recurrence{reverse}, in)[0];
}

}  // namespace

Specs Recurrence::infer(SpecSpan in) const {
  const Spec &b = in[0], &a = in[1];
  check<DTypeError>(b.dtype != DType::boolean, "recurrence: takes numbers, got {}", name_of(b.dtype));
  check<ShapeError>(b.shape.rank() > 0, "recurrence: a 0-d tensor has no axis");
  check<DTypeError>(a.is_none() || a.dtype == b.dtype, "recurrence: {} factors for {}; cast them",
                    name_of(a.dtype), name_of(b.dtype));
  check<ShapeError>(a.is_none() || a.shape == b.shape, "recurrence: factors of shape {} for shape {}",
                    a.shape, b.shape);
  return {b};
}

Reads Recurrence::reads(Mask needs) const { return {0b10, needs & 0b10 ? Mask{1} : Mask{0}}; }

Tensors Recurrence::grad(const GradArgs& args) const {
  // What each h is worth: itself, and through the next one.
  const Tensor& a = args.inputs[1];
  const Tensor worth = run_recurrence(args.gy[0], a.defined() ? shifted(a, !reverse) : Tensor(), !reverse);
  Tensors grads(2);
  if (args.need(0)) grads[0] = worth;
  if (args.need(1)) grads[1] = mul(worth, shifted(args.outputs[0], reverse));
  return grads;
}

Tensors Recurrence::reference(Inputs in) const {
  // By doubling: each place takes in what ends just before it, over 1, 2, 4, ... places.
  const DType dtype = in[0].dtype(), wide = is_floating(dtype) ? compute_dtype(dtype) : dtype;
  Tensor h = to(in[0], wide), a = in[1].defined() ? to(in[1], wide) : Tensor();
  const std::int64_t n = h.shape().back();
  for (std::int64_t by = 1; by < n; by *= 2) {
    // The places that have others before them, those others, and the rest.
    const std::int64_t late = reverse ? 0 : by, early = reverse ? by : 0, rest = reverse ? n - by : 0;
    const auto join = [&](const Tensor& x, const Tensor& part) {
      const Tensor as_they_are = narrow(x, -1, rest, by);
      return reverse ? cat({part, as_they_are}, -1) : cat({as_they_are, part}, -1);
    };
    const auto at = [&](const Tensor& x, std::int64_t start) { return narrow(x, -1, start, n - by); };
    h = join(h, add(at(h, late), a.defined() ? mul(at(a, late), at(h, early)) : at(h, early)));
    if (a.defined()) a = join(a, mul(at(a, late), at(a, early)));
  }
  return {h.is(in[0]) ? clone(h) : to(h, dtype)};
}

Specs RunningProduct::infer(SpecSpan in) const {
  check<DTypeError>(in[0].dtype != DType::boolean, "running_product: takes numbers, got {}",
                    name_of(in[0].dtype));
  check<ShapeError>(in[0].shape.rank() > 0, "running_product: a 0-d tensor has no axis");
  return {in[0]};
}

Tensors RunningProduct::grad(const GradArgs& args) const {
  // What each product is worth, times the one before it.
  const Tensor worth = run_recurrence(args.gy[0], shifted(args.inputs[0], true), true);
  return {mul(worth, shifted(args.outputs[0], false, 1))};
}

Tensors RunningProduct::reference(Inputs in) const {
  const Tensor& x = in[0];
  if (x.numel() == 0) return {clone(x)};
  // The first is what the others multiply.
  const Tensor first = apply(Unslice{{x.rank() - 1, 0, 1, 1}, x.shape().back()}, narrow(x, -1, 0, 1));
  return {run_recurrence(first, x, false)};
}

}  // namespace ops

namespace {

/// Calls `f` of x with `axis` last and of a dtype that sums; 0-d tensors are their own.
template <class F>
Tensor along(std::string_view call, const Tensor& x, std::int64_t axis, const F& f) {
  const int at = normalize_axis(call, axis, x.rank());
  const Tensor wide = is_floating(x.dtype()) ? x : to(x, DType::i64);
  if (x.rank() == 0) return clone(wide);
  return at == x.rank() - 1 ? f(wide) : transpose(f(transpose(wide, at, -1)), at, -1);
}

}  // namespace

Tensor cumsum(const Tensor& x, std::int64_t axis) {
  detail::check_given("cumsum", x);
  return along("cumsum", x, axis, [](const Tensor& y) { return ops::run_recurrence(y, {}, false); });
}

Tensor cumprod(const Tensor& x, std::int64_t axis) {
  detail::check_given("cumprod", x);
  return along("cumprod", x, axis, [](const Tensor& y) {
    // The CPU's kernel is the recurrence's, which writes straight into what is returned.
    return y.device().is_cpu() || y.numel() == 0 ? ops::RunningProduct{}.reference(Inputs(&y, 1))[0]
                                                 : apply(ops::RunningProduct{}, y);
  });
}

}  // namespace sherd
