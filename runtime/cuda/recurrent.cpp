// Recurrent layers step by step: a product for all gates, and one pass over them.
#include "runtime/cuda/recurrent.h"

#include "runtime/cuda/product.h"
#include "runtime/cuda/rank.h"
#include "runtime/ops.h"
#include "runtime/ops/recurrent.h"

namespace sherd::cuda {
namespace {

using ops::CellState;

/// The steps of a layer, and where those of a tensor that holds one after another lie.
struct Steps {
  ops::Recurrent op;
  std::int64_t count, rows, features, gates, size;
  cudaStream_t stream;

  Steps(const ops::Recurrent& op, const Tensor& hidden)
      : op(op),
        count(hidden.size(0)),
        rows(hidden.size(1)),
        features(hidden.size(2)),
        gates(op.gates()),
        size(size_of(hidden.dtype())),
        stream(stream_of(hidden.device())) {}

  CellCall call(DType dtype) const { return {op.cell, dtype, rows, features, stream}; }
  /// Where the step that is taken as the n-th has its `each` numbers of a feature; null in a tensor that is
  /// not there or has no elements.
  std::byte* at(const Tensor& t, std::int64_t n, std::int64_t each) const {
    if (!t.defined() || t.numel() == 0) return nullptr;
    return t.raw() + (op.reverse ? count - 1 - n : n) * rows * features * each * size;
  }
  CellState<std::byte*> state(const Tensor& hidden, const Tensor& cell, std::int64_t n) const {
    return {at(hidden, n, 1), op.has_cell() ? at(cell, n, 1) : nullptr};
  }
  /// What was before the n-th step.
  CellState<std::byte*> before(const Tensor& hidden, const Tensor& cell, const Tensor& first_hidden,
                               const Tensor& first_cell, std::int64_t n) const {
    if (n > 0) return state(hidden, cell, n - 1);
    return {first_hidden.raw(), op.has_cell() ? first_cell.raw() : nullptr};
  }
};

CellState<const void*> read(const CellState<std::byte*>& s) { return {s.hidden, s.cell}; }
CellState<void*> written(const CellState<std::byte*>& s) { return {s.hidden, s.cell}; }

void recurrent(const ops::Recurrent& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Tensor& w = in[1];
  const Steps s(op, out[0]);
  const TensorOptions like{w.dtype(), w.device()};
  const ops::MatrixOperand weight = ops::matrix_operand(w, true);
  const Addends bias{dense_addend(in[2]), {}};
  ProductShape product;
  product.m = s.rows, product.n = s.gates * s.features, product.k = s.features;
  const bool fused = FusedProduct::fits(s.call(w.dtype()), s.gates);
  const Tensor m = fused ? Tensor() : empty({s.rows, s.gates * s.features}, like);
  for (std::int64_t n = 0; n < s.count; ++n) {
    const CellState<std::byte*> before = s.before(out[0], out[1], in[3], in[4], n);
    const CellStepCall call{s.call(w.dtype()),
                            s.at(in[0], n, s.gates),
                            raw_or_null(m),
                            read(before),
                            written(s.state(out[0], out[1], n)),
                            s.at(out[2], n, 4)};
    if (fused) {
      launch_fused_step(call, {w.raw(), in[2].raw(), nullptr, n == 0});
    } else {
      multiply({product, {{}, before.hidden, s.features}, weight, bias}, m);
      launch_cell_step(call);
    }
  }
  check_launch(op.name);
}

void recurrent_grad(const ops::RecurrentGrad& op, Inputs in, Outputs out) {
  const Tensor &w = in[2], &hidden = in[5], &cells = in[6], &kept = in[7];
  if (hidden.numel() == 0) return;
  const Steps s(op.of, hidden);
  const TensorOptions like{w.dtype(), w.device()}, wide{compute_dtype(w.dtype()), w.device()};
  const Tensor &gx = out[0], &gm = out[1].numel() > 0 ? out[1] : gx;
  const Tensor back = empty({s.rows, s.features}, like), gh = empty(back.shape(), wide),
               gc = op.of.has_cell() ? empty(back.shape(), wide) : Tensor();
  const ops::MatrixOperand weight = ops::matrix_operand(w, false);
  ProductShape product;
  product.m = s.rows, product.n = s.features, product.k = s.gates * s.features;
  CellGradCall call{s.call(w.dtype())};
  const bool fused = FusedProduct::fits(call, s.gates);
  call.sums = {gh.raw(), raw_or_null(gc)};
  call.product = back.raw();
  for (std::int64_t n = s.count - 1; n >= 0; --n) {
    call.last = n == s.count - 1;
    call.gy = read(s.state(in[0], in[1], n));
    call.after = read(s.state(hidden, cells, n));
    call.before = read(s.before(hidden, cells, in[3], in[4], n));
    call.kept = s.at(kept, n, 4);
    call.gx = s.at(gx, n, s.gates);
    call.gm = s.at(gm, n, s.gates);
    if (fused)
      launch_fused_grad(call, {w.raw(), nullptr, call.last ? nullptr : s.at(gm, n + 1, s.gates), call.last});
    else
      launch_cell_grad(call);
    if (!fused || n == 0) multiply({product, {{}, s.at(gm, n, s.gates), product.k}, weight}, back);
  }
  call.last = false;
  launch_cell_first(call, {out[2].raw(), op.of.has_cell() ? out[3].raw() : nullptr});
  check_launch(op.name);
}

}  // namespace

void add_recurrent() {
  add_kernel<recurrent>(DeviceType::cuda);
  add_kernel<recurrent_grad>(DeviceType::cuda);
}

}  // namespace sherd::cuda
