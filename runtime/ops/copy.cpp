#include "runtime/ops/copy.h"

#include "runtime/apply.h"
#include "runtime/cpu/copy.h"
#include "runtime/elementwise.h"
#include "runtime/ops.h"

namespace sherd {
namespace ops {
namespace {

/// Host to host, `from` broadcast to `to`'s shape.
void copy_on_host(const Tensor& from, const Tensor& to) {
  Shape steps = to.shape();
  const int extra = to.rank() - from.rank();
  for (int i = 0; i < to.rank(); ++i) {
    const bool repeated = i < extra || (from.shape()[i - extra] == 1 && to.shape()[i] != 1);
    steps[i] = repeated ? 0 : from.strides()[i - extra];
  }
  cpu::copy(to.shape(), from.dtype(), from.raw(), steps, to.dtype(), to.raw(), to.strides());
}

/// Dense bytes between devices, through whichever of the two is not the host.
void copy_bytes(const Tensor& from, const Tensor& to) {
  const DeviceType mover = from.device().is_cpu() ? to.device().type : from.device().type;
  backend(mover).copy(to.raw(), to.device(), from.raw(), from.device(),
                      static_cast<std::size_t>(from.spec().bytes()));
  if (to.device().is_cpu() && mover != DeviceType::cpu) backend(mover).synchronize(from.device());
}

bool has_values(const Tensor& t) { return t.device().type != DeviceType::meta; }

}  // namespace

void Cast::run(Cpu, Inputs in, Outputs out) const { copy_on_host(in[0], out[0]); }
Tensors Cast::grad(const GradArgs& args) const { return {to(args.gy[0], args.specs[0].dtype)}; }

void Clone::run(Cpu, Inputs in, Outputs out) const { copy_on_host(in[0], out[0]); }
Tensors Clone::grad(const GradArgs& args) const { return {args.gy[0]}; }

void Transfer::run(Cpu, Inputs in, Outputs out) const {
  if (has_values(out[0])) copy_bytes(in[0], out[0]);
}
Tensors Transfer::grad(const GradArgs& args) const { return {to(args.gy[0], args.specs[0].device)}; }

Specs CopyInto::infer(SpecSpan in) const {
  check<ShapeError>(broadcast_shapes(name, in[0].shape, in[1].shape) == in[0].shape,
                    "copy_: values of shape {} do not fit into {}", in[1].shape, in[0].shape);
  return {};
}
void CopyInto::run(Cpu, Inputs in, Outputs) const {
  if (in[0].device().is_cpu() && in[1].device().is_cpu()) copy_on_host(in[1], in[0]);
}
Tensors CopyInto::grad(const GradArgs& args) const {
  Tensors grads(2);
  if (args.need(0)) grads[0] = zeros_like(args.gy[0]);
  const Spec& from = args.specs[1];
  if (args.need(1)) grads[1] = to(to(detail::sum_to(args.gy[0], from.shape), from.dtype), from.device);
  return grads;
}

}  // namespace ops

Tensor to(const Tensor& x, DType dtype) { return x.dtype() == dtype ? x : apply(ops::Cast{dtype}, x); }

Tensor to(const Tensor& x, Device device) {
  if (x.device() == device) return x;
  check<DeviceError>(x.device().type != DeviceType::meta, "to: a tensor on meta has no values to move to {}",
                     to_string(device));
  return apply(ops::Transfer{device}, contiguous(x));
}

Tensor clone(const Tensor& x) { return apply(ops::Clone{}, x); }
Tensor contiguous(const Tensor& x) { return x.is_contiguous() ? x : clone(x); }

const Tensor& copy_(const Tensor& into, const Tensor& from) {
  if (from.device() == into.device() || into.device().type == DeviceType::meta)
    return apply(ops::CopyInto{}, into, from), into;
  return apply(ops::CopyInto{}, into, to(from, into.device())), into;
}

}  // namespace sherd
