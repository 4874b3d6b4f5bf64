// Adam with moments in 8 bits: that they are what a plain computation makes them, whoever has the elements.
#include "shard/adam8bit.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "autograd/autograd.h"
#include "autograd/capture/capture.h"
#include "collectives/observe.h"
#include "collectives/world.h"
#include "nn/gpt.h"
#include "nn/layers.h"
#include "runtime/context.h"
#include "shard/checkpoint.h"
#include "shard/fsdp.h"
#include "shard/fully_shard.h"
#include "shard/optimizer_state.h"
#include "tests/message_of.h"
#include "tests/ranks.h"
#include "tests/runtime/harness.h"
#include "tests/temp_directory.h"

using namespace sherd;
using namespace sherd::test;
using shard::Adam8bit;
using shard::CodeSign;
using shard::GroupLayout;

namespace {

/// A matrix whose shards end within blocks, at some numbers of ranks, and one that stays in f32.
struct Net final : nn::Layer<Net> {
  nn::Linear first{96, 70}, last{70, 3};
  Tensor forward(const Tensor& x) const { return sum(square(last(gelu(first(x))))); }
  void visit(auto&& on) {
    on("first", first);
    on("last", last);
  }
};

Net seeded_net() {
  manual_seed(3);
  return {};
}

void shard_layers(Net& net, World& world, GroupLayout layout) {
  for (nn::Linear* layer : {&net.first, &net.last})
    shard::fully_shard(*layer, {.mesh = world.mesh(), .layout = layout});
  shard::fully_shard(net, {.mesh = world.mesh(), .layout = layout});
}

/// The same batch on every rank, so that averages over 2 and 4 of them are the gradients themselves.
void backward(Net& net, int step) {
  manual_seed(100 + static_cast<std::uint64_t>(step));
  net(rand({4, 96})).backward();
}

void train(Net& net, Adam8bit& optimizer, int step) {
  backward(net, step);
  optimizer.step();
  optimizer.zero_grad();
}

void expect_same(const nn::StateDict& found, const nn::StateDict& wanted) {
  expect(found.size() == wanted.size(), "{} of {}", found.size(), wanted.size());
  for (std::size_t i = 0; i < wanted.size(); ++i)
    expect(same_bits(found[i].second, wanted[i].second), "{}", wanted[i].first);
}

std::size_t nearest(std::span<const float> code, double x) {
  std::size_t best = 0;
  for (std::size_t i = 1; i < code.size(); ++i)
    if (std::abs(code[i] - x) < std::abs(code[best] - x)) best = i;
  return best;
}

/// One parameter of f32, element by element.
struct Reference {
  std::vector<float> p;
  std::vector<double> codes[2], small[2];
  std::vector<float> absmax[2];
  int steps = 0;
  bool quantised;

