#include "runtime/ops/copy.h"

#include "runtime/apply.h"
#include "runtime/context.h"
#include "runtime/elementwise.h"
#include "runtime/given.h"
#include "runtime/ops.h"

namespace sherd {
namespace ops {
namespace {

/// Dense bytes between devices, through whichever of the two is not the host.
void copy_bytes(const Tensor& from, const Tensor& to) {
  const DeviceType source = from.device().type, target = to.device().type;
  if (source != target && source != DeviceType::cpu && target != DeviceType::cpu) {
    // A back end knows its own memory and the host's.
    const Tensor between = empty(from.shape(), {from.dtype(), Device::cpu()});
    copy_bytes(from, between);
    return copy_bytes(between, to);
  }
  const DeviceType mover = from.device().is_cpu() ? to.device().type : from.device().type;
  backend(mover).copy(to.raw(), to.device(), from.raw(), from.device(),
                      static_cast<std::size_t>(from.spec().bytes()));
  if (to.device().is_cpu() && mover != DeviceType::cpu) backend(mover).synchronize(from.device());
}

bool has_values(const Tensor& t) { return t.device().type != DeviceType::meta; }

}  // namespace

Tensors Cast::grad(const GradArgs& args) const { return {to(args.gy[0], args.specs[0].dtype)}; }

Tensors Clone::grad(const GradArgs& args) const { return {args.gy[0]}; }

void Transfer::run(Inputs in, Outputs out) const {
  if (has_values(out[0])) copy_bytes(in[0], out[0]);
}
Tensors Transfer::grad(const GradArgs& args) const { return {to(args.gy[0], args.specs[0].device)}; }

Specs CopyInto::infer(SpecSpan in) const {
  check<ShapeError>(broadcast_shapes(name, in[0].shape, in[1].shape) == in[0].shape,
                    "copy_: values of shape {} do not fit into {}", in[1].shape, in[0].shape);
  return {};
}
Tensors CopyInto::grad(const GradArgs& args) const {
  Tensors grads(2);
  if (args.need(0)) grads[0] = zeros_like(args.gy[0]);
  const Spec& from = args.specs[1];
  if (args.need(1)) grads[1] = to(detail::sum_to(args.gy[0], from.shape), from.dtype);
  return grads;
}

Specs CopyEach::infer(SpecSpan in) const {
  check<ValueError>(in.size() % 2 == 0, "copy_each_: takes pairs of tensors, got {} tensors", in.size());
  for (std::size_t i = 0; i < in.size(); i += 2)
    check<ShapeError>(in[i].shape == in[i + 1].shape, "copy_each_: pair {} is of shapes {} and {}", i / 2,
                      in[i].shape, in[i + 1].shape);
  return {};
}
void CopyEach::run(Inputs in, Outputs out) const {
  for (std::size_t i = 0; i < in.size(); i += 2)
    run_again(OpModel<CopyInto>(CopyInto{}), in.subspan(i, 2), out.subspan(i / 2, 1));
}

}  // namespace ops

Tensor to(const Tensor& x, DType dtype) {
  detail::check_given("to", x);
  return x.dtype() == dtype ? x : apply(ops::Cast{dtype}, x);
}

Tensor to(const Tensor& x, Device device) {
  detail::check_given("to", x);
  if (x.device() == device) return x;
  check<DeviceError>(x.device().type != DeviceType::meta, "to: a tensor on meta has no values to move to {}",
                     device);
  return apply(ops::Transfer{device}, contiguous(x));
}

Tensor clone(const Tensor& x) {
  detail::check_given("clone", x);
  return apply(ops::Clone{}, x);
}
Tensor contiguous(const Tensor& x) {
  detail::check_given("contiguous", x);
  return x.is_contiguous() ? x : clone(x);
}

Tensor copy_(const Tensor& into, const Tensor& from) {
  detail::check_given("copy_", into, from);
  return apply(ops::CopyInto{}, into, to(from, into.device()));
}

void copy_each_(std::span<const Tensor> into, std::span<const Tensor> from) {
  check<ValueError>(into.size() == from.size(), "copy_each_: {} tensors to write and {} to read", into.size(),
                    from.size());
  if (into.empty()) return;
  Tensors pairs;
  pairs.reserve(2 * into.size());
  for (std::size_t i = 0; i < into.size(); ++i) {
    pairs.push_back(into[i]);
    pairs.push_back(to(from[i], into[i].device()));
  }
  const NoGrad guard;
  apply_many(ops::CopyEach{}, pairs);
}

}  // namespace sherd
