// What a program writes on its first day compiles beside `using namespace std`, and does what it says.
#include <algorithm>
#include <any>
#include <cmath>
#include <complex>
#include <functional>
#include <iostream>
#include <numeric>
#include <ranges>
#include <sstream>
#include <valarray>

#include "autograd/autograd.h"
#include "nn/init.h"
#include "nn/layers.h"
#include "nn/optimizer.h"
#include "nn/recurrent.h"
#include "runtime/apply.h"
#include "runtime/elementwise.h"
#include "runtime/ops.h"
#include "runtime/ops/arithmetic.h"
#include "runtime/ops/relu.h"
#include "tests/catch.h"

using namespace std;
using namespace sherd;

TEST_CASE("newcomer: the ops stand beside the standard library's names") {
  Tensor x = randn({3, 4}), y = x * 2 + 1;
  y += 1;
  y[0] = 3;
  y[y > 2] = 1.5;
  Tensor z = exp(y) + log(abs(y) + 1) + sqrt(square(y)) + pow(abs(y), 2) + tanh(y) + sin(x) + clamp(x, 0, 1) +
             floor(x) + log1p(abs(x)) + erf(x) + round(x) + trunc(x) + ceil(x) + tan(x) + atan2(x, y) +
             remainder(x, 2) + exp2(x) + log2(abs(x)) + expm1(x) + sinh(x) + asinh(x) +
             where(isnan(x), 0, x) + where(isinf(x), 0, x);
  z = where(x > 0, x, 0);
  ostringstream out;
  out << z << sum(z) << mean(z) << norm(z) << max(z, 0).values << min(x, 1).indices << sort(x, 0).values
      << argmax(x, 0) << cat({x, y}) << stack({x, y}) << flip(x, {0}) << index(x, {1}) << var(x) << div(x, 2)
      << fill_(y, 1) << gather(x, 0, zeros({1, 4}, {i64})) << round(2.5);
  CHECK(out.str().find("tensor([[") != string::npos);
  for (const Tensor& row : unbind(x)) CHECK(row.size(0) == 4);
}

TEST_CASE("newcomer: a state goes to a recurrent layer in braces") {
  const Tensor x = randn({5, 2, 3}), h = randn({1, 2, 4}), c = randn({1, 2, 4});
  nn::Lstm lstm(3, 4);
  const auto equal = [](const Tensor& a, const Tensor& b) { return all(a == b).item<bool>(); };
  const auto [y, state] = lstm(x, {h, c});
  const nn::RecurrentState same{h, c};
  CHECK(equal(lstm(x, same).y, y));
  CHECK(equal(lstm(x, {}).y, lstm(x).y));
  const auto [rest, after] = lstm(x, {state.hidden, state.cell});
  CHECK(equal(lstm(x, state).y, rest));
  const nn::Gru gru(3, 4);
  nn::Rnn rnn(3, 4);
  CHECK(gru(x, {h}).state.hidden.shape() == Shape{1, 2, 4});
  CHECK(rnn(x, {h}).y.shape() == Shape{5, 2, 4});
  CHECK_THROWS_AS(gru(x, {h, c}), ValueError);
}

TEST_CASE("newcomer: members of layers go to initialisers and optimizers, and states are asked by name") {
  nn::Linear layer(3, 4);
  nn::init::normal_(layer.weight, 5, 0.1);
  CHECK(mean(layer.weight).item() > 4);
  layer.weight.set_requires_grad(false);
  CHECK_FALSE(layer.weight.requires_grad());
  CHECK_FALSE(layer.parameters()[0].requires_grad());
  const vector<nn::Parameter> both{layer.weight, layer.bias};
  nn::Adam adam(both);
  CHECK(adam.parameters(0) == layer.parameters());

  nn::StateDict state = layer.state_dict();
  CHECK(state.contains("weight"));
  CHECK_FALSE(state.contains("weigh"));
  CHECK(state.at("bias").shape() == Shape{4});
  const string text = test::message_of<ValueError>([&] { (void)state.at("nothing"); });
  CHECK(text.find("nothing") != string::npos);
  CHECK(text.find('\n') == string::npos);

  state.erase(state.begin());
  state.emplace_back("extra", zeros({1}));
  state.emplace_back("another", zeros({1}));
  CHECK_THROWS_AS(layer.load_state_dict(state), ValueError);
  const nn::Mismatch left = layer.load_state_dict(state, nn::Strict::no);
  CHECK(left.missing == vector<string>{"weight"});
  CHECK(left.unknown == vector<string>{"extra", "another"});
  const nn::Mismatch none = layer.load_state_dict(layer.state_dict());
  CHECK(none.missing.empty());
  CHECK(none.unknown.empty());
}