  explicit Reference(const Tensor& t) : p(t.to_vector<float>()), quantised(p.size() >= 4096) {
    for (int k = 0; k < 2; ++k) {
      codes[k].assign(p.size(), 0);
      small[k].assign(p.size(), 0);
      absmax[k].assign((p.size() + 255) / 256, 0);
    }
  }
  void step(const std::vector<float>& g, const shard::Adam8bitOptions& o) {
    const std::span<const float> code[2] = {shard::dynamic_code(CodeSign::both),
                                            shard::dynamic_code(CodeSign::positive)};
    const double beta[2] = {o.beta1, o.beta2};
    ++steps;
    std::vector<double> moments[2];
    for (int k = 0; k < 2; ++k) {
      for (std::size_t i = 0; i < p.size(); ++i) {
        const double old = quantised ? static_cast<double>(code[k][static_cast<std::size_t>(codes[k][i])]) *
                                           static_cast<double>(absmax[k][i / 256])
                                     : small[k][i];
        const double x = o.maximize ? -g[i] : g[i];
        moments[k].push_back(beta[k] * old + (1 - beta[k]) * (k == 0 ? x : x * x));
        small[k][i] = static_cast<float>(moments[k][i]);
      }
      for (std::size_t b = 0; b < absmax[k].size(); ++b) {
        double most = 0;
        for (std::size_t i = b * 256; i < std::min(p.size(), b * 256 + 256); ++i)
          most = std::max(most, std::abs(moments[k][i]));
        absmax[k][b] = static_cast<float>(most);
        for (std::size_t i = b * 256; i < std::min(p.size(), b * 256 + 256); ++i)
          codes[k][i] = static_cast<double>(
              nearest(code[k], absmax[k][b] == 0 ? moments[k][i] : moments[k][i] / absmax[k][b]));
      }
    }
    for (std::size_t i = 0; i < p.size(); ++i) {
      const double m = moments[0][i] / (1 - std::pow(o.beta1, steps)),
                   v = moments[1][i] / (1 - std::pow(o.beta2, steps));
      p[i] = static_cast<float>(p[i] * (1 - o.lr * o.weight_decay) - o.lr * (m / (std::sqrt(v) + o.eps)));
    }
  }
};

struct TwoLayers final : nn::Layer<TwoLayers> {
  nn::Linear first{100, 100}, last{100, 50};
  Tensor forward(const Tensor& x) const { return last(first(x)); }
  void visit(auto&& on) {
    on("first", first);
    on("last", last);
  }
};

std::vector<double> in_f64(const Tensor& t) { return to(t, f64).to_vector<double>(); }

}  // namespace

TEST_CASE("adam8bit: codes stand for the published numbers") {
  for (const CodeSign sign : {CodeSign::both, CodeSign::positive}) {
    const std::span<const float> code = shard::dynamic_code(sign);
    REQUIRE(code.size() == 256);
    CHECK(std::ranges::adjacent_find(code, std::greater_equal<>()) == code.end());
    CHECK(code.back() == 1);
    CHECK(std::ranges::count(code, 0.0F) == 1);
    for (int power = 0; power < 7; ++power) {
      const double top = std::pow(10.0, power - 6);
      const auto in_decade =
          std::ranges::count_if(code, [&](float x) { return x > top / 10 * 1.0001 && x < top * 0.9999; });
      CHECK(in_decade == (sign == CodeSign::both ? 1 : 2) << power);
    }
    if (sign == CodeSign::positive) CHECK(code.front() == 0);
  }
  // As bitsandbytes lists them.
  const std::span<const float> both = shard::dynamic_code(CodeSign::both);
  CHECK(both[0] == -0.99296875F);
  CHECK(both[127] == 0);
  CHECK(std::abs(both[128] - 5.5e-7F) < 1e-13F);
  CHECK(both[254] == 0.99296875F);
  CHECK(std::abs(shard::dynamic_code(CodeSign::positive)[1] - 3.25e-7F) < 1e-13F);
}

TEST_CASE("adam8bit: codes, largest values and parameters are to the bit those of a plain computation") {
  for (const auto& options : {shard::Adam8bitOptions{},
                              {.lr = 0.1, .beta1 = 0.5, .beta2 = 0.9, .weight_decay = 0.1},
                              {.lr = 0.01, .beta1 = 0, .eps = 1e-3, .maximize = true}})
    for (const Shape& shape : {Shape{4095}, Shape{4096}, Shape{70, 96}, Shape{5, 7, 131}, Shape{2, 3}}) {
      INFO(shape << " rate " << options.lr);
      nn::Parameter p(numbers(shape, f32));
      Reference reference(p.data());
      Adam8bit optimizer(std::vector{p}, options);
      for (unsigned step = 1; step < 5; ++step) {
        Tensor g = numbers(shape, f32, step + 7);
        if (step == 2) g = mul(g, 1e-4);
        if (step == 1 && shape.numel() > 600) zero_(narrow(reshape(g, {-1}), 0, 0, 300));  // a block of zeros
        p.set_grad(g);
        optimizer.step();
        reference.step(g.to_vector<float>(), options);
        CHECK(p.data().to_vector<float>() == reference.p);
        std::map<std::string, Tensor> state;
        for (const auto& [name, t] : optimizer.state_dict()) state[name] = t;
        for (int k = 0; k < 2; ++k) {
          const std::string name = k == 0 ? "state.0.exp_avg" : "state.0.exp_avg_sq";
          const Tensor& kept = state.at(name);
          const Tensor& absmax = state.at(name + "_absmax");
          CHECK(kept.dtype() == (reference.quantised ? DType::u8 : f32));
          CHECK(in_f64(kept) == (reference.quantised ? reference.codes[k] : reference.small[k]));
          if (reference.quantised)
            CHECK(absmax.to_vector<float>() == reference.absmax[k]);
          else
            CHECK(absmax.numel() == 0);
        }
      }
    }
}

