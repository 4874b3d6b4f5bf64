#include "nn/compile.h"

#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <thread>

#include "autograd/autograd.h"
#include "nn/gpt.h"
#include "nn/hooks.h"
#include "nn/llama.h"
#include "nn/optimizer.h"
#include "nn/recurrent.h"
#include "nn/transformer.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::nn;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;

namespace {

bool equal_bits(const Tensor& a, const Tensor& b) {
  if (a.defined() != b.defined()) return false;
  if (!a.defined()) return true;
  if (a.shape() != b.shape() || a.dtype() != b.dtype()) return false;
  const Tensor x = contiguous(a.detach()), y = contiguous(b.detach());
  return std::memcmp(x.raw(), y.raw(), static_cast<std::size_t>(x.numel() * size_of(x.dtype()))) == 0;
}

void check_equal(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    INFO("tensor " << i);
    CHECK(equal_bits(a[i], b[i]));
  }
}

/// Gradients and buffers of a module.
std::vector<Tensor> state_of(const Module& module) {
  std::vector<Tensor> all;
  for (const Parameter& p : module.parameters()) {
    all.push_back(clone(p.data()));
    all.push_back(p.grad());
  }
  for (const NamedBuffer& b : module.named_buffers()) all.push_back(clone(b.tensor.detach()));
  return all;
}

/// A step of `module` on tensors that depend on `i` alone: its results, gradients and the inputs' gradients.
using Run = std::function<std::vector<Tensor>(Module& module, int i, DType dtype)>;

/// For a layer of one tensor of this shape.
Run on(Shape shape) {
  return [shape](Module& module, int i, DType dtype) {
    manual_seed(static_cast<std::uint64_t>(50 + i));
    Tensor x = to(randn(shape), dtype).requires_grad_();
    const Tensor y = module.call(x);
    const Tensor drawn = randn({2});
    if (module.training() || i % 2 == 0) sum(square(y)).backward();
    return std::vector<Tensor>{y.detach(), x.grad(), drawn};
  };
}

template <class M, class F>
Run with(F&& f) {
  return [f](Module& module, int i, DType dtype) {
    manual_seed(static_cast<std::uint64_t>(50 + i));
    return f(dynamic_cast<M&>(module), i, dtype);
  };
}

struct Case {
  std::string name;
  std::unique_ptr<Module> module;
  Run run;
};

template <class M>
void add(std::vector<Case>& cases, std::string name, M&& module, Run run) {
  cases.push_back(
      {std::move(name), std::make_unique<std::remove_cvref_t<M>>(std::move(module)), std::move(run)});
}

