#include "runtime/ops/loss_total.h"

#include "runtime/apply.h"
#include "runtime/elementwise.h"
#include "runtime/ops.h"

namespace sherd::ops {

Specs LossTotal::infer(SpecSpan in) const {
  check<DTypeError>(is_floating(in[0].dtype) && in[0].dtype == in[1].dtype,
                    "loss_total: takes two of one floating dtype, got {} and {}", name_of(in[0].dtype),
                    name_of(in[1].dtype));
  check<ShapeError>(in[0].shape == in[1].shape, "loss_total: an input of shape {} and a target of shape {}",
                    in[0].shape, in[1].shape);
  return {{{}, in[0].dtype, in[0].device}};
}

Tensors LossTotal::reference(Inputs in) const {
  return {sherd::detail::in_compute_dtype(in, [&](Inputs wide) {
    const Tensor loss = kind.visit([&](const auto& op) { return apply(op, wide[0], wide[1]); });
    return mean ? sherd::mean(loss) : sum(loss);
  })};
}

Tensors LossTotal::grad(const GradArgs& args) const {
  if (args.create_graph)
    return sherd::detail::reference_gradient(args, [this](Inputs in) { return reference(in); });
  Mask needs = 0;
  for (const std::size_t i : {0, 1})
    if (args.need(i)) needs |= bit(i);
  const Tensor in[] = {args.gy[0], args.inputs[0], args.inputs[1]};
  const Tensors found = apply_many(LossTotalGrad{*this, needs}, in);
  Tensors grads(2);
  std::size_t next = 0;
  for (const std::size_t i : {0, 1})
    if (has(needs, i)) grads[i] = found[next++];
  return grads;
}

Specs LossTotalGrad::infer(SpecSpan in) const {
  Specs out;
  for (const std::size_t i : {0, 1})
    if (has(needs, i)) out.push_back(in[1 + i]);
  return out;
}

Tensors LossTotalGrad::reference(Inputs in) const {
  const DType dtype = in[0].dtype(), wide = compute_dtype(dtype);
  const Tensor x = to(in[1], wide), t = to(in[2], wide);
  const auto n = static_cast<double>(x.numel());
  const Tensor gy = expand(forward.mean ? div(to(in[0], wide), n) : to(in[0], wide), x.shape());
  const Tensor values[] = {gy, x, t};
  const auto gradient = [&]<int i>() {
    return forward.kind.visit([&]<class O>(const O& op) {
      // What the rule reads; targets' rules may read less.
      constexpr Mask reads = sherd::detail::reads_of<O, i>().inputs;
      Tensors read{gy};
      for (const std::size_t k : {0, 1})
        if (has(reads, k)) read.push_back(values[1 + k]);
      return to(apply_many(ElementwiseGrad<O, i>{op}, Inputs(read.begin(), read.size()))[0], dtype);
    });
  };
  Tensors out;
  if (has(needs, 0)) out.push_back(gradient.template operator()<0>());
  if (has(needs, 1)) out.push_back(gradient.template operator()<1>());
  return out;
}

}  // namespace sherd::ops
