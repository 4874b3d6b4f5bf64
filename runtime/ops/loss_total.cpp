#include "runtime/ops/loss_total.h"

#include "runtime/given.h"
#include "runtime/loss.h"
#include "runtime/ops.h"
#include "runtime/ops/elementwise_list.h"

namespace sherd {
namespace detail {

void check_loss(std::string_view call, const Tensor& input, const Tensor& target) {
  check_given(call, input, target);
  const DType dtype = input.dtype();
  check<DTypeError>(is_floating(dtype) && dtype == target.dtype(),
                    "{}: takes two of one floating dtype, got {} and {}", call, name_of(dtype),
                    name_of(target.dtype()));
  // (4, 1) beside (4) would broadcast to (4, 4), and the model learn the mean.
  check<ShapeError>(input.shape() == target.shape() || input.rank() == 0 || target.rank() == 0,
                    "{}: an input of shape {} and a target of shape {}, which must be equal; reshape one, or "
                    "expand() it where that is meant",
                    call, input.shape(), target.shape());
}

Tensor reduced_loss(const Tensor& loss, Reduction reduction, DType dtype) {
  return to(reduction == Reduction::none  ? loss
            : reduction == Reduction::sum ? sum(loss)
                                          : mean(loss),
            dtype);
}

Specs infer_total(std::string_view op, DTypeSet dtypes, SpecSpan in) {
  check<DTypeError>(is_floating(in[0].dtype) && in[0].dtype == in[1].dtype && dtypes.contains(in[0].dtype),
                    "{}: takes two of one floating dtype that its loss takes, got {} and {}; cast them", op,
                    name_of(in[0].dtype), name_of(in[1].dtype));
  check<ShapeError>(in[0].shape == in[1].shape, "{}: an input of shape {} and a target of shape {}", op,
                    in[0].shape, in[1].shape);
  return {{{}, in[0].dtype, in[0].device}};
}

Specs infer_total_grad(Mask needs, SpecSpan in) {
  Specs out;
  for (const std::size_t i : {0, 1})
    if (has(needs, i)) out.push_back(in[1 + i]);
  return out;
}

Tensor total_in_ops(Inputs in, bool mean, const std::function<Tensor(Inputs)>& loss) {
  return in_compute_dtype(in, [&](Inputs wide) { return mean ? sherd::mean(loss(wide)) : sum(loss(wide)); });
}

Tensors grads_of_total(const GradArgs& args, const std::function<Tensors(Mask, Inputs)>& grad) {
  Mask needs = 0;
  for (const std::size_t i : {0, 1})
    if (args.need(i)) needs |= bit(i);
  const Tensor in[] = {args.gy[0], args.inputs[0], args.inputs[1]};
  const Tensors found = grad(needs, in);
  Tensors grads(2);
  std::size_t next = 0;
  for (const std::size_t i : {0, 1})
    if (has(needs, i)) grads[i] = found[next++];
  return grads;
}

Tensors total_grads_in_ops(Inputs in, bool mean, Mask needs,
                           const std::function<Tensor(std::size_t, Inputs)>& grad) {
  const DType dtype = in[0].dtype(), wide = compute_dtype(dtype);
  const Tensor x = to(in[1], wide), t = to(in[2], wide), gy = to(in[0], wide);
  const Tensor each[] = {expand(mean ? div(gy, static_cast<double>(x.numel())) : gy, x.shape()), x, t};
  Tensors out;
  for (const std::size_t i : {0, 1})
    if (has(needs, i)) out.push_back(to(grad(i, each), dtype));
  return out;
}

}  // namespace detail

namespace ops {

template struct LossTotal<SquaredError>;
template struct LossTotal<AbsoluteError>;
template struct LossTotal<Huber>;
template struct LossTotal<Bce>;
template struct LossTotal<BceWithLogits>;
template struct LossTotalGrad<SquaredError>;
template struct LossTotalGrad<AbsoluteError>;
template struct LossTotalGrad<Huber>;
template struct LossTotalGrad<Bce>;
template struct LossTotalGrad<BceWithLogits>;

}  // namespace ops
}  // namespace sherd