std::vector<Case> all_layers() {
  manual_seed(1);
  std::vector<Case> all;
  add(all, "Linear", Linear(8, 4), on({5, 8}));
  add(all, "Linear without bias", Linear(8, 4, {.bias = Bias::no}), on({2, 3, 8}));
  add(all, "Linear with an activation", Linear(8, 4), with<Linear>([](Linear& m, int, DType dtype) {
        const Tensor x = to(randn({5, 8}), dtype);
        const Tensor y = m(x, Activation::gelu), z = m(x, Activation::none);
        sum(sherd::add(square(y), z)).backward();
        return std::vector<Tensor>{y.detach(), z.detach()};
      }));
  add(all, "Linear with a residual", Linear(8, 8), with<Linear>([](Linear& m, int, DType dtype) {
        Tensor x = to(randn({5, 8}), dtype).requires_grad_();
        const Tensor y = m(x, x);
        sum(square(y)).backward();
        return std::vector<Tensor>{y.detach(), x.grad()};
      }));
  add(all, "Conv2d", Conv2d(3, 4, 3, {.padding = 1}), on({2, 3, 6, 6}));
  add(all, "Conv1d", Conv1d(3, 4, 3), on({2, 3, 9}));
  add(all, "ConvTranspose2d", ConvTranspose2d(3, 4, 2), on({2, 3, 4, 4}));
  add(all, "ConvTranspose1d", ConvTranspose1d(3, 4, 2), on({2, 3, 5}));
  add(all, "MaxPool2d", MaxPool2d(2), on({2, 3, 6, 6}));
  add(all, "AvgPool2d", AvgPool2d(2), on({2, 3, 6, 6}));
  add(all, "MaxPool1d", MaxPool1d(2), on({2, 3, 6}));
  add(all, "AvgPool1d", AvgPool1d(2), on({2, 3, 6}));
  add(all, "AdaptiveAvgPool2d", AdaptiveAvgPool2d(2), on({2, 3, 5, 5}));
  add(all, "AdaptiveMaxPool2d", AdaptiveMaxPool2d(2), on({2, 3, 5, 5}));
  add(all, "Upsample", Upsample(InterpolateOptions{.scale = 2}), on({1, 2, 3, 3}));
  add(all, "LayerNorm", LayerNorm(8), on({4, 8}));
  add(all, "GroupNorm", GroupNorm(2, 4), on({3, 4, 5}));
  add(all, "RmsNorm", RmsNorm(8), on({4, 8}));
  add(all, "BatchNorm1d", BatchNorm1d(4), on({6, 4}));
  add(all, "BatchNorm2d", BatchNorm2d(3), on({4, 3, 2, 2}));
  add(all, "BatchNorm2d with ReLU", BatchNorm2d(3, {.activation = Activation::relu}), on({4, 3, 2, 2}));
  add(all, "BatchNorm2d with a residual", BatchNorm2d(3, {.activation = Activation::relu}),
      with<BatchNorm2d>([](BatchNorm2d& m, int, DType dtype) {
        Tensor x = to(randn({4, 3, 5, 2}), dtype).requires_grad_();
        const Tensor y = m(mul(x, 2.0), x);
        sum(square(y)).backward();
        return std::vector<Tensor>{y.detach(), x.grad()};
      }));
  add(all, "BatchNorm2d, all batches", BatchNorm2d(3, {.momentum = {}}), on({4, 3, 2, 2}));
  add(all, "Dropout", Dropout(0.3), on({16, 8}));
  add(all, "Gelu", Gelu(), on({16, 8}));
  add(all, "Gelu by tanh", Gelu(GeluForm::tanh), on({16, 8}));
  add(all, "Relu", Relu(), on({16, 8}));
  add(all, "LeakyRelu", LeakyRelu(), on({16, 8}));
  add(all, "Elu", Elu(), on({16, 8}));
  add(all, "Selu", Selu(), on({16, 8}));
  add(all, "Softplus", Softplus(), on({16, 8}));
  add(all, "Silu", Silu(), on({16, 8}));
  add(all, "Sigmoid", Sigmoid(), on({16, 8}));
  add(all, "Tanh", Tanh(), on({16, 8}));
  add(all, "Softmax", Softmax(), on({16, 8}));
  add(all, "Identity", Identity(), on({16, 8}));
  add(all, "Flatten", Flatten(), on({4, 2, 3}));
  add(all, "Function", Function([](const Tensor& x) { return square(x); }), on({4, 2}));
  add(all, "GatedMlp", GatedMlp(8, 16), on({2, 4, 8}));
  add(all, "GatedMlp, fused", GatedMlp(8, 16, {}, Gate::gelu_tanh, Projections::fused), on({2, 4, 8}));
  add(all, "RmsNorm by one more", RmsNorm(8, 1e-5, {}, Gain::one_plus_weight), on({4, 8}));
  add(all, "Sequential", Sequential{Linear(8, 16), Gelu(), BatchNorm1d(16), Dropout(0.2), Linear(16, 4)},
      on({6, 8}));
  const auto tokens = [](auto& m, int, DType) {
    const Tensor x = randint(0, 11, {3, 5});
    const Tensor y = m(x);
    sum(square(y)).backward();
    return std::vector<Tensor>{y.detach()};
  };
  add(all, "Embedding", Embedding(11, 6), with<Embedding>(tokens));
  add(all, "Embedding with a largest norm", Embedding(11, 6, {.max_norm = 1.0}), with<Embedding>(tokens));
  add(all, "Gpt", Gpt({.layers = 2, .heads = 2, .width = 16, .context = 8, .vocab = 11, .dropout = 0.1}),
      with<Gpt>(tokens));
  add(all, "Llama",
      Llama(LlamaOptions{.vocab_size = 11,
                         .hidden_size = 16,
                         .intermediate_size = 24,
                         .num_hidden_layers = 2,
                         .num_attention_heads = 2}),
      with<Llama>(tokens));
  add(all, "MultiheadAttention", MultiheadAttention(8, 2, {.dropout = 0.1}),
      with<MultiheadAttention>([](MultiheadAttention& m, int, DType dtype) {
        Tensor x = to(randn({5, 2, 8}), dtype).requires_grad_();
        const Tensor y = m(x, x, x), z = m(y, x, x, Causal::yes);
        const Tensor hidden = greater(randn({2, 5}), ones({2, 5})),
                     late = m(y, x, x, {.key_padding_mask = hidden});
        sum(late).backward({}, true);
        sum(square(z)).backward();
        return std::vector<Tensor>{y.detach(), z.detach(), x.grad()};
      }));
  add(all, "Transformer",
      Transformer({.width = 8, .heads = 2, .encoder_layers = 1, .decoder_layers = 1, .feedforward = 16}),
      with<Transformer>([](Transformer& m, int, DType dtype) {
        Tensor src = to(randn({5, 2, 8}), dtype).requires_grad_(), tgt = to(randn({3, 2, 8}), dtype);
        const Tensor y = m(src, tgt, Causal::yes);
        sum(square(y)).backward();
        return std::vector<Tensor>{y.detach(), src.grad()};
      }));
  const auto recurrent = [](auto& m, int i, DType dtype) {
    Tensor x = to(randn({4, 2, 6}), dtype).requires_grad_();
    const RecurrentResult a = m(x);
    const RecurrentResult b = m(x, i % 2 == 0 ? a.state : RecurrentState{a.state.hidden.detach(), {}});
    sum(sherd::add(square(b.y), square(a.y))).backward();
    return std::vector<Tensor>{a.y.detach(), b.y.detach(), b.state.hidden.detach(),
                               b.state.cell.defined() ? b.state.cell.detach() : Tensor(), x.grad()};
  };
  add(all, "Rnn", Rnn(6, 8), with<Rnn>(recurrent));
  add(all, "Gru", Gru(6, 8), with<Gru>(recurrent));
  add(all, "Lstm", Lstm(6, 8, {.layers = 2, .dropout = 0.2, .bidirectional = true}), with<Lstm>(recurrent));
  return all;
}

}  // namespace

