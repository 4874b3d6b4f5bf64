#include "runtime/ops/recurrent.h"

#include "runtime/apply.h"
#include "runtime/ops.h"

namespace sherd::ops {
namespace {

/// The n-th step that is taken.
std::int64_t step_at(const Recurrent& op, std::int64_t steps, std::int64_t n) {
  return op.reverse ? steps - 1 - n : n;
}

struct Step {
  Tensor hidden, cell;
  std::vector<Tensor> kept;
};

/// One step, of what the input and the state before come to and that state, in the dtype of sums.
Step step_of(RecurrentCell cell, const Tensor& x, const Tensor& m, const Tensor& h, const Tensor& c) {
  if (cell == RecurrentCell::tanh) return {tanh(add(x, m)), {}, {}};
  if (cell == RecurrentCell::lstm) {
    const std::vector<Tensor> gate = chunk(add(x, m), 4, -1);
    const Tensor i = sigmoid(gate[0]), f = sigmoid(gate[1]), g = tanh(gate[2]), o = sigmoid(gate[3]);
    const Tensor next = add(mul(f, c), mul(i, g));
    return {mul(o, tanh(next)), next, {i, f, g, o}};
  }
  const std::vector<Tensor> gx = chunk(x, 3, -1), gm = chunk(m, 3, -1);
  const Tensor r = sigmoid(add(gx[0], gm[0])), z = sigmoid(add(gx[1], gm[1])),
               n = tanh(add(gx[2], mul(r, gm[2])));
  return {add(n, mul(z, sub(h, n))), {}, {r, z, n, gm[2]}};
}

/// What a step gives back.
struct StepGrad {
  Tensor x, m;          // empty m: x's
  Tensor hidden, cell;  // beside what m gives to the state before
};

Tensor of_sigmoid(const Tensor& s) { return mul(s, sub(1, s)); }
Tensor of_tanh(const Tensor& t) { return sub(1, square(t)); }

StepGrad step_grad(RecurrentCell cell, const Tensor& gh, const Tensor& gc, const Tensor& h, const Tensor& c,
                   const Tensor& h_before, const Tensor& c_before, const std::vector<Tensor>& kept) {
  if (cell == RecurrentCell::tanh) return {mul(gh, of_tanh(h)), {}, {}, {}};
  if (cell == RecurrentCell::lstm) {
    const Tensor &i = kept[0], &f = kept[1], &g = kept[2], &o = kept[3], t = tanh(c);
    const Tensor all = add(gc, mul(mul(gh, o), of_tanh(t)));
    return {cat({mul(mul(all, g), of_sigmoid(i)), mul(mul(all, c_before), of_sigmoid(f)),
                 mul(mul(all, i), of_tanh(g)), mul(mul(gh, t), of_sigmoid(o))},
                -1),
            {},
            {},
            mul(all, f)};
  }
  const Tensor &r = kept[0], &z = kept[1], &n = kept[2], &m = kept[3];
  const Tensor gz = mul(mul(gh, sub(h_before, n)), of_sigmoid(z)), gn = mul(mul(gh, sub(1, z)), of_tanh(n)),
               gr = mul(mul(gn, m), of_sigmoid(r));
  return {cat({gr, gz, gn}, -1), cat({gr, gz, mul(gn, r)}, -1), mul(gh, z), {}};
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
  for (std::int64_t n = 0; n < steps; ++n) {
    const std::int64_t t = step_at(*this, steps, n);
    const Step step = step_of(cell, at(in[0], t, wide), to(linear(h, in[1], in[2]), wide), to(h, wide),
                              c.defined() ? to(c, wide) : c);
    const auto place = static_cast<std::size_t>(t);
    hidden[place] = h = to(step.hidden, narrow);
    if (has_cell()) cells[place] = c = to(step.cell, narrow);
    if (!step.kept.empty()) kept[place] = to(cat(step.kept, -1), narrow);
  }
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
  for (std::int64_t n = steps - 1; n >= 0; --n) {
    const std::int64_t t = step_at(of, steps, n);
    if (in[0].defined()) gh = add(gh, at(in[0], t, wide));
    if (in[1].defined() && of.has_cell()) gc = add(gc, at(in[1], t, wide));
    const bool saved = kept.rank() == 3, cell = of.has_cell();
    const StepGrad step =
        step_grad(of.cell, gh, gc, at(hidden, t, wide), cell ? at(cells, t, wide) : Tensor(),
                  at(h_before, t, wide), cell ? at(c_before, t, wide) : Tensor(),
                  saved ? chunk(at(kept, t, wide), 4, -1) : std::vector<Tensor>());
    const auto place = static_cast<std::size_t>(t);
    gx[place] = to(step.x, narrow);
    gm[place] = step.m.defined() ? to(step.m, narrow) : gx[place];
    gh = to(matmul(gm[place], w), wide);
    if (step.hidden.defined()) gh = add(gh, step.hidden);
    if (cell) gc = step.cell;
  }
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
