// Adafactor: that ranks agree on what rows and columns come to, and what they keep of it.
#include "shard/adafactor.h"

#include <algorithm>

#include "autograd/autograd.h"
#include "autograd/capture/capture.h"
#include "collectives/observe.h"
#include "collectives/world.h"
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

namespace {

/// Rows that no number of ranks divides, fewer of them than ranks, a stack of matrices, and vectors.
struct Net final : nn::Layer<Net> {
  nn::Linear first{5, 7}, last{7, 2};
  nn::Param stack{mul(ones({5, 3, 2}), 0.5)};
  Tensor forward(const Tensor& x) const {
    return add(sum(square(last(gelu(first(x))))), sum(square(matmul(stack, ones({2, 4})))));
  }
  void visit(auto&& on) {
    on("first", first);
    on("last", last);
    on("stack", stack);
  }
};

Net seeded_net() {
  manual_seed(3);
  return {};
}

void shard_layers(Net& net, World& world) {
  for (nn::Linear* layer : {&net.first, &net.last}) shard::fully_shard(*layer, {.mesh = world.mesh()});
  shard::fully_shard(net, {.mesh = world.mesh()});
}

/// The same batch on every rank, so that averages over 2 and 4 of them are the gradients themselves.
void train(Net& net, shard::Adafactor& optimizer, int step) {
  manual_seed(100 + static_cast<std::uint64_t>(step));
  net(rand({4, 5})).backward();
  optimizer.step();
  optimizer.zero_grad();
}

/// Between tensors of a name, in parts of the largest element.
double largest_distance(const nn::StateDict& found, const nn::StateDict& wanted) {
  expect(found.size() == wanted.size(), "{} of {} tensors", found.size(), wanted.size());
  double largest = 0;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const auto& [name, t] = wanted[i];
    expect(found[i].first == name && found[i].second.shape() == t.shape(), "{}", name);
    if (t.numel() == 0) continue;
    const Tensor off = amax(abs(sub(to(found[i].second, f64), to(t, f64))));
    largest = std::max(largest, div(off, amax(abs(to(t, f64)))).item());
  }
  return largest;
}

void expect_same(const nn::StateDict& found, const nn::StateDict& wanted) {
  expect(found.size() == wanted.size(), "{} of {}", found.size(), wanted.size());
  for (std::size_t i = 0; i < wanted.size(); ++i)
    expect(same_bits(found[i].second, wanted[i].second), "{}", wanted[i].first);
}

}  // namespace

TEST_CASE("adafactor: shards step as whole matrices do, and keep their statistics whole") {
  for (const int ranks : {1, 2, 4})
    CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
      Net whole = seeded_net(), net = seeded_net();
      shard_layers(net, world);
      shard::Adafactor of_whole(whole.parameters()), of_net(net.parameters());
      for (int step = 0; step < 20; ++step) {
        train(whole, of_whole, step);
        manual_seed(100 + static_cast<std::uint64_t>(step));
        net(rand({4, 5})).backward();
        const OrderLog log;
        of_net.step();
        of_net.zero_grad();
        expect(log.lines().size() == (ranks == 1 ? 0 : 2), "{} calls", log.lines().size());
      }
      const double values = largest_distance(shard::full_state_dict(net), whole.state_dict()),
                   state = largest_distance(shard::full_optimizer_state(of_net), of_whole.state_dict());
      // Each step rounds a few times.
      const double rounded = 20 * 4 * 0x1p-24;
      expect(values <= rounded, "values differ by {} of the largest", values);
      expect(state <= rounded, "state differs by {} of the largest", state);
      for (const auto& [name, t] : of_net.state_dict())
        if (name == "state.4.row_var") expect(t.shape() == Shape{5, 3, 1}, "{}", t.shape());
    }));
}

TEST_CASE("adafactor: what some ranks save others load to the bit") {
  for (const int savers : {1, 4}) {
    const TempDirectory folder;
    nn::StateDict saved;
    run_ranks(savers, [&](World& world) {
      Net net = seeded_net();
      shard_layers(net, world);
      shard::Adafactor optimizer(net.parameters());
      for (int step = 0; step < 3; ++step) train(net, optimizer, step);
      shard::save_checkpoint(net, optimizer, folder / "checkpoint", world.group());
      const nn::StateDict state = shard::full_optimizer_state(net, optimizer);
      if (world.rank() == 0)
        for (const auto& [name, t] : state) saved.emplace_back(name, clone(t));
    });
    for (const int ranks : {1, 2, 3, 4})
      for (const bool stepped : {false, true})
        CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
          Net net = seeded_net();
          shard_layers(net, world);
          shard::Adafactor optimizer(net.parameters());
          if (stepped) train(net, optimizer, 9);
          shard::load_checkpoint(net, optimizer, folder / "checkpoint", world.group());
          expect_same(shard::full_optimizer_state(net, optimizer), saved);
          train(net, optimizer, 3);  // goes on from it
        }));
  }
}