TEST_CASE("compile: every layer is equal to the bit to its eager clone, in training and out of it") {
  std::vector<CompileOptions> ways;
  for (const Executor executor : {Executor::replay, Executor::partition, Executor::fused})
    for (const MemoryBudget& memory : {MemoryBudget(), MemoryBudget::least()})
      ways.push_back({.executor = executor, .memory = memory});
  for (const DType dtype : {f32, bf16, f16})
    for (const CompileOptions& way : ways) {
      for (Case& c : all_layers()) {
        INFO(c.name << ", " << name_of(dtype) << ", executor " << static_cast<int>(way.executor) << ", least "
                    << way.memory.limited());
        c.module->to(dtype);
        const std::unique_ptr<Module> eager = c.module->clone_module();
        nn::compile(*c.module, way);
        for (int i = 0; i < 6; ++i) {
          INFO("call " << i);
          for (Module* m : {eager.get(), c.module.get()}) m->train(i < 4);
          if (i == 3)
            for (Module* m : {eager.get(), c.module.get()}) m->zero_grad();
          check_equal(c.run(*eager, i, dtype), c.run(*c.module, i, dtype));
          check_equal(state_of(*eager), state_of(*c.module));
        }
        CHECK(compiled_programs(*c.module).stats().hits >= 4);
        CHECK(compiled_programs(*c.module).stats().eager == 0);
      }
    }
}

namespace {

struct Small final : Layer<Small> {
  Linear in{6, 8}, out{8, 4};
  BatchNorm1d norm{8};
  Dropout dropout{0.25};
  int runs = 0;
  Tensor forward(const Tensor& x) {
    ++runs;
    return out(dropout(norm(gelu(in(x)))));
  }
  void visit(auto&& on) {
    on("in", in);
    on("out", out);
    on("norm", norm);
    on("dropout", dropout);
  }
};

Small small() {
  manual_seed(2);
  return Small();
}
Tensor batch(std::int64_t rows = 5) { return randn({rows, 6}); }

/// Counts what it hears.
struct Counting final : ModuleObserver {
  int before = 0, after = 0;
  void before_forward(Module&, std::span<Tensor* const>) override { ++before; }
  void after_forward(Module&, std::span<Tensor* const> outputs) override {
    ++after;
    *outputs[0] = mul(*outputs[0], 2);
  }
};

}  // namespace

