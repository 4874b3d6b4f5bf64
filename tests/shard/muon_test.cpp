// Muon: what its iterations do, and that shards step as whole matrices do.
#include "shard/muon.h"

#include <algorithm>
#include <cmath>

#include "autograd/autograd.h"
#include "collectives/observe.h"
#include "nn/layers.h"
#include "runtime/context.h"
#include "shard/fully_shard.h"
#include "shard/optimizer_state.h"
#include "tests/message_of.h"
#include "tests/ranks.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::test;
using shard::GroupLayout;

namespace {

struct Net final : nn::Layer<Net> {
  nn::Linear first{5, 7}, last{7, 2};
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

/// Muon of the matrices, AdamW of the rest.
struct Optimizers {
  shard::Muon muon;
  nn::AdamW adamw;

  Optimizers(const nn::Module& net, shard::MuonOptions options = {.lr = 0.1})
      : muon(of(net, true), options), adamw(of(net, false)) {}
  static std::vector<nn::Parameter> of(const nn::Module& net, bool matrices) {
    std::vector<nn::Parameter> params;
    for (const nn::Parameter& p : net.parameters())
      if ((p.shape().rank() == 2) == matrices) params.push_back(p);
    return params;
  }
  void step() {
    muon.step();
    adamw.step();
    muon.zero_grad();
    adamw.zero_grad();
  }
};

/// The same batch on every rank, so that averages over 2 and 4 of them are the gradients themselves.
void train(Net& net, Optimizers& optimizers, int step) {
  manual_seed(100 + static_cast<std::uint64_t>(step));
  net(rand({4, 5})).backward();
  optimizers.step();
}

void shard_layers(Net& net, World& world, GroupLayout layout) {
  for (nn::Linear* layer : {&net.first, &net.last})
    shard::fully_shard(*layer, {.mesh = world.mesh(), .layout = layout});
  shard::fully_shard(net, {.mesh = world.mesh(), .layout = layout});
}

void expect_same(const nn::StateDict& found, const nn::StateDict& wanted, const char* what) {
  expect(found.size() == wanted.size(), "{} of {} {}", found.size(), wanted.size(), what);
  for (std::size_t i = 0; i < wanted.size(); ++i)
    expect(same_bits(found[i].second, wanted[i].second), "{} {}", what, wanted[i].first);
}

}  // namespace

TEST_CASE("muon: iterations bring singular values near 1, whatever the matrix's scale and way up") {
  for (const Shape& shape : {Shape{6, 6}, Shape{3, 40}, Shape{40, 3}, Shape{1, 5}, Shape{64, 48}}) {
    const Tensor x = numbers(shape, f64), y = shard::orthogonalized(x);
    const bool tall = shape[0] > shape[1];
    const Tensor z = tall ? transpose(y, 0, 1) : y;
    // The squares of its singular values are between those of 0.3 and 1.3: so is what the Gram matrix does to
    // any vector.
    const Tensor gram = matmul(z, transpose(z, 0, 1));
    for (unsigned seed = 1; seed < 6; ++seed) {
      const Tensor v = numbers({z.size(0), 1}, f64, seed);
      const double part = div(norm(matmul(gram, v)), norm(v)).item();
      CHECK(part < 1.3 * 1.3);
      if (shape != Shape{6, 6} && shape != Shape{64, 48}) CHECK(part > 0.3 * 0.3);
    }
    CHECK(distance(shard::orthogonalized(mul(x, 1e4)), y) < 1e-9);
    CHECK(distance(shard::orthogonalized(transpose(x, 0, 1)), transpose(y, 0, 1)) < 1e-9);
  }
  CHECK(amax(abs(shard::orthogonalized(zeros({3, 4})))).item() == 0);
}

TEST_CASE("muon: a step has the size that its scale says, whatever the gradient's") {
  for (const Shape& shape : {Shape{4, 64}, Shape{64, 4}})
    for (const double size : {1e-3, 1.0, 1e3}) {
      const auto root_mean_square = [&](shard::MuonScale scale) {
        nn::Parameter p(zeros(shape));
        p.set_grad(mul(numbers(shape, f32), size));
        shard::Muon optimizer(std::vector{p}, {.lr = 1, .scale = scale, .precision = f32});
        optimizer.step();
        return std::sqrt(mean(square(p.data())).item());
      };
      // Of singular values 1 the root mean square is 1 / sqrt(larger side).
      CHECK(std::abs(root_mean_square(shard::MuonScale::like_adamw) - 0.2) < 0.06);
      CHECK(std::abs(root_mean_square(shard::MuonScale::original) * 8 /
                         std::sqrt(std::max(1.0, shape[0] / 4.0 / 4)) -
                     (shape[0] == 64 ? 2 : 1)) < 0.6);
    }
}

TEST_CASE("muon: trains a net to less than half of its loss in a few steps") {
  Net net = seeded_net();
  Optimizers optimizers(net, {.lr = 0.05});
  const auto loss = [&] {
    manual_seed(1);
    return net(rand({4, 5}));
  };
  const double before = loss().item();
  for (int step = 0; step < 30; ++step) {
    loss().backward();
    optimizers.step();
  }
  CHECK(loss().item() < before / 2);
}

TEST_CASE("muon: shards step to the bits of whole matrices, in every layout, and gather each matrix once") {
  for (const int ranks : {2, 4})
    for (const GroupLayout layout : {GroupLayout::per_parameter, GroupLayout::flat}) {
      if (ranks == 4 && layout == GroupLayout::flat) continue;  // refused: the next case
      INFO(ranks << " ranks, " << (layout == GroupLayout::flat ? "flat" : "per parameter"));
      CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
        Net whole = seeded_net(), net = seeded_net();
        shard_layers(net, world, layout);
        Optimizers of_whole(whole), of_net(net);
        for (int step = 0; step < 3; ++step) {
          train(whole, of_whole, step);
          manual_seed(100 + static_cast<std::uint64_t>(step));
          net(rand({4, 5})).backward();
          OrderLog log;
          of_net.step();
          const auto gathers = std::ranges::count_if(
              log.lines(), [](const std::string& line) { return line.find("weight") != line.npos; });
          expect(gathers == 2 && log.lines().size() == 2, "{} calls, {} of matrices", log.lines().size(),
                 gathers);
          for (const std::string& line : log.lines())
            expect(line.find("all_gather(bf16") != line.npos, "{}", line);
        }
        expect_same(shard::full_state_dict(net), whole.state_dict(), "values");
        // Momenta lie in parts, are whole in a state, and go on from it.
        const nn::StateDict state = shard::full_optimizer_state(net, of_net.muon);
        Net again = seeded_net();
        shard_layers(again, world, layout);
        shard::load_full_state_dict(again, shard::full_state_dict(net));
        Optimizers of_again(again);
        shard::load_full_optimizer_state(again, of_again.muon, state);
        shard::load_full_optimizer_state(again, of_again.adamw,
                                         shard::full_optimizer_state(net, of_net.adamw));
        train(net, of_net, 3);
        train(again, of_again, 3);
        expect_same(shard::full_state_dict(again), shard::full_state_dict(net), "values after loading");
        expect_same(shard::full_optimizer_state(again, of_again.muon),
                    shard::full_optimizer_state(net, of_net.muon), "momenta");
      }));
    }
}

