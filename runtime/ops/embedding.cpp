#include "runtime/ops/embedding.h"

#include "runtime/apply.h"
#include "runtime/ops.h"

namespace sherd {
namespace ops {

Specs Embedding::infer(SpecSpan in) const {
  const Spec &table = in[0], &index = in[1];
  check<DTypeError>(index.dtype == DType::i64, "{}: the index must be integers, got {}", call,
                    name_of(index.dtype));
  check<ShapeError>(table.shape.rank() >= 1, "{}: the table must have rows, got shape {}", call, table.shape);
  Spec out{index.shape, table.dtype, table.device};
  for (int i = 1; i < table.shape.rank(); ++i) out.shape.push_back(table.shape[i]);
  return {out};
}

Tensors Embedding::grad(const GradArgs& args) const {
  return {apply(EmbeddingGrad{args.specs[0].shape[0]}, args.gy[0], args.inputs[1]), Tensor{}};
}

Specs EmbeddingGrad::infer(SpecSpan in) const {
  check<DTypeError>(is_floating(in[0].dtype) && in[1].dtype == DType::i64,
                    "embedding_grad: a floating gradient and an i64 index, got {} and {}",
                    name_of(in[0].dtype), name_of(in[1].dtype));
  check<ShapeError>(in[0].shape.rank() >= in[1].shape.rank(),
                    "embedding_grad: a gradient of shape {} for an index of shape {}", in[0].shape,
                    in[1].shape);
  Spec out{{rows}, in[0].dtype, in[0].device};
  for (int i = in[1].shape.rank(); i < in[0].shape.rank(); ++i) out.shape.push_back(in[0].shape[i]);
  return {out};
}

Tensors EmbeddingGrad::grad(const GradArgs& args) const {
  return {apply(Embedding{}, args.gy[0], args.inputs[1]), Tensor{}};
}

}  // namespace ops

namespace {
/// Integers of any size as positions; the op refuses what is none.
Tensor as_positions(const Tensor& index) {
  return is_integral(index.dtype()) ? to(index, DType::i64) : index;
}
}  // namespace

Tensor embedding(const Tensor& table, const Tensor& index) {
  return apply(ops::Embedding{}, table, as_positions(index));
}

Tensor index_select(const Tensor& x, std::int64_t axis, const Tensor& index) {
  check<ShapeError>(index.rank() == 1, "index_select: the index must be 1-D, got shape {}", index.shape());
  const int at = normalize_axis("index_select", axis, x.rank());
  const ops::Embedding rows{"index_select"};
  const Tensor places = as_positions(index);
  return at == 0 ? apply(rows, x, places) : transpose(apply(rows, transpose(x, 0, at), places), 0, at);
}

}  // namespace sherd