TEST_CASE("adafactor: trains in 16 bits too, and climbs when it is told to") {
  for (const DType dtype : {f64, f32, bf16, f16})
    for (const bool maximize : {false, true}) {
      nn::Parameter p(full({4, 3}, 2.0, {dtype}));
      shard::Adafactor optimizer(std::vector{p}, {.lr = 0.1, .maximize = maximize});
      for (int step = 0; step < 5; ++step) {
        p.set_grad(ones({4, 3}, {dtype}));
        optimizer.step();
      }
      const double after = to(p.data(), f64).to_vector<double>()[0];
      CHECK((maximize ? after > 2.5 : after < 1.5));
      CHECK(optimizer.state_dict().size() == 7 + 4);
    }
}

TEST_CASE("adafactor: a captured step goes on as an eager one") {
  nn::Parameter eager(numbers({6, 5}, f32)), captured(numbers({6, 5}, f32));
  shard::Adafactor of_eager(std::vector{eager}), of_captured(std::vector{captured});
  for (nn::Parameter* p : {&eager, &captured}) p->set_grad(numbers({6, 5}, f32, 7));
  of_captured.step();
  Program program = capture(
      [&](std::span<const Tensor>) {
        of_captured.step();
        return std::vector<Tensor>{};
      },
      {});
  for (int step = 0; step < 2; ++step) of_eager.step();
  for (const double rate : {1e-2, 1e-3}) {
    of_captured.set_lr(rate);
    of_eager.set_lr(rate);
    program.replay({});
    of_eager.step();
    CHECK(same_bits(eager.data(), captured.data()));
  }
}

TEST_CASE("adafactor: parameters without elements change nothing of the others") {
  const auto stepped = [](const std::vector<Shape>& shapes) {
    std::vector<nn::Parameter> all{nn::Parameter(numbers({6, 5}, f32))};
    for (const Shape& shape : shapes) all.emplace_back(zeros(shape));
    shard::Adafactor optimizer(all);
    for (int step = 0; step < 3; ++step) {
      for (nn::Parameter& p : all) p.set_grad(p.numel() > 0 ? numbers({6, 5}, f32, 7) : zeros(p.shape()));
      optimizer.step();
    }
    return all[0].data();
  };
  CHECK(same_bits(stepped({{0, 2}, {2, 0}, {0}, {3, 0, 2}}), stepped({})));
}

TEST_CASE("adafactor: what it cannot step, and options and states that do not fit, are refused in one line") {
  nn::Parameter p(ones({4, 3}));
  CHECK(
      one_line_about(message_of<ValueError>([&] { shard::Adafactor(std::vector{p}, {.beta2_decay = 0.5}); }),
                     "beta2_decay"));
  CHECK(one_line_about(message_of<ValueError>([&] { shard::Adafactor(std::vector{p}, {.lr = -1}); }), "lr"));
  shard::Adafactor optimizer(std::vector{p});
  p.set_grad(ones({4, 3}));
  optimizer.step();
  nn::StateDict state = optimizer.state_dict();
  for (auto& [name, t] : state)
    if (name == "state.0.row_var") t = ones({4, 3});
  for (const auto& load :
       std::vector<std::function<void()>>{[&] { optimizer.load_state_dict(state); },
                                          [&] { shard::load_full_optimizer_state(optimizer, state); }})
    CHECK(one_line_about(message_of<ShapeError>(load), "'state.0.row_var' has shape (4, 3)"));
  // Of the net in one flat group a rank of four has some parameters alone.
  for (const bool one_flat : {false, true})
    CHECK_NOTHROW(run_ranks(4, [&](World& world) {
      Net net = seeded_net();
      const shard::FullyShardedDataParallel handle(net, {.mesh = world.mesh(), .use_orig_params = !one_flat});
      const auto make = [&] { shard::Adafactor refused(net.parameters()); };
      const std::string message = one_flat ? message_of<ValueError>(make) : message_of<StateError>(make);
      expect(message.starts_with("Adafactor: "), "it said '{}'", message);
    }));
}
