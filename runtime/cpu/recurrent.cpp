// Recurrent layers step by step: a product for all gates, and one pass over them.
#include "runtime/ops/recurrent.h"

#include <algorithm>

#include "runtime/cpu/gemm_repeated.h"
#include "runtime/cpu/rows.h"
#include "runtime/cpu/scratch.h"
#include "runtime/math.h"
#include "runtime/ops.h"
#include "runtime/parallel.h"

namespace sherd::cpu {
namespace {

using ops::CellGrad;
using ops::CellState;

struct Steps {
  ops::Recurrent op;
  std::int64_t steps, batch, hidden, gates;

  Steps(const ops::Recurrent& op, const Shape& hidden, std::int64_t gates)
      : op(op), steps(hidden[0]), batch(hidden[1]), hidden(hidden[2]), gates(gates) {}
  std::int64_t state() const { return batch * hidden; }
  std::int64_t gated() const { return batch * gates; }
  /// The n-th step that is taken.
  std::int64_t step(std::int64_t n) const { return op.reverse ? steps - 1 - n : n; }
  /// What was before the n-th step.
  template <class T>
  const T* before(std::int64_t n, const T* first, const T* states) const {
    return n == 0 ? first : states + step(n - 1) * state();
  }
  /// Calls `body(row)` for each of the batch.
  template <class F>
  void for_rows(const F& body) const {
    const std::int64_t grain = std::max<std::int64_t>(1, (1 << 12) / gates);
    parallel_for(batch, grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) body(row);
    });
  }
};

template <class T>
Scratch<T> memory_for(std::int64_t count) {
  Scratch<T> room = scratch<T>(count);
  check<OutOfMemoryError>(room != nullptr, "recurrent: no memory for a step of {} numbers", count);
  return room;
}

// ---- One row of a step: `n` features, whose gates lie one after another.

/// The features of a vector, of the rows of states, gates and kept numbers that begin at `j`.
template <class T, class Count>
struct Features {
  using C = compute_t<T>;
  using V = Lanes<C>;
  std::int64_t n, j;
  Count count;

  template <class X>
  V of(const X* row, std::int64_t k = 0) const {
    return V(take<C>(row + k * n + j, count));
  }
  template <class X>
  CellState<V> of(const CellState<X*>& rows) const {
    return {of(rows.hidden), rows.cell ? of(rows.cell) : V(C(0))};
  }
  template <class X>
  void give(V x, X* row, std::int64_t k = 0) const {
    put<C>(row + k * n + j, x.vector(), count);
  }
  template <class X>
  void give(const CellState<V>& x, const CellState<X*>& rows) const {
    give(x.hidden, rows.hidden);
    if (rows.cell) give(x.cell, rows.cell);
  }
};
/// Calls `body` for the features of a row of `n`.
template <class T, class F>
void for_features(std::int64_t n, const F& body) {
  for_vectors<compute_t<T>>(
      n, [&](std::int64_t j, auto count) { body(Features<T, decltype(count)>{n, j, count}); });
}

template <class Cell, class T>
[[gnu::flatten]] void step_row(std::int64_t n, const T* x, const T* m, const CellState<const T*> before,
                               const CellState<T*> after, T* kept) {
  for_features<T>(n, [&](const auto& at) {
    using V = decltype(at.of(x));
    V from_x[Cell::gates], from_m[Cell::gates];
    for (int k = 0; k < Cell::gates; ++k) from_x[k] = at.of(x, k), from_m[k] = at.of(m, k);
    const ops::CellStep<V> step = Cell::step(from_x, from_m, at.of(before));
    at.give(step.state, after);
    for (int k = 0; k < Cell::kept; ++k) at.give(step.kept[k], kept, k);
  });
}

/// `gy` is the gradient of the state after, and then what the state before has of it beside its product.
template <class Cell, class T>
[[gnu::flatten]] void grad_row(std::int64_t n, const CellState<compute_t<T>*> gy,
                               const CellState<const T*> after, const CellState<const T*> before,
                               const T* kept, T* gx, T* gm) {
  for_features<T>(n, [&](const auto& at) {
    using V = decltype(at.of(kept));
    V read[4];
    for (int k = 0; k < Cell::kept; ++k) read[k] = at.of(kept, k);
    const CellGrad<V> step = Cell::grad(at.of(gy), at.of(after), at.of(before), read);
    for (int k = 0; k < Cell::gates; ++k) at.give(step.x[k], gx, k);
    if constexpr (Cell::apart)
      for (int k = 0; k < Cell::gates; ++k) at.give(step.m[k], gm, k);
    at.give(step.state, gy);
  });
}

// ---- The steps.

template <class T>
const T* data_of(const Tensor& x) {
  return reinterpret_cast<const T*>(raw_or_null(x));
}
template <class T>
T* result_of(const Tensor& x) {
  return reinterpret_cast<T*>(x.raw());
}

