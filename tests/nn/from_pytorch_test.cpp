// docs/from_pytorch.md: options of PyTorch that are a line here, against values written out.
#include <cmath>

#include "autograd/autograd.h"
#include "nn/layers.h"
#include "nn/optimizer.h"
#include "nn/recurrent.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "tests/catch.h"

using namespace sherd;

namespace {

constexpr float inf = INFINITY;

/// 1 to 9 as an image of 3 x 3.
Tensor nine() { return reshape(arange(1, 10, 1, {f32}), {1, 1, 3, 3}); }

void check_values(const Tensor& got, const std::vector<float>& expected, double near = 1e-6) {
  const auto values = got.to_vector<float>();
  REQUIRE(values.size() == expected.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    INFO(i);
    CHECK(std::abs(values[i] - expected[i]) <= near * std::max(1.0F, std::abs(expected[i])));
  }
}

}  // namespace

TEST_CASE("from PyTorch: maximize climbs") {
  nn::Linear net(1, 1, {.bias = nn::Bias::no});
  net.weight.set_data(full({1, 1}, 2));
  nn::Sgd optimizer(net.parameters(), {.lr = 0.5, .maximize = true});
  sum(net(full({1, 1}, 3))).backward();
  optimizer.step();
  check_values(net.weight.local().detach(), {3.5F});  // 2 + 0.5 * 3
}

TEST_CASE("from PyTorch: means of windows count what is there alone") {
  const Tensor x = nine();
  check_values(avg_pool2d(x, 2, {.padding = 1}) / avg_pool2d(ones_like(x), 2, {.padding = 1}),
               {1, 2.5F, 5.5F, 7});
  check_values(avg_pool2d(pad(x, {0, 1, 0, 1}), 2) / avg_pool2d(pad(ones_like(x), {0, 1, 0, 1}), 2),
               {3, 4.5F, 7.5F, 9});
}

TEST_CASE("from PyTorch: ceil_mode is a border of what changes nothing") {
  check_values(max_pool2d(pad(nine(), {0, 1, 0, 1}, Padding::constant, -inf), 2), {5, 6, 8, 9});
  check_values(max_pool2d(pad(-nine(), {0, 1, 0, 1}, Padding::constant, -inf), 2), {-1, -3, -7, -9});
}

TEST_CASE("from PyTorch: a convolution has the padding of `pad`") {
  nn::Conv2d layer(1, 1, 3, {.bias = nn::Bias::no});
  layer.weight.set_data(ones({1, 1, 3, 3}));
  // Mirrored at the edge: around (1, 1) stand 5 4 5, 2 1 2, 5 4 5.
  check_values(layer(pad(nine(), {1, 1, 1, 1}, Padding::reflect)), {33, 36, 39, 42, 45, 48, 51, 54, 57});
}

TEST_CASE("from PyTorch: rows of an embedding are cut to a norm") {
  nn::Embedding layer(3, 2);
  layer.weight.set_data(Tensor::from<float>({{3, 4}, {0.3F, 0.4F}, {0, 0}}));
  {
    const NoGrad guard;
    const Tensor w = layer.weight.local().detach();
    copy_(w, w * minimum(1 / (norm(w, 2, {1}, Keep::dims) + 1e-7), 1));
  }
  check_values(layer.weight.local().detach(), {0.6F, 0.8F, 0.3F, 0.4F, 0, 0});
}

TEST_CASE("from PyTorch: a cumulative mean of statistics is a momentum that falls") {
  nn::BatchNorm1d layer(1);
  const std::vector<std::vector<float>> batches{{1, 3}, {10, 30}, {5, 7}};
  for (std::size_t i = 1; i <= batches.size(); ++i) {
    layer.momentum = 1.0 / static_cast<double>(i);
    layer(Tensor::from(batches[i - 1], {2, 1}));
  }
  check_values(layer.running_mean.tensor(), {(2 + 20 + 6) / 3.0F});
  check_values(layer.running_var.tensor(), {(2 + 200 + 2) / 3.0F});
}

TEST_CASE("from PyTorch: a batch norm without running statistics uses the batch's in eval mode too") {
  nn::BatchNorm1d layer(1);
  layer.eval();
  const Tensor x = Tensor::from<float>({1, 3}, {2, 1});
  check_values(batch_norm(x, {}, {}, layer.weight, layer.bias, {.training = true}), {-1, 1}, 1e-4);
}

TEST_CASE("from PyTorch: logcumsumexp is a line") {
  const Tensor x = Tensor::from<float>({{0, 500}, {1, 501}, {-1, 499}});
  const Tensor m = amax(x, {0}, Keep::dims);
  const double e = std::exp(1.0);
  std::vector<float> expected;
  for (const double sum : {1.0, 1 + e, 1 + e + 1 / e})
    for (const double shift : {0.0, 500.0}) expected.push_back(static_cast<float>(std::log(sum) + shift));
  check_values(log(cumsum(exp(x - m), 0)) + m, expected);
}