TEST_CASE("compile: training with an optimizer gives the eager run's parameters and statistics") {
  Small eager = small(), compiled = small();
  nn::compile(compiled);
  const auto train = [](Small& model) {
    AdamW optimizer(model.parameters(), {.lr = 0.05});
    std::vector<Tensor> losses;
    for (int i = 0; i < 8; ++i) {
      manual_seed(static_cast<std::uint64_t>(i));
      const Tensor loss = mean(square(model(batch())));
      optimizer.zero_grad();
      loss.backward();
      optimizer.step();
      losses.push_back(loss.detach());
    }
    return losses;
  };
  check_equal(train(eager), train(compiled));
  check_equal(state_of(eager), state_of(compiled));
  CHECK(eager.runs == 8);
  CHECK(compiled.runs == 1);
  const CompileStats stats = compiled_programs(compiled).stats();
  CHECK(stats.programs == 1);
  CHECK(stats.graphs == 2);
  CHECK(stats.hits == 7);
}

TEST_CASE("compile: a module's guards: each gets a program of its own, and is right") {
  Small eager = small(), compiled = small();
  nn::compile(compiled);
  const auto step = [](Small& model) {
    manual_seed(7);
    const Tensor y = model(batch());
    if (y.requires_grad()) sum(square(y)).backward();
    return std::vector<Tensor>{y.detach()};
  };
  const auto meets = [&](std::string_view what, const std::function<void(Small&)>& change, int traced = 1) {
    INFO(what);
    change(eager);
    change(compiled);
    const int before = compiled.runs;
    for (int i = 0; i < 2; ++i) {
      check_equal(step(eager), step(compiled));
      check_equal(state_of(eager), state_of(compiled));
      CHECK(compiled.runs == before + traced);
    }
  };
  meets("at first", [](Small&) {});
  meets("eval of all", [](Small& m) { m.eval(); });
  meets("train again", [](Small& m) { m.train(); }, 0);
  meets("eval of one below", [](Small& m) { m.dropout.eval(); });
  meets("train of it", [](Small& m) { m.dropout.train(); }, 0);
  meets("freezing one", [](Small& m) { m.in.weight.set_requires_grad(false); });
  meets("thawing it", [](Small& m) { m.in.weight.set_requires_grad(true); }, 0);
  meets("freezing all", [](Small& m) { m.set_requires_grad(false); });
  meets("thawing all", [](Small& m) { m.set_requires_grad(true); }, 0);
  meets("other memory of a parameter", [](Small& m) { m.out.weight.set_data(mul(m.out.weight.data(), 2)); });
  meets("another parameter", [](Small& m) { m.out.bias = Parameter(ones({4})); });
  meets("other memory of a buffer", [](Small& m) { m.norm.running_mean.set(ones({8})); });
  meets("a buffer's values", [](Small& m) { fill_(m.norm.running_mean.tensor(), 3); }, 0);
  meets("a parameter's values", [](Small& m) { fill_(m.in.bias.data(), 3); }, 0);
  {
    const NoGrad guard;
    meets("without gradients", [](Small&) {});
  }
  meets("another dtype and back", [](Small& m) {
    m.to(DType::f64);
    m.to(DType::f32);
  });
}

namespace {
struct Overloaded final : Layer<Overloaded> {
  Tensor forward(const Tensor& t, int times) const { return mul(t, times); }
  Tensor forward(const Tensor& t, bool negated) const { return negated ? neg(t) : t; }
  void visit(auto&&) {}
};
}  // namespace