template <class Cell, class T>
void forward(const Steps& s, Inputs in, Outputs out) {
  const T *x = data_of<T>(in[0]), *w = data_of<T>(in[1]), *bias = data_of<T>(in[2]), *h0 = data_of<T>(in[3]),
          *c0 = data_of<T>(in[4]);
  T *h = result_of<T>(out[0]), *c = result_of<T>(out[1]), *kept = result_of<T>(out[2]);
  const std::int64_t n = s.hidden;
  const RepeatedGemm<T> product({.m = s.batch,
                                 .n = s.gates,
                                 .k = n,
                                 .lda = n,
                                 .b = w,
                                 .ldb = n,
                                 .transpose_b = true,
                                 .ldc = s.gates,
                                 .bias = bias});
  const Scratch<T> products = memory_for<T>(s.gated());
  for (std::int64_t i = 0; i < s.steps; ++i) {
    const std::int64_t t = s.step(i);
    const T *before = s.before(i, h0, h), *cell = s.before(i, c0, c);
    product(before, products.get());
    s.for_rows([&](std::int64_t row) {
      const std::int64_t at = t * s.batch + row;
      step_row<Cell, T>(n, x + at * s.gates, products.get() + row * s.gates,
                        {before + row * n, Cell::has_cell ? cell + row * n : nullptr},
                        {h + at * n, Cell::has_cell ? c + at * n : nullptr}, kept + at * Cell::kept * n);
    });
  }
}

/// sum += added, where there is something to add.
template <class T, class C>
void add_row(std::int64_t n, const T* added, C* sum) {
  if (added)
    for (std::int64_t j = 0; j < n; ++j) sum[j] += C(added[j]);
}

template <class Cell, class T>
void backward(const Steps& s, Inputs in, Outputs out) {
  using C = compute_t<T>;
  const T *gy = data_of<T>(in[0]), *gcells = Cell::has_cell ? data_of<T>(in[1]) : nullptr,
          *w = data_of<T>(in[2]), *h0 = data_of<T>(in[3]), *c0 = data_of<T>(in[4]), *h = data_of<T>(in[5]),
          *c = data_of<T>(in[6]), *kept = data_of<T>(in[7]);
  T* const gx = result_of<T>(out[0]);
  T* const gm = Cell::apart ? result_of<T>(out[1]) : gx;
  const std::int64_t n = s.hidden;
  const Scratch<C> gh = memory_for<C>(s.state()), gc = memory_for<C>(Cell::has_cell ? s.state() : 0);
  const Scratch<T> back = memory_for<T>(s.state());
  std::fill_n(gh.get(), s.state(), C(0));
  std::fill_n(gc.get(), Cell::has_cell ? s.state() : 0, C(0));
  std::fill_n(back.get(), s.state(), T(0.0F));
  const RepeatedGemm<T> product(
      {.m = s.batch, .n = n, .k = s.gates, .lda = s.gates, .b = w, .ldb = n, .ldc = n});
  // What a step passes to the one before it: its product, and what else its state has, which `gh` then holds.
  const auto collect = [&](std::int64_t row) {
    C* const sum = gh.get() + row * n;
    if (!Cell::passes_hidden) std::fill_n(sum, n, C(0));
    add_row(n, back.get() + row * n, sum);
  };
  for (std::int64_t i = s.steps - 1; i >= 0; --i) {
    const std::int64_t t = s.step(i);
    const T *before = s.before(i, h0, h), *cell = s.before(i, c0, c);
    s.for_rows([&](std::int64_t row) {
      const std::int64_t at = t * s.batch + row;
      const auto cell_at = [](auto* cells, std::int64_t place) {
        return Cell::has_cell ? cells + place : nullptr;
      };
      const CellState<C*> g{gh.get() + row * n, cell_at(gc.get(), row * n)};
      collect(row);
      add_row(n, gy ? gy + at * n : nullptr, g.hidden);
      if (gcells) add_row(n, gcells + at * n, g.cell);
      grad_row<Cell, T>(n, g, {h + at * n, cell_at(c, at * n)}, {before + row * n, cell_at(cell, row * n)},
                        kept + at * Cell::kept * n, gx + at * s.gates, gm + at * s.gates);
    });
    product(gm + t * s.gated(), back.get());
  }
  s.for_rows([&](std::int64_t row) {
    collect(row);
    std::transform(gh.get() + row * n, gh.get() + (row + 1) * n, result_of<T>(out[2]) + row * n,
                   [](C g) { return T(g); });
  });
  if constexpr (Cell::has_cell)
    std::transform(gc.get(), gc.get() + s.state(), result_of<T>(out[3]), [](C g) { return T(g); });
}

/// Calls `body.operator()<Cell, T>()` for the cell of `op` and a dtype.
template <class F>
void visit(const ops::Recurrent& op, DType dtype, const F& body) {
  ops::visit_cell(op.cell, [&]<class Cell>(Cell) {
    with_floating(op.name, dtype, [&]<class T>() { body.template operator()<Cell, T>(); });
  });
}

void recurrent(const ops::Recurrent& op, Inputs in, Outputs out) {
  if (out[0].numel() == 0) return;
  const Steps sizes(op, out[0].shape(), in[1].shape()[0]);
  visit(op, out[0].dtype(), [&]<class Cell, class T>() { forward<Cell, T>(sizes, in, out); });
}

void recurrent_grad(const ops::RecurrentGrad& op, Inputs in, Outputs out) {
  if (in[5].numel() == 0) return;
  const Steps sizes(op.of, in[5].shape(), in[2].shape()[0]);
  visit(op.of, out[0].dtype(), [&]<class Cell, class T>() { backward<Cell, T>(sizes, in, out); });
}

}  // namespace

void add_recurrent() {
  add_kernel<recurrent>(DeviceType::cpu);
  add_kernel<recurrent_grad>(DeviceType::cpu);
}

}  // namespace sherd::cpu
