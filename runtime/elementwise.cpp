#include "runtime/elementwise.h"

#include "runtime/ops.h"

namespace sherd::detail {

Spec infer_elementwise(std::string_view op, DTypeSet dtypes, Inputs in, bool first_condition) {
  const Tensor& last = in.back();
  const DType dtype = last.dtype();
  check<DTypeError>(dtypes.contains(dtype), "{}: does not take {}; cast the input first", op, name_of(dtype));
  if (first_condition)
    check<DTypeError>(in[0].dtype() == DType::boolean, "{}: the condition must be bool, got {}", op,
                      name_of(in[0].dtype()));
  bool same_shape = true;
  for (std::size_t i = first_condition ? 1 : 0; i + 1 < in.size(); ++i)
    check<DTypeError>(in[i].dtype() == dtype, "{}: inputs are {} and {}; cast one of them", op,
                      name_of(in[i].dtype()), name_of(dtype));
  for (const Tensor& t : in) same_shape = same_shape && t.shape() == last.shape();
  Spec spec{last.shape(), dtype, last.device()};
  if (!same_shape)
    for (std::size_t i = in.size() - 1; i-- > 0;)
      spec.shape = broadcast_shapes(op, in[i].shape(), spec.shape);
  return spec;
}

void check_in_place(std::string_view op, const Spec& result, Inputs in) {
  check<ShapeError>(result.shape == in[0].shape(), "{}: the result has shape {} and does not fit into {}", op,
                    result.shape, in[0].shape());
}

Tensor sum_to(const Tensor& g, const Shape& shape) {
  if (g.shape() == shape) return g;
  Shape axes;
  const int extra = g.rank() - shape.rank();
  for (int i = 0; i < g.rank(); ++i)
    if (i < extra || (shape[i - extra] == 1 && g.shape()[i] != 1)) axes.push_back(i);
  return reshape(sum(g, axes, Keep::dims), shape);
}

Tensor to_compute_dtype(const Tensor& t) { return t.defined() ? to(t, compute_dtype(t.dtype())) : t; }

Tensor in_compute_dtype(Inputs in, const std::function<Tensor(Inputs)>& f) {
  const DType dtype = in[0].dtype(), wide = compute_dtype(dtype);
  if (wide == dtype) return f(in);
  Tensors cast;
  for (const Tensor& t : in) cast.push_back(t.dtype() == dtype ? to(t, wide) : t);
  return to(f(Inputs(cast.begin(), cast.size())), dtype);
}

}  // namespace sherd::detail