TEST_CASE("compile: arguments that are no tensors, and empty ones, are guarded") {
  manual_seed(1);
  Linear layer(4, 4);
  nn::compile(layer);
  const Tensor x = randn({3, 4});
  for (int i = 0; i < 2; ++i) {
    CHECK(equal_bits(layer(x, Activation::gelu), linear_gelu(x, layer.weight, layer.bias)));
    CHECK(equal_bits(layer(x, Activation::relu), relu(linear(x, layer.weight, layer.bias))));
    CHECK(equal_bits(layer(x, Activation::none), linear(x, layer.weight, layer.bias)));
    CHECK(equal_bits(layer(x), linear(x, layer.weight, layer.bias)));
    CHECK(equal_bits(layer(x, x), linear(x, layer.weight, layer.bias, x)));
  }
  CHECK(compiled_programs(layer).stats().programs == 5);
  CHECK(compiled_programs(layer).stats().hits == 5);

  Overloaded overloaded;
  nn::compile(overloaded);
  for (int i = 0; i < 2; ++i) {
    CHECK(equal_bits(overloaded(x, 1), x));
    CHECK(equal_bits(overloaded(x, true), neg(x)));
    CHECK(equal_bits(overloaded(x, 2), mul(x, 2)));
  }
}

TEST_CASE("compile: observers and hooks of the module run around programs; observed below, it runs eagerly") {
  Small eager = small(), compiled = small();
  nn::compile(compiled);
  const auto step = [](Small& model) {
    manual_seed(7);
    Tensor x = batch().requires_grad_();
    const Tensor y = model(x);
    sum(square(y)).backward();
    return std::vector<Tensor>{y.detach(), x.grad()};
  };
  {
    Counting a, b;
    const Subscription on_a = eager.observe(a), on_b = compiled.observe(b);
    int heard = 0;
    const auto hook = [&](std::span<const Tensor> in, std::span<const Tensor>) {
      ++heard;
      return std::vector<Tensor>{mul(in[0], 2)};
    };
    ModuleHook hook_a = register_full_backward_hook(eager, hook),
               hook_b = register_full_backward_hook(compiled, hook);
    for (int i = 0; i < 3; ++i) check_equal(step(eager), step(compiled));
    CHECK(a.before == 3);
    CHECK(b.before == 3);
    CHECK(b.after == 3);
    CHECK(heard == 6);
    CHECK(compiled.runs == 1);
  }
  {
    Counting a, b;
    const Subscription on_a = eager.norm.observe(a), on_b = compiled.norm.observe(b);
    const int before = compiled.runs;
    for (int i = 0; i < 3; ++i) check_equal(step(eager), step(compiled));
    CHECK(b.after == 3);
    CHECK(compiled.runs == before + 3);
  }
  check_equal(state_of(eager), state_of(compiled));
  Small strict = small();
  nn::compile(strict, {.full_graph = FullGraph::yes});
  Counting c;
  const Subscription on_c = strict.norm.observe(c);
  CHECK_THROWS_WITH(strict(batch()), ContainsSubstring("BatchNorm1d below is observed"));
}

namespace {

struct ByName final : nn::Layer<ByName> {
  nn::Linear linear{4, 4};
  Tensor forward(const std::map<std::string, Tensor>& in) const { return linear(in.at("x")); }
  void visit(auto&& on) { on("linear", linear); }
};

}  // namespace

TEST_CASE("compile: why a module's call runs eagerly is said, though none was a program") {
  ByName model;
  nn::compile(model);
  model(std::map<std::string, Tensor>{{"x", ones({1, 4})}});
  CHECK(nn::compiled_programs(model).stats().eager == 1);
  CHECK_THAT(nn::compiled_programs(model).text(),
             ContainsSubstring("runs eagerly: an argument whose values"));
}

TEST_CASE("compile: misuse of a module is named") {
  Small model = small();
  CHECK_THROWS_WITH(compiled_programs(model), ContainsSubstring("Small is not compiled"));
  nn::compile(model);
  CHECK_THROWS_WITH(nn::compile(model), ContainsSubstring("compiled already"));
  Small moved = std::move(model);
  moved(batch());
  moved(batch());
  CHECK(moved.runs == 1);
  CHECK_THROWS_AS(moved(randn({5, 7})), ShapeError);
  moved(batch());
  CHECK(moved.runs == 2);
  Gpt gpt({.layers = 1, .heads = 2, .width = 8, .context = 8, .vocab = 5});
  nn::compile(gpt, {.full_graph = FullGraph::yes});
  KeyValueCache cache;
  CHECK_THROWS_WITH(gpt(randint(0, 5, {1, 2}), cache), ContainsSubstring("no key can name"));
  cache.clear();
  Gpt loose({.layers = 1, .heads = 2, .width = 8, .context = 8, .vocab = 5});
  const Gpt eager = loose.clone();
  nn::compile(loose);
  KeyValueCache other;
  for (int i = 0; i < 3; ++i) {
    const Tensor token = randint(0, 5, {1, 1});
    CHECK(equal_bits(loose(token, cache), eager(token, other)));
  }
  CHECK(compiled_programs(loose).stats().hits == 0);
}