TEST_CASE("muon: what is no matrix, and what a rank would not hear of, is refused in one line") {
  nn::Linear layer(3, 4);
  CHECK(one_line_about(message_of<ValueError>([&] { shard::Muon muon(layer.parameters()); }), "Muon"));
  CHECK(one_line_about(
      message_of<ValueError>([&] { shard::Muon(std::vector{layer.weight.object()}, {.iterations = 100}); }),
      "Muon"));
  CHECK(one_line_about(
      message_of<DTypeError>([&] { shard::Muon(std::vector{layer.weight.object()}, {.precision = i64}); }),
      "Muon"));
  CHECK(one_line_about(message_of<ShapeError>([&] { shard::orthogonalized(zeros({3})); }), "orthogonalized"));
  // A group that comes later.
  shard::Muon muon(std::vector{layer.weight.object()});
  muon.add_param_group({{layer.bias.object()}});
  layer.bias.set_grad(ones({4}));
  CHECK(one_line_about(message_of<ValueError>([&] { muon.step(); }), "Muon"));
  // All of the net in one flat group on four ranks, of which each holds one or two parameters.
  CHECK_NOTHROW(run_ranks(4, [&](World& world) {
    Net net = seeded_net();
    shard::fully_shard(net, {.mesh = world.mesh(), .layout = GroupLayout::flat});
    const std::string refused = message_of<StateError>([&] { Optimizers optimizers(net); });
    expect(refused.find("has no element of 'first.weight'") != refused.npos, "it said '{}'", refused);
  }));
}
