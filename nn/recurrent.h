// Layers that go along a sequence: RNN, LSTM, GRU, with PyTorch's names, equations and first values.
#pragma once

#include <vector>

#include "nn/module.h"
#include "runtime/ops.h"
#include "runtime/ops/recurrent.h"

namespace sherd::nn {

/// For the recurrent layers; `tensor` is the dtype and device of their parameters.
struct RecurrentOptions {
  std::int64_t layers = 1;   ///< one above the other
  bool batch_first = false;  ///< x (B, T, in) and y (B, T, hidden), not (T, B, ...)
  double dropout = 0;        ///< of what each layer but the last gives, while training; in [0, 1]
  TensorOptions tensor{};
  bool bidirectional = false;  ///< each layer goes both ways and gives both outputs, (..., 2 hidden)
  /// Of an LSTM: outputs and hidden states (not cells) are projected to so many features, fewer than hidden
  /// (Sak, Senior and Beaufays, 2014); 0: they are not.
  std::int64_t proj_size = 0;
};

/// What a sequence left in each layer: (layers, B, hidden), and where layers go both ways (2 layers, B,
/// hidden), the way back after the way there. Empty handles are zeros.
struct RecurrentState {
  Tensor hidden{}, cell{};  ///< the cell is an LSTM's alone
};
struct RecurrentResult {
  Tensor y;  ///< what the last layer gave at each step
  RecurrentState state;
};

/// The tensors that are there, for observers of modules.
template <class F>
void tensors_in(RecurrentState& state, F&& visit) {
  for (Tensor* t : {&state.hidden, &state.cell})
    if (t->defined()) visit(*t);
}
template <class F>
void tensors_in(RecurrentResult& result, F&& visit) {
  visit(result.y);
  tensors_in(result.state, visit);
}

namespace detail {

/// The weights of one layer, or of one of its ways: gates x hidden rows, in PyTorch's order of gates. Without
/// a projection `weight_hr` is none.
struct RecurrentWeights {
  Param weight_ih, weight_hh, bias_ih, bias_hh, weight_hr;
};
SHERD_API std::vector<RecurrentWeights> recurrent_weights(std::string_view layer, std::int64_t in,
                                                          std::int64_t hidden, std::int64_t gates,
                                                          const RecurrentOptions& options);
SHERD_API RecurrentResult run_recurrent(std::string_view layer, std::span<const RecurrentWeights> weights,
                                        const Tensor& x, const RecurrentState& state, double dropout,
                                        bool batch_first, bool bidirectional, ops::RecurrentCell cell);

}  // namespace detail

/// What the three share. Parameters are weight_ih_l0 (gates hidden, in), weight_hh_l0 (gates hidden, hidden),
/// bias_ih_l0, bias_hh_l0, those of the way back (weight_ih_l0_reverse, ...) if there is one, then those of
/// layer 1, whose input is what layer 0 gives, and start uniform in +-1/sqrt(hidden); with projections
/// weight_hh_l0 is (gates hidden, proj_size), and weight_hr_l0 (proj_size, hidden) comes last of its layer.
/// ShapeError for x or a state of another shape, ValueError for sizes below 1, a dropout outside [0, 1] and
/// projections of another layer than an LSTM, or to as many features as hidden.
template <class D>
struct Recurrent : Layer<D> {
  std::vector<detail::RecurrentWeights> weights;
  double dropout;
  bool batch_first, bidirectional;

  Recurrent(std::int64_t in, std::int64_t hidden, RecurrentOptions options = {})
      : weights(detail::recurrent_weights(nn::detail::short_type_name<D>(), in, hidden, D::gates, options)),
        dropout(options.dropout),
        batch_first(options.batch_first),
        bidirectional(options.bidirectional) {}
  RecurrentResult forward(const Tensor& x, const RecurrentState& state = {}) const {
    return detail::run_recurrent(this->type_name(), weights, x, state, this->training() ? dropout : 0,
                                 batch_first, bidirectional, D::cell);
  }
  using Layer<D>::operator();
  /// With a state in braces, whose type the templates cannot know: `lstm(x, {hidden, cell})`.
  RecurrentResult operator()(const Tensor& x, const RecurrentState& state) const {
    return Layer<D>::operator()(x, state);
  }
  void visit(auto&& on) {
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const std::size_t ways = bidirectional ? 2 : 1;
      const std::string end = "_l" + std::to_string(i / ways) + (i % ways == 1 ? "_reverse" : "");
      on("weight_ih" + end, weights[i].weight_ih);
      on("weight_hh" + end, weights[i].weight_hh);
      on("bias_ih" + end, weights[i].bias_ih);
      on("bias_hh" + end, weights[i].bias_hh);
      if (weights[i].weight_hr.defined()) on("weight_hr" + end, weights[i].weight_hr);
    }
  }
};

/// h = tanh(W x + b + U h + c).
struct SHERD_API Rnn final : Recurrent<Rnn> {
  static constexpr std::int64_t gates = 1;
  static constexpr ops::RecurrentCell cell = ops::RecurrentCell::tanh;
  using Recurrent::Recurrent;
};
/// Gates i, f, g, o: c = sigmoid(f) c + sigmoid(i) tanh(g), h = sigmoid(o) tanh(c) (Hochreiter and
/// Schmidhuber, 1997).
struct SHERD_API Lstm final : Recurrent<Lstm> {
  static constexpr std::int64_t gates = 4;
  static constexpr ops::RecurrentCell cell = ops::RecurrentCell::lstm;
  using Recurrent::Recurrent;
};
/// Gates r, z, n: h = (1 - sigmoid(z)) tanh(n_x + sigmoid(r) n_h) + sigmoid(z) h (Cho et al., 2014).
struct SHERD_API Gru final : Recurrent<Gru> {
  static constexpr std::int64_t gates = 3;
  static constexpr ops::RecurrentCell cell = ops::RecurrentCell::gru;
  using Recurrent::Recurrent;
};

// Compiled once, in the library.
extern template class Layer<Rnn>;
extern template class Layer<Lstm>;
extern template class Layer<Gru>;

}  // namespace sherd::nn