TEST_CASE("compile: a compiled step holds no more than the eager one") {
  const auto peak_of = [](std::optional<Executor> executor) {
    manual_seed(1);
    Gpt model({.layers = 4, .heads = 4, .width = 64, .context = 64, .vocab = 128});
    if (executor) nn::compile(model, {.executor = *executor});
    const Tensor tokens = randint(0, 128, {4, 64});
    std::int64_t peak = 0;
    for (int i = 0; i < 3; ++i) {
      model.zero_grad();
      Context::current().memory().reset_peak(DeviceType::cpu);
      cross_entropy(flatten(model(tokens), 0, 1), flatten(tokens)).backward();
      peak = Context::current().memory().peak(DeviceType::cpu);
    }
    return peak;
  };
  const std::int64_t eager = peak_of({});
  for (const Executor executor : {Executor::replay, Executor::partition, Executor::fused}) {
    compile_reset();
    const std::int64_t compiled = peak_of(executor);
    INFO(compiled << " bytes compiled, " << eager << " eagerly, executor " << static_cast<int>(executor));
    CHECK(static_cast<double>(compiled) <= 1.1 * static_cast<double>(eager));
  }
}

TEST_CASE("compile: random sequences of events are equal to the bit to eager ones") {
  const auto run = [](Small& model, std::uint64_t seed) {
    std::mt19937_64 choose(seed);
    const auto one_of = [&](std::uint64_t n) { return choose() % n; };
    std::vector<Tensor> seen, waiting;
    std::vector<std::string> errors;
    AdamW optimizer(model.parameters(), {.lr = 0.01});
    manual_seed(seed);
    for (int event = 0; event < 40; ++event) {
      switch (one_of(11)) {
        case 0:
          model.train(one_of(2) == 0);
          break;
        case 1:
          model.dropout.train(one_of(2) == 0);
          break;
        case 2:
          model.in.weight.set_requires_grad(one_of(2) == 0);
          break;
        case 3:
          model.out.set_requires_grad(one_of(2) == 0);
          break;
        case 4: {
          const NoGrad guard;
          seen.push_back(model(batch(3)));
          break;
        }
        case 5:
          waiting.clear();
          optimizer.step();
          break;
        case 6:
          waiting.clear();
          model.norm.bias.set_data(mul(model.norm.bias.data(), 0.5));
          break;
        case 7:
          optimizer.zero_grad();
          break;
        case 8:
          if (!waiting.empty()) {
            const std::size_t i = one_of(waiting.size());
            const bool retain = one_of(2) == 0;
            try {
              if (waiting[i].requires_grad()) sum(square(waiting[i])).backward({}, retain);
            } catch (const StateError& error) {
              errors.push_back(error.what());
              optimizer.zero_grad();  // eager code had added a part
            }
            if (!retain) waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(i));
          }
          break;
        default: {
          Tensor x = batch(static_cast<std::int64_t>(2 + one_of(3)));
          if (one_of(2) == 0) x = x.requires_grad_();
          waiting.push_back(model(x));
          seen.push_back(clone(waiting.back().detach()));
        }
      }
      seen.push_back(randn({1}));
    }
    for (const Tensor& t : state_of(model)) seen.push_back(t);
    return std::pair(seen, errors);
  };
  std::size_t hits = 0;
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    INFO("seed " << seed);
    Small eager = small(), compiled = small();
    nn::compile(compiled, {.executor = static_cast<Executor>(seed % 3), .programs = 1 + seed % 4});
    const auto [a, errors] = run(eager, seed);
    const auto [b, same_errors] = run(compiled, seed);
    check_equal(a, b);
    CHECK(errors == same_errors);
    hits += compiled_programs(compiled).stats().hits;
  }
  CHECK(hits > 60);
}

namespace {

/// Stands for what shards a module.
struct Keeper final : ModuleExtension {
  void change(const std::function<Tensor(const Tensor&)>&) override {}
  std::shared_ptr<ModuleExtension> clone(const ClonedParameters&) const override {
    return std::make_shared<Keeper>();
  }
};

}  // namespace

