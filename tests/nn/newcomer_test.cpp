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

#include "nn/init.h"
#include "nn/layers.h"
#include "nn/optimizer.h"
#include "runtime/ops.h"
#include "tests/catch.h"

using namespace std;
using namespace sherd;

TEST_CASE("newcomer: the ops stand beside the standard library's names") {
  Tensor x = randn({3, 4}), y = x * 2 + 1;
  y += 1;
  y[0] = 3;
  y[y > 2] = 1.5;
  Tensor z = exp(y) + log(abs(y) + 1) + sqrt(square(y)) + pow(abs(y), 2) + tanh(y) + sin(x) + clamp(x, 0, 1) +
             floor(x) + log1p(abs(x)) + erf(x);
  z = where(x > 0, x, 0);
  ostringstream out;
  out << z << sum(z) << mean(z) << norm(z) << max(z, 0).values << min(x, 1).indices << sort(x, 0).values
      << argmax(x, 0) << cat({x, y}) << stack({x, y}) << flip(x, {0}) << index(x, {1}) << var(x) << div(x, 2)
      << fill_(y, 1) << gather(x, 0, zeros({1, 4}, {i64})) << round(2.5);
  CHECK(out.str().find("tensor([[") != string::npos);
  for (const Tensor& row : unbind(x)) CHECK(row.size(0) == 4);
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
