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

TEST_CASE("messages: a product of mixed dtypes names them as everything does, and its op") {
  for (const DType a : {f64, f32, f16, bf16})
    for (const DType b : {f64, f32, f16, bf16}) {
      if (a == b) continue;
      const Tensor x = ones({2, 3}, {a}), w = ones({3, 3}, {b});
      const std::string both = fmt::format("but got {} and {}", a, b);
      const auto begins = ContainsSubstring("mat1 and mat2 must have the same dtype, " + both);
      CHECK_THAT(message_of<DTypeError>([&] { matmul(x, w); }), begins && ContainsSubstring("matmul"));
      CHECK_THAT(message_of<DTypeError>([&] { matmul(ones({2, 2, 3}, {a}), w); }),
                 begins && ContainsSubstring("matmul"));
      CHECK_THAT(message_of<DTypeError>([&] { linear(x, w); }), begins && ContainsSubstring("linear"));
      CHECK_THAT(message_of<DTypeError>([&] { linear(x, ones({3, 3}, {a}), ones({3}, {b})); }),
                 ContainsSubstring(fmt::format("linear: input of {} and bias of {}", a, b)));
    }
}

TEST_CASE("messages: losses of shapes that would broadcast are refused, and a number is taken") {
  using Loss = std::function<Tensor(const Tensor&, const Tensor&)>;
  const std::pair<const char*, Loss> losses[] = {
      {"mse_loss", [](auto& x, auto& t) { return mse_loss(x, t); }},
      {"l1_loss", [](auto& x, auto& t) { return l1_loss(x, t); }},
      {"huber_loss", [](auto& x, auto& t) { return huber_loss(x, t); }},
      {"smooth_l1_loss", [](auto& x, auto& t) { return smooth_l1_loss(x, t); }},
      {"bce_with_logits", [](auto& x, auto& t) { return bce_with_logits(x, t); }},
      {"bce_loss", [](auto& x, auto& t) { return bce_loss(x, t); }},
      {"kl_div", [](auto& x, auto& t) { return kl_div(x, t); }}};
  for (const auto& [name, loss] : losses) {
    INFO(name);
    for (const auto& [x, t] : std::vector<std::pair<Shape, Shape>>{
             {{4, 1}, {4}}, {{4}, {4, 1}}, {{1}, {4}}, {{2, 3}, {3}}, {{2, 3}, {1, 3}}, {{4}, {1}}})
      CHECK_THAT(message_of<ShapeError>([&, &x = x, &t = t] { loss(full(x, 0.5), full(t, 0.5)); }),
                 ContainsSubstring(name) && ContainsSubstring("reshape one"));
    CHECK_NOTHROW(loss(full({4}, 0.5), full({}, 0.5)));
    CHECK_NOTHROW(loss(full({2, 1}, 0.5), full({2, 1}, 0.5)));
  }
}

TEST_CASE("messages: a state of an optimizer of other groups is refused with the way out") {
  Linear a(2, 3), b(3, 2);
  const auto stepped = [&](auto optimizer) {
    for (Module* m : {static_cast<Module*>(&a), static_cast<Module*>(&b)})
      for (Parameter& p : m->parameters()) p.set_grad(ones(p.shape()));
    optimizer->step();
    return optimizer;
  };
  const auto two = [&] {
    return stepped(std::make_unique<AdamW>(std::vector<ParamGroup>{{a.parameters()}, {b.parameters()}}));
  };
  const auto one = [&] { return stepped(std::make_unique<AdamW>(a.parameters())); };
  const auto sgd = [&] {
    return stepped(std::make_unique<Sgd>(a.parameters(), SgdOptions{.momentum = 0.5}));
  };
  for (const auto& message : {message_of<ValueError>([&] { two()->load_state_dict(one()->state_dict()); }),
                              message_of<ValueError>([&] { one()->load_state_dict(two()->state_dict()); }),
                              message_of<ValueError>([&] { one()->load_state_dict(sgd()->state_dict()); }),
                              message_of<ValueError>([&] { sgd()->load_state_dict(one()->state_dict()); })})
    CHECK_THAT(message,
               ContainsSubstring("other groups") && ContainsSubstring("shard::full_optimizer_state"));
}

TEST_CASE("messages: gradcheck varies a module's parameters, and puts them back") {
  Sequential net{Linear(3, 4), Tanh(), Linear(4, 2)};
  net.to(f64);
  const Tensor x = randn({5, 3}, {f64});
  for (const NamedParameter& p : net.named_parameters()) {
    INFO(p.name);
    const Tensor leaf = p.parameter.local();
    const Tensor before = clone(leaf.detach());
    CHECK(gradcheck([&](auto) { return net(x); }, {leaf}) < 1e-7);
    CHECK(leaf.to_vector<double>() == before.to_vector<double>());
    // A gradient that is wrong by half is found there too.
    const auto half = [&](auto) {
      const Tensor y = net(x);
      return y * 0.5 + y.detach() * 0.5;
    };
    CHECK(gradcheck(half, {leaf}) > 1e-3);
  }
}

TEST_CASE("messages: a scaler gives its scale as a tensor or as a number, by names that say which") {
  for (const Scaling scaling : {Scaling::on, Scaling::off}) {
    GradScaler scaler({.init_scale = 8, .scaling = scaling});
    const Tensor tensor = scaler.scale_tensor();
    const double number = scaler.get_scale();
    CHECK(number == (scaling == Scaling::on ? 8 : 1));
    CHECK(tensor.item() == number);
  }
}