TEST_CASE(
    "compile: a module with a sharded one below is no full graph, and runs eagerly if that was sharded "
    "after") {
  Small model = small(), other = small();
  model.norm.extend(std::make_shared<Keeper>());
  CHECK_THROWS_WITH(nn::compile(model, {.full_graph = FullGraph::yes}),
                    ContainsSubstring("has a BatchNorm1d below that is sharded"));
  CHECK_NOTHROW(nn::compile(model.norm));
  nn::compile(other);
  other(batch());
  other.norm.extend(std::make_shared<Keeper>());
  const int before = other.runs;
  other(batch());
  other(batch());
  CHECK(other.runs == before + 2);
}

TEST_CASE(
    "compile: what leaves a program has memory of its own, and what it kept goes when the backward is over") {
  Small model = small();
  nn::compile(model);
  manual_seed(3);
  const auto held = [] { return Context::current().memory().held(DeviceType::cpu)[MemoryUse::activations]; };
  for (int i = 0; i < 2; ++i) sum(model(batch())).backward();
  const Tensor x = batch(), a = model(x), kept = clone(a.detach());
  const std::int64_t before = held();
  {
    const Tensor b = model(mul(x, 2));
    CHECK(held() > before);
    CHECK(equal_bits(a.detach(), kept));
    sum(b).backward();
    CHECK(equal_bits(a.detach(), kept));
    CHECK(held() <= before + static_cast<std::int64_t>(b.storage().bytes()) + 1024);
  }
  CHECK(held() <= before);
  sum(a).backward();
  CHECK(equal_bits(a.detach(), kept));
}

TEST_CASE("compile: a compiled layer inside an eager model, in a captured step, and in a list of layers") {
  manual_seed(4);
  Sequential eager{Linear(6, 8), Gelu(), Linear(8, 8), Dropout(0.2), Linear(8, 2)};
  Sequential compiled = eager.clone();
  nn::compile(compiled[2]);
  nn::compile(compiled[0]);
  for (int i = 0; i < 4; ++i) {
    const auto step = [&](Sequential& model) {
      manual_seed(static_cast<std::uint64_t>(i));
      sum(square(model(batch()))).backward();
    };
    step(eager);
    step(compiled);
    check_equal(state_of(eager), state_of(compiled));
  }
  CHECK(compiled_programs(compiled[2]).stats().hits == 3);
  const Tensor x = batch();
  compiled.zero_grad();
  Program program = capture(
      [&](std::span<const Tensor> in) {
        const Tensor loss = sum(square(compiled(in[0])));
        loss.backward();
        compiled.zero_grad();
        return std::vector<Tensor>{loss};
      },
      {x});
  CHECK(program.size() > 8);
  CHECK(compiled_programs(compiled[2]).stats().hits == 3);
}

TEST_CASE(
    "compile: a module in evaluation mode is called by several threads at once, each by its own programs") {
  nn::Sequential net(nn::Linear(16, 32), nn::Gelu(), nn::Dropout(0.5), nn::Linear(32, 4));
  net.eval();
  for (const Executor executor : {Executor::replay, Executor::fused}) {
    std::vector<Tensor> in, want;
    for (int i = 0; i < 4; ++i) {
      const NoGrad guard;
      in.push_back(randn({1 + i, 16}));
      want.push_back(net(in.back()));
    }
    nn::compile(net, {.executor = executor});
    std::atomic<int> wrong = 0;
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t)
      threads.emplace_back([&, t] {
        Context::current().set_threads(1);
        const NoGrad guard;
        for (int call = 0; call < 300; ++call) {
          const auto i = static_cast<std::size_t>((call + t) % 4);
          if (!same_bits(net(in[i]), want[i])) ++wrong;
        }
      });
    for (std::thread& thread : threads) thread.join();
    CHECK(wrong == 0);
    {
      const NoGrad guard;
      for (int call = 0; call < 3; ++call) CHECK(same_bits(net(in[0]), want[0]));
      const CompileStats stats = nn::compiled_programs(net).stats();
      CHECK(stats.hits == 4 * (300 - 4) + 2);
      CHECK(stats.programs == 1);  // those of ended threads are gone
    }
    nn::uncompile(net);
    CHECK_THROWS_AS(nn::compiled_programs(net), StateError);
  }
}
