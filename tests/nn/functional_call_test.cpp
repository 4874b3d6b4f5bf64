// Forwards with other tensors in place of parameters, and layers in place of others.
#include "nn/functional_call.h"

#include "collectives/world.h"
#include "nn/compile.h"
#include "nn/gpt.h"
#include "nn/layers.h"
#include "shard/fully_shard.h"
#include "tests/message_of.h"
#include "tests/ranks.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::nn;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;

TEST_CASE(
    "functional_call computes with the tensors that it is given, and sends gradients to their sources") {
  manual_seed(1);
  Linear layer(4, 3);
  const Tensor x = randn({2, 4}, {}), source = randn({3, 4}, {}).requires_grad_(true), bias = randn({3}, {});
  const Tensor own = clone(layer.weight.data());
  const Tensor y = functional_call(layer, {{"weight", mul(source, 2)}, {"bias", bias}}, x);
  CHECK(same_bits(y.detach(), linear(x, mul(source, 2), bias).detach()));
  sum(y).backward();
  CHECK(source.grad().defined());
  CHECK(!layer.weight.grad().defined());
  CHECK(same_bits(layer.weight.data(), own));
  CHECK(layer.weight.requires_grad());
  sum(functional_call(layer, {}, x)).backward();
  CHECK(layer.weight.grad().defined());
}

TEST_CASE("functional_call replaces a tied parameter in all of its places, and buffers") {
  manual_seed(2);
  Gpt model({.layers = 1, .heads = 2, .width = 8, .context = 8, .vocab = 16, .tie_word_embeddings = true});
  Gpt other({.layers = 1, .heads = 2, .width = 8, .context = 8, .vocab = 16, .tie_word_embeddings = true});
  const Tensor tokens = randint(0, 16, {2, 5}), before = model(tokens).detach();
  CHECK(same_bits(functional_call(model, other.state_dict(), tokens).detach(), other(tokens).detach()));
  CHECK(same_bits(model(tokens).detach(), before));
  const Tensor table = other.tok.weight.data();
  CHECK(same_bits(functional_call(model, {{"head.weight", table}}, tokens).detach(),
                  functional_call(model, {{"tok.weight", table}}, tokens).detach()));
  CHECK(model.tok.weight.object() == model.head.weight.object());

  BatchNorm1d norm(3);
  norm.eval();
  const Tensor x = randn({4, 3}, {}), mean = full({3}, 2);
  const Tensor y = functional_call(norm, {{"running_mean", mean}}, x).detach();
  CHECK(distance(y, norm(sub(x, 2)).detach()) < 1e-5);
}

TEST_CASE("functional_call gives members back when forward throws, and refuses what it cannot replace") {
  Linear layer(4, 3);
  const Tensor x = ones({2, 4}), weight = ones({3, 4});
  const Parameter own = layer.weight.object();
  CHECK_THROWS_AS(functional_call(layer, {{"weight", weight}}, ones({2, 5})), ShapeError);
  CHECK(layer.weight.object() == own);
  const auto call = [&](const StateDict& values) { return functional_call(layer, values, x); };
  CHECK_THROWS_WITH(call({{"weights", weight}}), ContainsSubstring("the Linear has no 'weights' (1 unknown"));
  CHECK_THROWS_WITH(call({{"weight", x}}),
                    ContainsSubstring("'weight' has shape (2, 4), the module takes (3, 4)"));
  CHECK_THROWS_WITH(call({{"weight", weight}, {"weight", weight}}), ContainsSubstring("is there twice"));
  CHECK_THROWS_WITH(call({{"weight", Tensor()}}), ContainsSubstring("empty handle"));
  CHECK(layer.weight.object() == own);
  nn::compile(layer);
  CHECK_THROWS_WITH(call({{"weight", weight}}), ContainsSubstring("call uncompile first"));
  nn::uncompile(layer);
  Gpt tied({.layers = 1, .heads = 1, .width = 4, .context = 4, .vocab = 4});
  CHECK_THROWS_WITH(functional_call(tied, {{"tok.weight", ones({4, 4})}, {"head.weight", zeros({4, 4})}},
                                    randint(0, 4, {1, 2})),
                    ContainsSubstring("is tied to another name"));
  CHECK_NOTHROW(run_ranks(2, [](World&) {
    Linear sharded(4, 2);
    shard::fully_shard(sharded);
    expect(message_of<StateError>([&] {
             functional_call(sharded, {{"weight", ones({2, 4})}}, ones({1, 4}));
           }).find("is sharded") != std::string::npos,
           "a sharded module was called");
  }));
}

TEST_CASE("a layer of a made model is replaced in its list, or assigned to its member") {
  manual_seed(3);
  Sequential net{Linear(4, 8), Relu(), Linear(8, 2)};
  const Tensor x = randn({3, 4}, {});
  Linear& head = net.replace(2, Linear(8, 5));
  CHECK(net(x).shape() == Shape{3, 5});
  CHECK(&head == &net[2]);
  net.replace(1, Gelu());
  CHECK(net[1].type_name() == "Gelu");
  CHECK(net.named_parameters().size() == 4);
  CHECK_THROWS_WITH(net.replace(3, Relu()), ContainsSubstring("there is no layer 3"));
  ModuleList<Linear> list;
  list.emplace_back(2, 2);
  list.replace(0, Linear(2, 7));
  CHECK(list[0].weight.shape() == Shape{7, 2});
  Gpt model({.layers = 1, .heads = 2, .width = 8, .context = 8, .vocab = 16, .tie_word_embeddings = false});
  model.head = Linear(8, 3, {.bias = Bias::no});
  CHECK(model(randint(0, 16, {1, 4})).shape() == Shape{1, 4, 3});
  CHECK_NOTHROW(run_ranks(2, [](World&) {
    Sequential sharded{Linear(4, 4), Relu()};
    shard::fully_shard(sharded);
    expect(message_of<StateError>([&] { sharded.replace(1, Gelu()); }).find("before fully_shard") !=
               std::string::npos,
           "a sharded list took a layer");
  }));
}