namespace {

/// A module whose forward calls ops by names that modules have too.
struct Casting final : nn::Layer<Casting> {
  nn::Linear inner{2, 2};
  Tensor forward(const Tensor& x) const { return clone(to(to(inner(x), f64), Device::cpu(1))); }
  void visit(auto&& on) { on("inner", inner); }
};

/// A module that holds another one behind a pointer, which may be null.
struct Held final : nn::Layer<Held> {
  unique_ptr<nn::Linear> inner = make_unique<nn::Linear>(2, 2), none;
  Tensor forward(const Tensor& x) const { return (*inner)(x); }
  void visit(auto&& on) {
    on("inner", inner);
    on("none", none);
  }
};

}  // namespace

TEST_CASE("newcomer: within a forward to and clone are the ops, and outside the module's") {
  Casting net;
  const Tensor y = net(ones({1, 2}));
  CHECK(y.dtype() == f64);
  CHECK(y.device() == Device::cpu(1));
  CHECK(all(to(net.inner(ones({1, 2})), f64) == to(y, Device::cpu())).item<bool>());
  net.to(f64);
  CHECK(net.clone().inner.weight.tensor().dtype() == f64);
}

TEST_CASE("newcomer: gradients with respect to a list of tensors, and their check") {
  const Tensor x = randn({3}, {f64}).requires_grad_(), z = randn({3}, {f64}).requires_grad_();
  const vector<Tensor> slopes = grad(sum(square(x) * z), {x, z}, {}, {.create_graph = true});
  CHECK(all(slopes[0] == 2 * x * z).item<bool>());
  CHECK(all(grad(sum(slopes[0]), {z})[0] == 2 * x).item<bool>());
  CHECK(gradcheck([](span<const Tensor> in) { return square(in[0]) * in[1]; }, {x, z}) < 1e-6);
}

TEST_CASE(
    "newcomer: a member behind a pointer is listed, moved and loaded, and the module says why it has no "
    "clone") {
  Held held;
  CHECK(held.state_dict().contains("inner.weight"));
  CHECK(held.parameter_count() == 6);
  held.to(f64);
  CHECK(held(ones({1, 2}, {f64})).dtype() == f64);
  const string text = test::message_of<StateError>([&] { (void)held.clone_module(); });
  CHECK(text.find("Held") != string::npos);
}

TEST_CASE("newcomer: functions stand among the layers of a Sequential, and go with its clones") {
  const auto twice = [](const Tensor& x) { return x * 2; };
  nn::Sequential net(nn::Linear(3, 3), twice, nn::Tanh(), nn::Flatten(0));
  CHECK(net.size() == 4);
  nn::Sequential copy = net.clone();
  const Tensor x = randn({2, 3});
  const Tensor y = net(x);
  CHECK(y.shape() == Shape{6});
  CHECK(all(y == copy(x)).item<bool>());
  net.append([](const Tensor& t) { return sum(t); });
  CHECK(net(x).shape() == Shape{});
}

TEST_CASE("newcomer: a recurrent layer goes on from its state, and a batch may come first") {
  const Tensor x = randn({6, 2, 3});
  const auto check = [&](const auto& layer, const auto& batch_first) {
    const nn::RecurrentResult whole = layer(x), begin = layer(x[Slice{0, 4}]),
                              end = layer(x[Slice{4}], begin.state);
    CHECK(amax(abs(cat({begin.y, end.y}) - whole.y)).item() < 1e-5);
    CHECK(amax(abs(end.state.hidden - whole.state.hidden)).item() < 1e-5);
    CHECK(all(whole.state.hidden[-1] == whole.y[-1]).template item<bool>());
    CHECK(batch_first(transpose(x, 0, 1)).y.shape() == Shape{2, 6, 4});
    CHECK_NOTHROW(mul_(layer(x).y, 2.0));
    CHECK_NOTHROW(mul_(batch_first(transpose(x, 0, 1)).y, 2.0));
    CHECK_THROWS_AS(layer(x[0]), ShapeError);
    CHECK_THROWS_AS(layer(x, nn::RecurrentState{zeros({2, 2, 4}), {}}), ShapeError);
  };
  const nn::RecurrentOptions first{.batch_first = true};
  check(nn::Rnn(3, 4), nn::Rnn(3, 4, first));
  check(nn::Lstm(3, 4), nn::Lstm(3, 4, first));
  check(nn::Gru(3, 4), nn::Gru(3, 4, first));
  CHECK_THROWS_AS(nn::Gru(0, 4), ValueError);
  nn::Lstm deep(3, 4, {.layers = 2, .dropout = 0.5});
  CHECK(deep(x).state.cell.shape() == Shape{2, 2, 4});
  deep.eval();
  CHECK(all(deep(x).y == deep.clone()(x).y).item<bool>());
  // The way back is the way there of the reversed sequence, with weights of its own.
  const nn::Gru both(3, 4, {.bidirectional = true});
  nn::Gru back(3, 4);
  nn::StateDict reversed;
  for (const auto& [name, t] : both.state_dict())
    if (name.ends_with("_reverse")) reversed.emplace_back(name.substr(0, name.size() - 8), t);
  back.load_state_dict(reversed);
  const nn::RecurrentResult given = both(x), alone = back(flip(x, {0}));
  CHECK(given.y.shape() == Shape{6, 2, 8});
  CHECK(all(flip(narrow(given.y, -1, 4, 4), {0}) == alone.y).item<bool>());
  CHECK(all(given.state.hidden[1] == alone.state.hidden[0]).item<bool>());
}

