#include "collectives/differentiable.h"

#include "collectives/ops.h"
#include "runtime/apply.h"
#include "runtime/ops.h"

namespace sherd {
namespace ops {
namespace {

void check_sliceable(std::string_view name, const Spec& spec, const Group& group) {
  check<ShapeError>(spec.shape.rank() > 0, "{}: a 0-d tensor has no dimension 0 to slice; reshape it to (1)",
                    name);
  check<ShapeError>(spec.shape[0] % group.size() == 0,
                    "{}: dimension 0 of shape {} does not divide into {} equal slices; pad it", name,
                    spec.shape, group.size());
}

Spec sliced(Spec spec, const Group& group) {
  spec.shape[0] /= group.size();
  return spec;
}

}  // namespace

Specs AllGather::infer(SpecSpan in) const {
  Spec spec = in[0];
  check<ShapeError>(spec.shape.rank() > 0,
                    "gather: a 0-d tensor has no dimension 0 to gather along; reshape it to (1)");
  spec.shape[0] *= group.size();
  return {spec};
}
void AllGather::run(Inputs in, Outputs out) const { group.all_gather(out[0], contiguous(in[0]), options()); }

Tensors GatherParams::grad(const GradArgs& args) const {
  return {scatter_sums(group, args.gy[0], options())};
}
Tensors GatherValues::grad(const GradArgs& args) const { return {take_slice(group, args.gy[0], options())}; }

Specs ScatterSums::infer(SpecSpan in) const {
  check_sliceable(name, in[0], group);
  return {sliced(in[0], group)};
}
void ScatterSums::run(Inputs in, Outputs out) const {
  group.reduce_scatter(out[0], contiguous(in[0]), ReduceOp::sum(), options());
}
Tensors ScatterSums::grad(const GradArgs& args) const {
  return {gather_params(group, args.gy[0], options())};
}

Specs TakeSlice::infer(SpecSpan in) const {
  check_sliceable(name, in[0], group);
  return {sliced(in[0], group)};
}
void TakeSlice::run(Inputs in, Outputs out) const {
  const std::int64_t rows = out[0].shape()[0];
  copy_(out[0], slice(in[0], 0, group.rank() * rows, (group.rank() + 1) * rows));
}
Tensors TakeSlice::grad(const GradArgs& args) const { return {gather_values(group, args.gy[0], options())}; }

Specs AllToAll::infer(SpecSpan in) const {
  check_sliceable(name, in[0], group);
  return {in[0]};
}
void AllToAll::run(Inputs in, Outputs out) const { group.all_to_all(out[0], contiguous(in[0]), options()); }
Tensors AllToAll::grad(const GradArgs& args) const { return {apply(*this, args.gy[0])}; }

void SumPartials::run(Inputs in, Outputs out) const {
  group.call({.kind = CollectiveKind::all_reduce,
              .inputs = {contiguous(in[0])},
              .outputs = {out[0]},
              .channel = channel,
              .label = label});
}
Tensors SumPartials::grad(const GradArgs& args) const {
  return {enter_parallel(group, args.gy[0], options())};
}

Tensors EnterParallel::grad(const GradArgs& args) const {
  return {sum_partials(group, args.gy[0], options())};
}

}  // namespace ops

namespace {

template <class Op>
Tensor among(const Group& group, const Tensor& x, CallOptions& options) {
  Op op;
  check<StateError>(group.defined(), "{}: this rank is not in the group; ask defined() first", Op::name);
  check<ValueError>(x.defined(), "{}: the tensor is an empty handle; every rank brings one", Op::name);
  op.group = group;
  op.label = std::move(options.label);
  op.channel = options.channel;
  return apply(op, x);
}

}  // namespace

Tensor gather_params(const Group& group, const Tensor& shard, CallOptions options) {
  return among<ops::GatherParams>(group, shard, options);
}
Tensor gather_values(const Group& group, const Tensor& shard, CallOptions options) {
  return among<ops::GatherValues>(group, shard, options);
}
Tensor sum_partials(const Group& group, const Tensor& partial, CallOptions options) {
  return among<ops::SumPartials>(group, partial, options);
}
Tensor enter_parallel(const Group& group, const Tensor& replica, CallOptions options) {
  return among<ops::EnterParallel>(group, replica, options);
}
Tensor scatter_sums(const Group& group, const Tensor& partial, CallOptions options) {
  return among<ops::ScatterSums>(group, partial, options);
}
Tensor take_slice(const Group& group, const Tensor& replica, CallOptions options) {
  return among<ops::TakeSlice>(group, replica, options);
}
Tensor all_to_all(const Group& group, const Tensor& slices, CallOptions options) {
  return among<ops::AllToAll>(group, slices, options);
}

}  // namespace sherd
