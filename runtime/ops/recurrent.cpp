#include "runtime/ops/recurrent.h"

#include <array>

#include "runtime/apply.h"
#include "runtime/expr.h"
#include "runtime/ops.h"

namespace sherd::ops {
namespace {

/// The n-th step that is taken.
std::int64_t step_at(const Recurrent& op, std::int64_t steps, std::int64_t n) {
  return op.reverse ? steps - 1 - n : n;
}

using Exprs = std::array<Expr, 4>;

/// The gates of `x`, side by side along the last axis.
Exprs gates_of(const Tensor& x, std::int64_t count) {
  Exprs gates;
  std::size_t next = 0;
  for (const Tensor& gate : chunk(x, count, -1)) gates[next++] = Expr(gate);
  return gates;
}

/// The first `count` of `values` side by side.
Tensor joined(const Expr* values, int count) {
  std::vector<Tensor> parts;
  for (int i = 0; i < count; ++i) parts.push_back(values[i].tensor());
  return count == 1 ? parts[0] : cat(parts, -1);
}

/// An empty handle is a cell that is not there.
CellState<Expr> state_of(const Tensor& hidden, const Tensor& cell) {
  return {Expr(hidden), cell.defined() ? Expr(cell) : Expr()};
}

Tensor at(const Tensor& x, std::int64_t t, DType wide) { return to(select(x, 0, t), wide); }

/// The states before each step, in its place.
Tensor states_before(const Recurrent& op, const Tensor& first, const Tensor& states) {
  const std::int64_t rest = states.size(0) - 1;
  const Tensor start = unsqueeze(first, 0);
  return op.reverse ? cat({narrow(states, 0, 1, rest), start}, 0)
                    : cat({start, narrow(states, 0, 0, rest)}, 0);
}

}  // namespace

Specs Recurrent::infer(SpecSpan in) const {
  const Spec &x = in[0], &w = in[1], &b = in[2], &h = in[3], &c = in[4];
  check<DTypeError>(is_floating(x.dtype), "recurrent: takes floating dtypes, got {}; cast the input first",
                    name_of(x.dtype));
  for (const Spec* other : {&w, &b, &h, &c})
    check<DTypeError>(other->is_none() || other->dtype == x.dtype,
                      "recurrent: {} beside an input of {}; cast one of them", name_of(other->dtype),
                      name_of(x.dtype));
  check<ShapeError>(x.shape.rank() == 3 && w.shape.rank() == 2 && x.shape[0] > 0,
                    "recurrent: takes (T, B, gates H) with T of at least 1 and W (gates H, H), got {} and {}",
                    x.shape, w.shape);
  const std::int64_t hidden = w.shape[1];
  const Shape state{x.shape[1], hidden};
  check<ShapeError>(
      w.shape[0] == gates() * hidden && x.shape[2] == gates() * hidden && b.shape == Shape{gates() * hidden},
      "recurrent: {} gates of {} features, got x {}, W {} and b {}", gates(), hidden, x.shape, w.shape,
      b.shape);
  check<ShapeError>(h.shape == state && c.is_none() != has_cell() && (c.is_none() || c.shape == state),
                    "recurrent: a state of shape {}{} is expected, got {} and {}", state,
                    has_cell() ? " and a cell" : "", h.shape, c.is_none() ? "no cell" : "a cell");
  const auto of = [&](Shape shape) { return Spec{std::move(shape), x.dtype, x.device}; };
  const Shape steps{x.shape[0], x.shape[1], hidden};
  return {of(steps), of(has_cell() ? steps : Shape{0}),
          of(gates() > 1 ? Shape{x.shape[0], x.shape[1], 4 * hidden} : Shape{0})};
}

Tensors Recurrent::grad(const GradArgs& args) const {
  if (args.create_graph) return detail::reference_gradient(args, [this](Inputs in) { return reference(in); });
  const Tensor &w = args.inputs[1], &first = args.inputs[3], &hidden = args.outputs[0];
  const Tensor in[] = {args.gy[0],      args.gy[1],     w, first, args.inputs[4], hidden,
                       args.outputs[1], args.outputs[2]};
  const Tensors given = apply_many(RecurrentGrad{*this}, in);
  const Tensor& gm = cell == RecurrentCell::gru ? given[1] : given[0];
  Tensors grads(5);
  if (args.need(0)) grads[0] = given[0];
  if (args.need(1)) {
    const std::int64_t rows = hidden.size(0) * hidden.size(1);
    grads[1] = matmul(transpose(reshape(gm, {rows, w.size(0)}), 0, 1),
                      reshape(states_before(*this, first, hidden), {rows, w.size(1)}));
  }
  if (args.need(2)) grads[2] = sum(gm, {0, 1});
  if (args.need(3)) grads[3] = given[2];
  if (args.need(4)) grads[4] = given[3];
  return grads;
}

Tensors Recurrent::reference(Inputs in) const {
  const DType narrow = in[0].dtype(), wide = compute_dtype(narrow);
  Tensor h = in[3], c = in[4];
  const std::int64_t steps = in[0].size(0);
  std::vector<Tensor> hidden(static_cast<std::size_t>(steps)), cells(hidden), kept(hidden);
  visit_cell(cell, [&]<class Cell>(Cell) {
    for (std::int64_t n = 0; n < steps; ++n) {
      const std::int64_t t = step_at(*this, steps, n);
      const Exprs x = gates_of(at(in[0], t, wide), Cell::gates),
                  m = gates_of(to(linear(h, in[1], in[2]), wide), Cell::gates);
      const auto step =
          Cell::step(x.data(), m.data(), state_of(to(h, wide), Cell::has_cell ? to(c, wide) : Tensor()));
      const auto place = static_cast<std::size_t>(t);
      hidden[place] = h = to(step.state.hidden.tensor(), narrow);
      if constexpr (Cell::has_cell) cells[place] = c = to(step.state.cell.tensor(), narrow);
      if constexpr (Cell::kept > 0) kept[place] = to(joined(step.kept, Cell::kept), narrow);
    }
  });
  const Tensor none = empty({0}, {narrow, in[0].device()});
  return {stack(hidden), has_cell() ? stack(cells) : none, gates() > 1 ? stack(kept) : none};
}

Specs RecurrentGrad::infer(SpecSpan in) const {
  const Spec &w = in[2], &h = in[3], &hidden = in[5];
  const auto like = [&](Shape shape) { return Spec{std::move(shape), h.dtype, h.device}; };
  const Shape gates{hidden.shape[0], hidden.shape[1], w.shape[0]};
  return {like(gates), like(of.cell == RecurrentCell::gru ? gates : Shape{0}), h,
          like(of.has_cell() ? h.shape : Shape{0})};
}

Tensors RecurrentGrad::reference(Inputs in) const {
  const Tensor &w = in[2], &hidden = in[5], &cells = in[6], &kept = in[7];
  const DType narrow = w.dtype(), wide = compute_dtype(narrow);
  const std::int64_t steps = hidden.size(0);
  const Tensor h_before = states_before(of, in[3], hidden),
               c_before = of.has_cell() ? states_before(of, in[4], cells) : Tensor(),
               none = empty({0}, {narrow, w.device()});
  Tensor gh = zeros(in[3].shape(), {wide, w.device()}), gc = gh;
  std::vector<Tensor> gx(static_cast<std::size_t>(steps)), gm(gx);
  visit_cell(of.cell, [&]<class Cell>(Cell) {
    for (std::int64_t n = steps - 1; n >= 0; --n) {
      const std::int64_t t = step_at(of, steps, n);
      if (in[0].defined()) gh = add(gh, at(in[0], t, wide));
      if (in[1].defined() && Cell::has_cell) gc = add(gc, at(in[1], t, wide));
      const auto now = [&](const Tensor& cells) { return Cell::has_cell ? at(cells, t, wide) : Tensor(); };
      Exprs read;
      if constexpr (Cell::kept > 0) read = gates_of(at(kept, t, wide), Cell::kept);
      const auto step = Cell::grad(state_of(gh, gc), state_of(at(hidden, t, wide), now(cells)),
                                   state_of(at(h_before, t, wide), now(c_before)), read.data());
      const auto place = static_cast<std::size_t>(t);
      gx[place] = to(joined(step.x, Cell::gates), narrow);
      gm[place] = Cell::apart ? to(joined(step.m, Cell::gates), narrow) : gx[place];
      gh = to(matmul(gm[place], w), wide);
      if constexpr (Cell::passes_hidden) gh = add(gh, step.state.hidden.tensor());
      if constexpr (Cell::has_cell) gc = step.state.cell.tensor();
    }
  });
  return {stack(gx), of.cell == RecurrentCell::gru ? stack(gm) : none, to(gh, narrow),
          of.has_cell() ? to(gc, narrow) : none};
}

RecurrentSteps recurrent(const Recurrent& op, const Tensor& x, const Tensor& weight, const Tensor& bias,
                         const Tensor& hidden, const Tensor& cell) {
  const Tensor in[] = {x, weight, bias, hidden, cell};
  const Tensors out = apply_many(op, in);
  return {out[0], op.has_cell() ? out[1] : Tensor()};
}

}  // namespace sherd::ops
