// Random programs in which a captured step is replayed among everything else that a program does between its
// steps: they see and leave what they do when every step is made anew.
#include <array>
#include <memory>
#include <optional>
#include <random>

#include "shard/step_in_backward.h"
#include "tests/catch.h"
#include "tests/ranks.h"
#include "tests/shard/nets.h"

using namespace sherd;
using namespace sherd::test;

namespace {

using enum shard::ShardingStrategy;

struct Setting {
  int ranks;
  shard::Options options;
  NetOptions net;
  bool replicas, adam, early, clipped;

  explicit Setting(std::mt19937& random) {
    const auto draw = [&](unsigned n) { return static_cast<int>(random() % n); };
    ranks = 1 + draw(4);
    options.layout = draw(2) != 0 ? shard::GroupLayout::flat : shard::GroupLayout::per_parameter;
    options.strategy =
        std::array{full_shard, shard_grad_op, zero1, no_shard}[static_cast<std::size_t>(draw(4))];
    if (draw(3) == 0) options.mixed_precision = {.param_dtype = bf16, .reduce_dtype = f32};
    replicas = ranks == 4 && options.strategy == full_shard && draw(2) != 0;
    adam = draw(2) != 0;
    early = draw(3) == 0;
    clipped = draw(2) != 0;
    net = {.tied = Tied(draw(3)),
           .uneven = draw(2) != 0,
           .recomputed = Recomputed(draw(4)),
           .frozen = Frozen(draw(3))};
  }
};

enum class Steps { eager, captured };

class Trial {
 public:
  Trial(World& world, const Setting& setting) : world_(world), setting_(setting), net_(setting.net) {
    shard::Options options = setting.options;
    if (setting.replicas) options.mesh = world.mesh({2, 2}, {"replica", "shard"});
    shard_blocks_and_rest(net_, options);
    if (setting.adam)
      optimizer_ = std::make_unique<nn::AdamW>(net_.parameters(), nn::AdamWOptions{.lr = 1e-2});
    else
      optimizer_ = std::make_unique<nn::Sgd>(net_.parameters(), nn::SgdOptions{.lr = 0.05, .momentum = 0.9});
    if (setting.early) early_.emplace(*optimizer_);
  }

  /// What it sees on its way and leaves at its end.
  std::vector<float> run(unsigned seed, Steps how) {
    std::mt19937 random(seed);
    for (int act = 0; act < 14; ++act) {
      const Batch batch = batch_of(world_.rank(), act, net_.width);
      const unsigned drawn = random() % 14;
      const unsigned more = random();
      act < 2 || drawn < 4 ? step({batch.x, batch.target}, how) : between(drawn, more, batch);
    }
    see(shard::full_state_dict(net_));
    see(shard::full_optimizer_state(net_, *optimizer_));
    return seen_;
  }

 private:
  std::vector<Tensor> train(std::span<const Tensor> in) {
    const Tensor loss = mean(square(sub(to(net_(in[0]), f32), in[1])));
    loss.backward();
    std::vector<Tensor> out{loss.detach()};
    if (!early_ && setting_.clipped) out.push_back(to(shard::clip_grad_norm_(net_.parameters(), 0.5), f32));
    if (!early_) optimizer_->step();
    optimizer_->zero_grad();
    return out;
  }

  void step(const std::vector<Tensor>& in, Steps how) {
    std::vector<Tensor> out;
    if (how == Steps::eager || ++steps_ <= 2)
      out = train(in);
    else if (program_)
      out = program_->replay(in);
    else
      out = program_.emplace(capture([this](std::span<const Tensor> given) { return train(given); }, in))
                .outputs();
    for (const Tensor& t : out) seen_.push_back(t.item<float>());
  }

  void between(unsigned act, unsigned more, const Batch& batch) {
    const NoGrad no_grad;
    switch (act) {
      case 4:
        return see(net_(batch.x));
      case 5:
        return shard::unshard(net_);
      case 6:
        return shard::reshard(net_);
      case 7: {
        const auto summoned = shard::summon_full_params(net_);
        mul_(net_.scale.data(), 0.9);
        return;
      }
      case 8:
        model_ = shard::full_state_dict(net_);
        state_ = shard::full_optimizer_state(net_, *optimizer_);
        return;
      case 9:
        if (model_.empty()) return;
        shard::load_full_state_dict(net_, model_);
        return shard::load_full_optimizer_state(net_, *optimizer_, state_);
      case 10:
        return optimizer_->set_lr(0.01 + 0.001 * (more % 10));
      case 11:
        return see(sum(square(net_.blocks[0].in.weight.tensor())));
      case 12:
        return program_.reset();
      default:
        for (const nn::Parameter& p : net_.parameters()) mul_(p.local().detach(), 0.99);
    }
  }

  void see(const Tensor& t) {
    for (const float value : to(t, f32).to_vector<float>()) seen_.push_back(value);
  }
  void see(const nn::StateDict& state) {
    for (const auto& [name, tensor] : state) see(tensor);
  }

  World& world_;
  const Setting& setting_;
  Net net_;
  std::unique_ptr<nn::Optimizer> optimizer_;
  std::optional<shard::StepInBackward> early_;
  std::optional<Program> program_;
  int steps_ = 0;
  nn::StateDict model_, state_;
  std::vector<float> seen_;
};

struct Outcome {
  std::vector<std::vector<float>> seen;  ///< by rank
  std::string thrown;
  bool operator==(const Outcome&) const = default;
};

Outcome outcome(const Setting& setting, unsigned seed, Steps how) {
  Outcome found{std::vector<std::vector<float>>(static_cast<std::size_t>(setting.ranks)), {}};
  try {
    run_ranks(setting.ranks, [&](World& world) {
      found.seen[static_cast<std::size_t>(world.rank())] = Trial(world, setting).run(seed, how);
    });
  } catch (const StateError& error) {  // what a program may not do it may not do either way
    found.thrown = error.what();
  }
  return found;
}

}  // namespace

TEST_CASE("a captured step among random acts is the step made anew", "[threads meet]") {
  int whole = 0;
  constexpr unsigned programs = 80;
  for (unsigned seed = 0; seed < programs; ++seed) {
    INFO("seed " << seed);
    std::mt19937 random(seed * 7919 + 1);
    const Setting setting(random);
    const Outcome eager = outcome(setting, seed, Steps::eager),
                  captured = outcome(setting, seed, Steps::captured);
    CHECK(captured.thrown == eager.thrown);
    CHECK(captured == eager);
    whole += eager.thrown.empty();
  }
  CHECK(whole > static_cast<int>(programs) * 9 / 10);
}