TEST_CASE("adam8bit: shards step and keep the bits of whole parameters, in every layout") {
  for (const int ranks : {1, 2, 4})
    for (const GroupLayout layout : {GroupLayout::per_parameter, GroupLayout::flat}) {
      INFO(ranks << " ranks, " << (layout == GroupLayout::flat ? "flat" : "per parameter"));
      CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
        Net whole = seeded_net(), net = seeded_net();
        shard_layers(net, world, layout);
        Adam8bit of_whole(whole.parameters()), of_net(net.parameters());
        for (int step = 0; step < 4; ++step) {
          train(whole, of_whole, step);
          backward(net, step);
          const OrderLog log;
          of_net.step();
          of_net.zero_grad();
          expect(log.lines().size() == (ranks == 1 ? 0 : 1), "{} calls", log.lines().size());
        }
        expect_same(shard::full_state_dict(net), whole.state_dict());
        expect_same(shard::full_optimizer_state(of_net), of_whole.state_dict());
      }));
    }
}

TEST_CASE("adam8bit: what some ranks save others load to the bit") {
  for (const GroupLayout layout : {GroupLayout::per_parameter, GroupLayout::flat})
    for (const int savers : {1, 3, 4}) {
      const TempDirectory folder;
      nn::StateDict saved;
      run_ranks(savers, [&](World& world) {
        Net net = seeded_net();
        shard_layers(net, world, layout);
        Adam8bit optimizer(net.parameters());
        for (int step = 0; step < 3; ++step) train(net, optimizer, step);
        shard::save_checkpoint(net, optimizer, folder / "checkpoint", world.group());
        const nn::StateDict state = shard::full_optimizer_state(net, optimizer);
        if (world.rank() == 0)
          for (const auto& [name, t] : state) saved.emplace_back(name, clone(t));
      });
      for (const int ranks : {1, 2, 3, 4})
        for (const GroupLayout other : {GroupLayout::per_parameter, GroupLayout::flat})
          CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
            Net net = seeded_net();
            shard_layers(net, world, other);
            Adam8bit optimizer(net.parameters());
            if (ranks % 2 == 0) train(net, optimizer, 9);
            shard::load_checkpoint(net, optimizer, folder / "checkpoint", world.group());
            expect_same(shard::full_optimizer_state(net, optimizer), saved);
            train(net, optimizer, 3);
          }));
    }
}

TEST_CASE(
    "adam8bit: moments are of gradients alone, whatever the parameter's dtype, and captured steps go on") {
  std::map<std::string, Tensor> first;
  for (const DType dtype : {f32, f64, bf16, f16}) {
    nn::Parameter eager(to(numbers({64, 80}, f32), dtype)), captured(clone(eager.data()));
    const Tensor g = to(to(numbers({64, 80}, f32, 5), bf16), dtype);
    Adam8bit of_eager(std::vector{eager}), of_captured(std::vector{captured});
    for (nn::Parameter* p : {&eager, &captured}) p->set_grad(clone(g));
    of_captured.step();
    Program program = capture(
        [&](std::span<const Tensor>) {
          of_captured.step();
          return std::vector<Tensor>{};
        },
        {});
    for (int step = 0; step < 5; ++step) of_eager.step();
    for (int step = 2; step < 5; ++step) program.replay({});
    CHECK(eager.data().dtype() == dtype);
    CHECK(same_bits(eager.data(), captured.data()));
    const nn::StateDict state = of_eager.state_dict(), replayed = of_captured.state_dict();
    for (std::size_t i = 0; i < state.size(); ++i) {
      const auto& [name, t] = state[i];
      CHECK(same_bits(t, replayed[i].second));
      CHECK(same_bits(t, first.emplace(name, t).first->second));
    }
  }
}

