// Options that have PyTorch's names and meaning, against values written out and against the line of other
// calls that each saves.
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
  check_values(avg_pool2d(x, 2, {.padding = 1, .count_include_pad = false}), {1, 2.5F, 5.5F, 7});
  check_values(avg_pool2d(x, 2, {.padding = 1}), {0.25F, 1.25F, 2.75F, 7});
  check_values(avg_pool2d(x, 2, {.ceil_mode = true}), {3, 4.5F, 7.5F, 9});
  check_values(avg_pool2d(x, 2, {.divisor_override = 2}), {6});
  check_values(nn::AvgPool2d(2, {.padding = 1, .count_include_pad = false})(x), {1, 2.5F, 5.5F, 7});
}

TEST_CASE("from PyTorch: ceil_mode has windows of what is left") {
  check_values(max_pool2d(nine(), 2, {.ceil_mode = true}), {5, 6, 8, 9});
  check_values(max_pool2d(-nine(), 2, {.ceil_mode = true}), {-1, -3, -7, -9});
  check_values(nn::MaxPool2d(2, {.ceil_mode = true})(-nine()), {-1, -3, -7, -9});
  check_values(nn::MaxPool1d(2, {.ceil_mode = true})(Tensor::from<float>({1, 2, -3}, {1, 1, 3})), {2, -3});
}

TEST_CASE("from PyTorch: a convolution has the padding of `pad`") {
  nn::Conv2d layer(1, 1, 3, {.padding = 1, .bias = nn::Bias::no, .padding_mode = Padding::reflect});
  layer.weight.set_data(ones({1, 1, 3, 3}));
  // Mirrored at the edge: around (1, 1) stand 5 4 5, 2 1 2, 5 4 5.
  check_values(layer(nine()), {33, 36, 39, 42, 45, 48, 51, 54, 57});
  const Tensor image = randn({2, 3, 7, 6}), line = randn({2, 3, 7});
  for (const Padding mode : {Padding::constant, Padding::reflect, Padding::replicate, Padding::circular}) {
    const nn::Conv2d padded(3, 4, {3, 2}, {.stride = {1, 2}, .padding = {2, 1}, .padding_mode = mode});
    CHECK(allclose(padded(image),
                   conv2d(pad(image, {1, 1, 2, 2}, mode), padded.weight, padded.bias, {.stride = {1, 2}})));
    const nn::Conv1d along(3, 4, 3, {.stride = 2, .padding = 2, .padding_mode = mode});
    CHECK(allclose(along(line), conv1d(pad(line, {2, 2}, mode), along.weight, along.bias, {.stride = 2})));
  }
}

TEST_CASE("from PyTorch: the rows of an embedding that are looked up are cut to a norm") {
  const Tensor rows = Tensor::from<float>({{3, 4}, {0.3F, 0.4F}, {0, 0}, {-3, 4}});
  nn::Embedding layer(4, 2, nn::EmbeddingOptions{.max_norm = 1});
  layer.weight.set_data(clone(rows));
  const Tensor y = layer(Tensor::from<std::int64_t>({{0, 1, 0}, {2, 2, 0}}));
  check_values(y.detach(), {0.6F, 0.8F, 0.3F, 0.4F, 0.6F, 0.8F, 0, 0, 0, 0, 0.6F, 0.8F});
  check_values(layer.weight.local().detach(), {0.6F, 0.8F, 0.3F, 0.4F, 0, 0, -3, 4});
  sum(y).backward();
  check_values(layer.weight.grad(), {3, 3, 1, 1, 2, 2, 0, 0});
  for (const double order : {1.0, 2.0, 3.5, double{inf}}) {
    INFO(order);
    nn::Embedding other(50, 7, nn::EmbeddingOptions{.max_norm = 1.5, .norm_type = order});
    const Tensor before = clone(other.weight.local().detach());
    other(arange(0, 40, 1, {i64}));
    const Tensor after = other.weight.local().detach(), size = norm(before, order, {1}, Keep::dims);
    const Tensor cut = where(greater(size, 1.5), before * (1.5 / (size + 1e-7)), before);
    CHECK(allclose(narrow(after, 0, 0, 40), narrow(cut, 0, 0, 40)));
    CHECK(allclose(narrow(after, 0, 40, 10), narrow(before, 0, 40, 10), 0, 0));
  }
  CHECK_THROWS_AS(nn::Embedding(3, 2, nn::EmbeddingOptions{.max_norm = 0}), ValueError);
}

TEST_CASE("from PyTorch: without a momentum running statistics are means of all batches") {
  nn::BatchNorm1d layer(1, {.momentum = std::nullopt}), falling(1);
  const std::vector<std::vector<float>> batches{{1, 3}, {10, 30}, {5, 7}};
  for (std::size_t i = 1; i <= batches.size(); ++i) {
    const Tensor x = Tensor::from(batches[i - 1], {2, 1});
    falling.momentum = 1.0 / static_cast<double>(i);
    CHECK(allclose(layer(x), falling(x), 0, 0));
  }
  check_values(layer.running_mean.tensor(), {(2 + 20 + 6) / 3.0F});
  check_values(layer.running_var.tensor(), {(2 + 200 + 2) / 3.0F});
  CHECK(layer.num_batches_tracked.tensor().item<std::int64_t>() == 3);
  layer.eval();
  check_values(layer(full({1, 1}, 28 / 3.0F)).detach(), {0});
}

TEST_CASE("from PyTorch: a batch norm without running statistics uses the batch's in eval mode too") {
  nn::BatchNorm1d layer(1, {.track_running_stats = false});
  const Tensor x = Tensor::from<float>({1, 3}, {2, 1});
  check_values(layer(x).detach(), {-1, 1}, 1e-4);
  layer.eval();
  check_values(layer(x).detach(), {-1, 1}, 1e-4);
  CHECK(layer.named_buffers().empty());
  CHECK(layer.state_dict().size() == 2);
  nn::BatchNorm1d copy = layer.clone();
  copy.to(f64);
  check_values(to(copy(to(x, f64)).detach(), f32), {-1, 1}, 1e-4);
}

TEST_CASE("from PyTorch: logcumsumexp") {
  const Tensor x = Tensor::from<float>({{0, 500}, {1, 501}, {-1, 499}});
  const double e = std::exp(1.0);
  std::vector<float> expected;
  for (const double sum : {1.0, 1 + e, 1 + e + 1 / e})
    for (const double shift : {0.0, 500.0}) expected.push_back(static_cast<float>(std::log(sum) + shift));
  check_values(logcumsumexp(x, 0), expected);
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
