// Where in a model an error arose, and what other messages of layers, losses and scalers tell.
#include "autograd/autograd.h"
#include "nn/gpt.h"
#include "nn/grad_scaler.h"
#include "nn/hooks.h"
#include "nn/llama.h"
#include "nn/optimizer.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "tests/catch.h"

using namespace sherd;
using namespace sherd::nn;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::EndsWith;

namespace {

struct Own final : Layer<Own> {
  ModuleList<Sequential> layers;
  Linear alone{4, 4};
  explicit Own(std::int64_t width) {
    for (int i = 0; i < 3; ++i) layers.emplace_back(Sequential{Linear(4, 4), Linear(i == 2 ? width : 4, 4)});
  }
  Tensor forward(const Tensor& x) const {
    Tensor y = alone(x);
    for (std::size_t i = 0; i < layers.size(); ++i) y = layers[i](y);  // past the list that holds them
    return y;
  }
  void visit(auto&& on) {
    on("layers", layers);
    on("alone", alone);
  }
};
struct Outer final : Layer<Outer> {
  Own own;
  explicit Outer(std::int64_t width) : own(width) {}
  Tensor forward(const Tensor& x) const { return own(x); }
  void visit(auto&& on) { on("own", own); }
};

struct Silent final : ModuleObserver {};

}  // namespace

TEST_CASE("messages: an error of a shape or dtype ends with the path of the layer that it comes from") {
  for (const bool observed : {false, true}) {
    Own own(3);
    Outer outer(3);
    Silent observer;
    std::vector<Subscription> subscriptions;
    if (observed)
      for (Module* root : {static_cast<Module*>(&own), static_cast<Module*>(&outer)})
        for (const NamedModule& m : root->named_modules())
          subscriptions.push_back(m.module->observe(observer));
    CHECK_THAT(message_of<ShapeError>([&] { own(ones({2, 4})); }), EndsWith(" (in layers.2.1)"));
    CHECK_THAT(message_of<ShapeError>([&] { outer(ones({2, 4})); }), EndsWith(" (in own.layers.2.1)"));
    CHECK_THAT(message_of<ShapeError>([&] { outer(ones({2, 5})); }), EndsWith(" (in own.alone)"));
    CHECK_THAT(message_of<DTypeError>([&] { outer(ones({2, 4}, {f64})); }), EndsWith(" (in own.alone)"));
    // A layer by itself has no path.
    CHECK_THAT(message_of<ShapeError>([&] { own.alone(ones({2, 5})); }), !ContainsSubstring("(in "));
    // A model that throws, and is called again, says the same.
    CHECK_THAT(message_of<ShapeError>([&] { outer(ones({2, 4})); }), EndsWith(" (in own.layers.2.1)"));
  }
  Gpt gpt({.layers = 2, .heads = 2, .width = 8, .context = 4, .vocab = 11});
  gpt.blocks[1].up = Linear(9, 32);
  CHECK_THAT(message_of<ShapeError>([&] { gpt(randint(0, 11, {1, 4})); }),
             EndsWith(" (in blocks.1.up)") || EndsWith(" (in blocks.1)"));
  Llama llama({.vocab_size = 11,
               .hidden_size = 8,
               .intermediate_size = 12,
               .num_hidden_layers = 2,
               .num_attention_heads = 2});
  llama.model.layers[1].self_attn.q_proj = Linear(9, 8, {.bias = Bias::no});
  CHECK_THAT(message_of<ShapeError>([&] { llama(randint(0, 11, {1, 4})); }),
             EndsWith(" (in model.layers.1.self_attn.q_proj)"));
}
