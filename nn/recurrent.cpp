#include "nn/recurrent.h"

#include <cmath>

#include "nn/most_layers.h"
#include "runtime/given.h"

namespace sherd::nn::detail {

std::vector<RecurrentWeights> recurrent_weights(std::string_view layer, std::int64_t in, std::int64_t hidden,
                                                std::int64_t gates, const RecurrentOptions& o) {
  check<ValueError>(in > 0 && hidden > 0 && o.layers > 0,
                    "{}: {} inputs, {} hidden features and {} layers must be at least 1", layer, in, hidden,
                    o.layers);
  check<ValueError>(o.layers <= most_layers, "{}: {} layers, at most {} are supported; give fewer", layer,
                    o.layers, most_layers);
  check<ValueError>(o.dropout >= 0 && o.dropout <= 1, "{}: probability {} is outside [0, 1]", layer,
                    o.dropout);
  check<ValueError>(o.proj_size >= 0 && o.proj_size < hidden,
                    "{}: projections to {} features; fewer than the {} hidden ones, or 0", layer, o.proj_size,
                    hidden);
  check<ValueError>(o.proj_size == 0 || gates == 4, "{}: projections (proj_size {}) are an LSTM's alone",
                    layer, o.proj_size);
  const std::int64_t given = o.proj_size > 0 ? o.proj_size : hidden;
  const double bound = 1 / std::sqrt(static_cast<double>(hidden));
  const auto drawn = [&](Shape shape) { return Param(rand(std::move(shape), o.tensor, -bound, bound)); };
  const std::int64_t ways = o.bidirectional ? 2 : 1;
  std::vector<RecurrentWeights> weights(static_cast<std::size_t>(ways * o.layers));
  for (std::size_t i = 0; i < weights.size(); ++i) {
    RecurrentWeights& w = weights[i];
    w.weight_ih = drawn({gates * hidden, static_cast<std::int64_t>(i) < ways ? in : ways * given});
    w.weight_hh = drawn({gates * hidden, given});
    w.bias_ih = drawn({gates * hidden});
    w.bias_hh = drawn({gates * hidden});
    if (o.proj_size > 0) w.weight_hr = drawn({o.proj_size, hidden});
  }
  return weights;
}

namespace {

Tensor start_of(std::string_view layer, const Tensor& given, const Shape& expected, const Tensor& like) {
  if (!given.defined()) return zeros(expected, {like.dtype(), like.device()});
  check<ShapeError>(given.shape() == expected, "{}: a state of shape {} where {} is expected", layer,
                    given.shape(), expected);
  return given;
}

/// One way of one layer. With a projection h' = W_hr h the gates take (W_hh W_hr) h, so that it is the same
/// op without one, and all steps are projected at once; the state before the first, of which only h' is
/// known, goes into what the input gives to that step.
ops::RecurrentSteps run_way(const ops::Recurrent& op, const RecurrentWeights& w, const Tensor& rows,
                            const Tensor& hidden, const Tensor& cell) {
  // What comes from the input is one product for all steps.
  Tensor from_input = linear(rows, w.weight_ih, w.bias_ih);
  if (!w.weight_hr.defined()) return ops::recurrent(op, from_input, w.weight_hh, w.bias_hh, hidden, cell);
  const std::int64_t rest = from_input.size(0) - 1, first = op.reverse ? rest : 0;
  const Tensor started = add(narrow(from_input, 0, first, 1), unsqueeze(linear(hidden, w.weight_hh), 0)),
               others = narrow(from_input, 0, op.reverse ? 0 : 1, rest);
  from_input = op.reverse ? cat({others, started}, 0) : cat({started, others}, 0);
  const Tensor gates = matmul(w.weight_hh, w.weight_hr);
  ops::RecurrentSteps steps = ops::recurrent(op, from_input, gates, w.bias_hh, zeros_like(cell), cell);
  steps.hidden = linear(steps.hidden, w.weight_hr);
  return steps;
}

}  // namespace

RecurrentResult run_recurrent(std::string_view layer, std::span<const RecurrentWeights> weights,
                              const Tensor& x, const RecurrentState& state, double p, bool batch_first,
                              bool bidirectional, ops::RecurrentCell cell) {
  sherd::detail::check_given(layer, x);
  const bool has_cell = cell == ops::RecurrentCell::lstm;
  const std::int64_t in = weights[0].weight_ih.shape()[1], hidden = weights[0].weight_hh.shape()[1];
  check<ShapeError>(x.rank() == 3 && x.shape().back() == in && x.size(batch_first ? 1 : 0) > 0,
                    "{}: input ({}, {}) of at least one step, got shape {}", layer,
                    batch_first ? "B, T" : "T, B", in, x.shape());
  check<ValueError>(has_cell || !state.cell.defined(), "{}: has no cell, but its state has one", layer);
  Tensor rows = batch_first ? transpose(x, 0, 1) : x;  // (T, B, ...)
  const auto count = static_cast<std::int64_t>(weights.size());
  const Tensor hidden_before = start_of(layer, state.hidden, {count, rows.size(1), hidden}, x);
  const Tensor cell_before =
      has_cell ? start_of(layer, state.cell, {count, rows.size(1), weights[0].weight_hh.shape()[0] / 4}, x)
               : Tensor();
  std::vector<Tensor> last_hidden, last_cell;
  const std::size_t ways = bidirectional ? 2 : 1;
  for (std::size_t layer_at = 0; layer_at < weights.size(); layer_at += ways) {
    if (layer_at > 0 && p > 0) rows = dropout(rows, p);
    std::vector<Tensor> given;
    for (std::size_t i = layer_at; i < layer_at + ways; ++i) {
      const auto number = static_cast<std::int64_t>(i);
      const bool back = i > layer_at;
      const ops::RecurrentSteps steps =
          run_way({cell, back}, weights[i], rows, select(hidden_before, 0, number),
                  has_cell ? select(cell_before, 0, number) : Tensor());
      given.push_back(steps.hidden);
      const std::int64_t end = back ? 0 : -1;
      last_hidden.push_back(select(steps.hidden, 0, end));
      if (has_cell) last_cell.push_back(select(steps.cells, 0, end));
    }
    rows = ways == 1 ? given[0] : cat(given, -1);
  }
  return {batch_first ? transpose(rows, 0, 1) : rows,
          {stack(last_hidden), has_cell ? stack(last_cell) : Tensor()}};
}

}  // namespace sherd::nn::detail

namespace sherd::nn {

template class Layer<Rnn>;
template class Layer<Lstm>;
template class Layer<Gru>;

}  // namespace sherd::nn