TEST_CASE("from PyTorch: gradients are clipped by norms of any order") {
  nn::Linear net(2, 1);
  const std::vector<nn::Parameter> params = net.parameters();
  nn::Parameter weight = params[0], bias = params[1];
  const auto set = [&] {
    weight.set_grad(Tensor::from<float>({{3, -4}}));
    bias.set_grad(Tensor::from<float>({2}));
  };
  set();
  CHECK(nn::clip_grad_norm_(params, 1, inf).item() == 4);
  check_values(weight.grad(), {0.75F, -1}, 1e-5);
  check_values(bias.grad(), {0.5F}, 1e-5);
  for (const double order : {0.5, 1.0, 2.0, 3.0}) {
    INFO(order);
    set();
    const double norm = std::pow(std::pow(3, order) + std::pow(4, order) + std::pow(2, order), 1 / order);
    CHECK(std::abs(nn::grad_norm(params, order).item() / norm - 1) < 1e-12);
    CHECK(std::abs(nn::clip_grad_norm_(params, 1, order).item() / norm - 1) < 1e-12);
    check_values(bias.grad(), {static_cast<float>(2 / norm)}, 1e-5);
  }
  for (const double order : {0.0, -1.0, double{NAN}})
    CHECK_THROWS_AS(nn::clip_grad_norm_(params, 1, order), ValueError);
  weight.set_grad({});
  bias.set_grad({});
  for (const double order : {1.0, 2.0, double{inf}}) CHECK(nn::clip_grad_norm_(params, 1, order).item() == 0);
}

namespace {

/// One way of one layer of an LSTM with a projection, step by step as PyTorch's page has it.
Tensor projected_by_hand(const nn::detail::RecurrentWeights& w, const Tensor& x, Tensor h, Tensor c,
                         bool back, std::vector<Tensor>& last_h, std::vector<Tensor>& last_c) {
  std::vector<Tensor> steps(static_cast<std::size_t>(x.size(0)));
  for (std::int64_t n = 0; n < x.size(0); ++n) {
    const std::int64_t t = back ? x.size(0) - 1 - n : n;
    const std::vector<Tensor> gates =
        chunk(linear(select(x, 0, t), w.weight_ih, w.bias_ih) + linear(h, w.weight_hh, w.bias_hh), 4, -1);
    c = sigmoid(gates[1]) * c + sigmoid(gates[0]) * tanh(gates[2]);
    h = linear(sigmoid(gates[3]) * tanh(c), w.weight_hr);
    steps[static_cast<std::size_t>(t)] = h;
  }
  last_h.push_back(h);
  last_c.push_back(c);
  return stack(steps);
}

}  // namespace

TEST_CASE("from PyTorch: an LSTM with projections is that of its equations, gradients too") {
  for (const bool both : {false, true})
    for (const bool with_state : {false, true}) {
      INFO(both << with_state);
      const std::int64_t ways = both ? 2 : 1;
      nn::Lstm lstm(3, 5, {.layers = 2, .tensor = {f64}, .bidirectional = both, .proj_size = 2});
      CHECK(lstm.state_dict().at("weight_hr_l1").shape() == Shape{2, 5});
      CHECK(lstm.state_dict().at("weight_ih_l1").shape() == Shape{20, 2 * ways});
      CHECK(lstm.state_dict().at("weight_hh_l0").shape() == Shape{20, 2});
      const auto options = TensorOptions{f64};
      const Tensor x = randn({4, 3, 3}, options);
      Tensor h = with_state ? randn({2 * ways, 3, 2}, options) : zeros({2 * ways, 3, 2}, options),
             c = with_state ? randn({2 * ways, 3, 5}, options) : zeros({2 * ways, 3, 5}, options);
      h.requires_grad_(), c.requires_grad_();
      std::vector<Tensor> last_h, last_c;
      Tensor rows = x;
      for (std::size_t layer = 0; layer < 2; ++layer) {
        std::vector<Tensor> given;
        for (std::int64_t way = 0; way < ways; ++way) {
          const std::int64_t i = static_cast<std::int64_t>(layer) * ways + way;
          given.push_back(projected_by_hand(lstm.weights[static_cast<std::size_t>(i)], rows, select(h, 0, i),
                                            select(c, 0, i), way == 1, last_h, last_c));
        }
        rows = cat(given, -1);
      }
      const auto result = with_state ? lstm(x, {h, c}) : lstm(x);
      CHECK(result.y.shape() == Shape{4, 3, 2 * ways});
      CHECK(allclose(result.y, rows, 1e-9, 1e-12));
      CHECK(allclose(result.state.hidden, stack(last_h), 1e-9, 1e-12));
      CHECK(allclose(result.state.cell, stack(last_c), 1e-9, 1e-12));
      std::vector<Tensor> leaves;
      for (const auto& p : lstm.parameters()) leaves.push_back(p.tensor());
      if (with_state) leaves.insert(leaves.end(), {h, c});
      const auto loss = [](const Tensor& y, const Tensor& hidden, const Tensor& cell) {
        return sum(square(y)) + sum(hidden * 3) + sum(square(cell));
      };
      const std::vector<Tensor> got = grad(loss(result.y, result.state.hidden, result.state.cell), leaves),
                                expected = grad(loss(rows, stack(last_h), stack(last_c)), leaves);
      for (std::size_t i = 0; i < got.size(); ++i) {
        INFO(i);
        CHECK(allclose(got[i], expected[i], 1e-8, 1e-10));
      }
    }
  CHECK_THROWS_AS(nn::Gru(3, 5, {.proj_size = 2}), ValueError);
  CHECK_THROWS_AS(nn::Lstm(3, 5, {.proj_size = 5}), ValueError);
  CHECK_THROWS_AS(nn::Lstm(3, 5, {.proj_size = -1}), ValueError);
}