namespace {
/// Has what a layer has, but `visit` forgets the second one.
struct Forgets : nn::Layer<Forgets> {
  nn::Linear a{2, 3}, b{3, 2};
  Tensor forward(const Tensor& x) const { return b(a(x)); }
  void visit(auto&& on) { on("a", a); }
};
}  // namespace

TEST_CASE("newcomer: parameters and parts go where tensors go") {
  const nn::Linear layer(3, 2);
  const Tensor x = randn({4, 3});
  CHECK(all(apply(ops::Relu{}, layer.weight) == relu(layer.weight)).item<bool>());
  CHECK(all(apply(ops::Relu{}, x[0]) == relu(x[0])).item<bool>());
  CHECK(
      all(apply(ops::Mul{}, layer.weight, x[{Slice{0, 2}}]) == layer.weight * x[{Slice{0, 2}}]).item<bool>());
  CHECK(all(apply_many(ops::Relu{}, {x})[0] == relu(x)).item<bool>());
  const vector<Tensor> grads = grad(sum(square(layer(x))), layer.parameters());
  REQUIRE(grads.size() == 2);
  CHECK(grads[0].shape() == layer.weight.shape());
  CHECK(amax(abs(grads[1] - sum(2 * layer(x), {0}))).item() < 1e-5);
  CHECK(all(grad(sum(layer(x)), {layer.bias})[0] == 4).item<bool>());
}

TEST_CASE("newcomer: a range of numbers that are no integers is of floats") {
  CHECK(arange(0, 1, 0.25).to_vector<float>() == vector<float>{0, 0.25f, 0.5f, 0.75f});
  CHECK(arange(0.5, 3).dtype() == DType::f32);
  CHECK(arange(3).dtype() == DType::i64);
  const DefaultOptions scope({.dtype = DType::f64});
  CHECK(arange(0, 1, 0.25).dtype() == DType::f64);
}

TEST_CASE("newcomer: a layer that visit forgets is named") {
  Forgets net;
  CHECK_THROWS_AS(nn::Sgd(net.parameters(), {.lr = 1}), StateError);
}

TEST_CASE("newcomer: what is asked for by the names of the field") {
  const Tensor x = Tensor::from<float>({3, 1, 2, 6, 5, 4}, {2, 3});
  CHECK(topk(x, 2, 1, Order::ascending).values.to_vector<float>() == vector<float>{1, 2, 4, 5});
  CHECK(topk(x, 1, 0).indices.to_vector<int64_t>() == vector<int64_t>{1, 1, 1});
  CHECK_THROWS_AS(topk(x, 3, 0), ShapeError);
  CHECK_THROWS_AS(topk(x, 3, 0, Order::ascending), ShapeError);
  CHECK(squeeze(ones({1, 3, 1, 2, 1})).shape() == Shape{3, 2});
  CHECK(squeeze(ones({1, 1})).shape() == Shape{});
  CHECK(full_like(x, 7).to_vector<float>() == vector<float>(6, 7));
  const float inf = numeric_limits<float>::infinity(), nan = numeric_limits<float>::quiet_NaN();
  CHECK(allclose(x, x + 1e-6f));
  CHECK_FALSE(allclose(x, x + 1e-3f));
  CHECK(allclose(full({2}, inf), full({2}, inf)));
  CHECK_FALSE(allclose(ones({2}), full({2}, inf)));
  CHECK_FALSE(allclose(full({2}, -inf), full({2}, inf)));
  CHECK_FALSE(allclose(full({2}, nan), full({2}, nan)));
  CHECK(allclose(arange(3), arange(3)));
  CHECK_FALSE(allclose(zeros({2}), full({2}, 1e-7)));
  CHECK(allclose(zeros({2}), full({2}, 1e-7), 0, 1e-6));
  CHECK_THROWS_AS(allclose(x, ones({4})), ShapeError);
  const int64_t big = int64_t{1} << 60, least = numeric_limits<int64_t>::min();
  CHECK_FALSE(allclose(full({2}, big, {DType::i64}), full({2}, big + 1, {DType::i64}), 0, 0));
  CHECK_FALSE(allclose(full({2}, least, {DType::i64}), full({2}, ~least, {DType::i64}), 0, 5));
  CHECK_FALSE(allclose(full({2}, 3e38f), full({2}, -3e38f), 1.5));
}
