#include "runtime/ops/embedding.h"

#include "runtime/apply.h"
#include "runtime/cpu/embedding.h"
#include "runtime/ops.h"

namespace sherd {
namespace ops {

Specs Embedding::infer(SpecSpan in) const {
  const Spec &table = in[0], &index = in[1];
  check<DTypeError>(index.dtype == DType::i64, "embedding: the index must be i64, got {}",
                    name_of(index.dtype));
  check<ShapeError>(table.shape.rank() >= 1, "embedding: the table must have rows, got shape {}",
                    table.shape);
  Spec out{index.shape, table.dtype, table.device};
  for (int i = 1; i < table.shape.rank(); ++i) out.shape.push_back(table.shape[i]);
  return {out};
}

void Embedding::run(Cpu, Inputs in, Outputs out) const {
  const Tensor table = contiguous(in[0]), index = contiguous(in[1]);
  if (index.numel() == 0) return;
  const std::int64_t rows = table.shape()[0], width = out[0].numel() / index.numel();
  const std::int64_t bad = cpu::gather_rows(table.raw(), size_of(table.dtype()), rows, width,
                                            index.data<std::int64_t>(), index.numel(), out[0].raw());
  check<ValueError>(bad < 0, "embedding: index {} at position {} is outside [0, {})",
                    index.data<std::int64_t>()[std::max<std::int64_t>(bad, 0)], bad, rows);
}

Tensors Embedding::grad(const GradArgs& args) const {
  return {apply(EmbeddingGrad{args.specs[0].shape[0]}, args.gy[0], args.inputs[1]), Tensor{}};
}

Specs EmbeddingGrad::infer(SpecSpan in) const {
  Spec out{{rows}, in[0].dtype, in[0].device};
  for (int i = in[1].shape.rank(); i < in[0].shape.rank(); ++i) out.shape.push_back(in[0].shape[i]);
  return {out};
}

void EmbeddingGrad::run(Cpu, Inputs in, Outputs out) const {
  const Tensor gy = contiguous(in[0]), index = contiguous(in[1]);
  const std::int64_t width = rows == 0 ? 0 : out[0].numel() / rows;
  dispatch_floating(name, gy.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    cpu::scatter_add_rows(gy.data<T>(), index.data<std::int64_t>(), index.numel(), rows, width, false,
                          reinterpret_cast<T*>(out[0].raw()));
  });
}

Tensors EmbeddingGrad::grad(const GradArgs& args) const {
  return {embedding(args.gy[0], args.inputs[1]), Tensor{}};
}

}  // namespace ops

Tensor embedding(const Tensor& table, const Tensor& index) { return apply(ops::Embedding{}, table, index); }

Tensor index_select(const Tensor& x, std::int64_t axis, const Tensor& index) {
  check<ShapeError>(index.rank() == 1, "index_select: the index must be 1-D, got shape {}", index.shape());
  const int at = normalize_axis("index_select", axis, x.rank());
  return at == 0 ? embedding(x, index) : transpose(embedding(transpose(x, 0, at), index), 0, at);
}

}  // namespace sherd