TEST_CASE("adam8bit: trains a small Gpt to a loss within 2 % of AdamW's") {
  const auto trained = [](auto make) {
    manual_seed(1);
    nn::Gpt model({.layers = 2, .heads = 2, .width = 32, .context = 16, .vocab = 32});
    const auto optimizer = make(model.parameters());
    double last = 0;
    for (int step = 0; step < 150; ++step) {
      manual_seed(500 + static_cast<std::uint64_t>(step));
      // Sequences that count up by steps of 1, 2 or 3.
      const Tensor from = randint(0, 32, {8, 1}), by = randint(1, 4, {8, 1});
      const Tensor all = remainder(add(from, mul(by, arange(17))), 32);
      const Tensor loss = model(narrow(all, 1, 0, 16), nn::ClassTargets{clone(narrow(all, 1, 1, 16))});
      loss.backward();
      optimizer->step();
      optimizer->zero_grad();
      if (step >= 140) last += loss.item() / 10;
    }
    return last;
  };
  const double adamw =
      trained([](auto params) { return std::make_unique<nn::AdamW>(params, nn::AdamWOptions{.lr = 3e-3}); });
  const double ours = trained([](auto params) {
    return std::make_unique<Adam8bit>(params, shard::Adam8bitOptions{.lr = 3e-3, .weight_decay = 0.01});
  });
  INFO(ours << " beside " << adamw);
  CHECK(adamw < std::log(32) / 2);  // half of an untrained one's
  CHECK(ours < adamw * 1.02);
}

TEST_CASE("adam8bit: what it cannot step, and states that do not fit, are refused in one line") {
  nn::Parameter p(ones({64, 64}));
  CHECK(one_line_about(message_of<ValueError>([&] { Adam8bit(std::vector{p}, {.beta1 = 1}); }), "beta1"));
  Adam8bit optimizer(std::vector{p});
  p.set_grad(ones({64, 64}));
  optimizer.step();
  nn::AdamW other(std::vector{p});
  other.step();
  CHECK(one_line_about(message_of<ValueError>([&] { optimizer.load_state_dict(other.state_dict()); }),
                       "lacks 'state.0.exp_avg_absmax'"));
  nn::StateDict state = optimizer.state_dict();
  for (auto& [name, t] : state)
    if (name == "state.0.exp_avg_absmax") t = ones({15});
  for (const auto& load :
       std::vector<std::function<void()>>{[&] { optimizer.load_state_dict(state); },
                                          [&] { shard::load_full_optimizer_state(optimizer, state); }})
    CHECK(one_line_about(message_of<ShapeError>(load), "'state.0.exp_avg_absmax' has shape (15)"));
  for (const bool one_flat : {false, true})
    CHECK_NOTHROW(run_ranks(4, [&](World& world) {
      // All in one flat group, in which the last of four ranks has nothing of the first matrix.
      TwoLayers net;
      const shard::FullyShardedDataParallel handle(net, {.mesh = world.mesh(), .use_orig_params = !one_flat});
      const auto make = [&] { Adam8bit refused(net.parameters()); };
      const std::string message = one_flat ? message_of<ValueError>(make) : message_of<StateError>(make);
      expect(message.starts_with("Adam8bit: "), "it said '{}'", message);
    }));
}
