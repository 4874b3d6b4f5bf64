// Random programs over the parameters of a sharded net as its user writes them: steps, clears, replaced and
// written parameters and gradients, scopes and states, in any order. Values and gradients are at any time
// those of one unsharded net that the same was done to, with averages by hand.
#include <sherd.h>

#include <memory>
#include <random>

#include "shard/build.h"
#include "shard/summon.h"
#include "tests/sanitizer.h"
#include "tests/shard/originals.h"
#include "tests/shard/random.h"

using namespace sherd;
using namespace sherd::test;

namespace {

/// One optimizer of weights and another of the rest, of which some hold a momentum of their own.
struct Optimizers {
  nn::AdamW weights;
  nn::Sgd others;
  explicit Optimizers(const nn::Module& module)
      : weights(parameters_of(module, [](const std::string& n) { return !is_bias(n); }), {.lr = 1e-2}),
        others(parameters_of(module, is_bias), {.lr = 1e-2, .momentum = 0.9, .weight_decay = 0.1}) {}
  void step() {
    weights.step();
    others.step();
  }
};

/// A net and the optimizers over it.
struct Trained {
  Net net;
  std::unique_ptr<Optimizers> optimizers;
  void begin_anew() { optimizers = std::make_unique<Optimizers>(net); }
  nn::Param& member(std::size_t i) { return *shard::find_members(net).parameters[i].member; }
};

class Program {
 public:
  Program(World& world, const Way& way, std::uint64_t seed)
      : world_(world), way_(way), random_(seed), by_hand_{uneven(), nullptr}, own_{uneven(), nullptr} {
    const bool before = once_in(random_, 2);
    if (before) own_.begin_anew();
    way_.wrap(own_.net);
    if (!before) own_.begin_anew();
    by_hand_.begin_anew();
    parts_ = std::make_unique<Parts>(own_.net, way_, world.rank());
    for (const nn::NamedParameter& p : by_hand_.net.named_parameters()) names_.push_back(p.name);
  }

  void run(int actions) {
    for (int i = 0; i < actions; ++i) {
      const std::string action = act();
      done_ += " " + action;
      if (once_in(random_, 2)) compare();
    }
    compare();
  }

  const std::string& done() const { return done_; }

 private:
  std::string act() {
    switch (below(random_, 13)) {
      case 0:
      case 1:
      case 2:
        return train();
      case 3:
      case 4:
        for (Trained* t : both()) t->optimizers->step();
        return "step";
      case 5:
        return clear();
      case 6:
        return change_gradient();
      case 7:
        return change_values();
      case 8:
        return replace_object();
      case 9:
        return write_summoned();
      case 10:
        return pass_state();
      case 11:
        return evaluate();
      default:
        return change_flags();
    }
  }
  std::array<Trained*, 2> both() { return {&by_hand_, &own_}; }
  /// The same on all ranks.
  Tensor drawn(const Shape& shape) {
    manual_seed(random_());
    return randn(shape);
  }

  /// A backward, or several of which the last one averages; the forward may see a scope or a clear behind it.
  std::string train() {
    std::string text = "train";
    const int alone = once_in(random_, 3) ? 1 + below(random_, 2) : 0, first = step_;
    step_ += alone + 1;
    for (int i = 0; i < alone; ++i) {
      const shard::NoSync scope(own_.net);
      loss_at(own_.net, world_.rank(), first + i).backward();
      text += " alone";
    }
    const Tensor loss = loss_at(own_.net, world_.rank(), first + alone);
    if (!loss.requires_grad()) return text + " nothing";
    if (alone == 0 && once_in(random_, 3)) text += " " + clear();
    if (once_in(random_, 4)) {
      const shard::SummonFullParams scope(own_.net);
      text += " summon";
    }
    loss.backward();
    const Gradients before = gradients(by_hand_.net);
    const Gradients average = average_by_hand(by_hand_.net, world_.size(), [&](int rank) {
      for (int i = 0; i <= alone; ++i) loss_at(by_hand_.net, rank, first + i).backward();
    });
    set_gradients(by_hand_.net, plus(before, average));
    return text;
  }

  std::string clear() {
    const auto mode = once_in(random_, 2) ? nn::ZeroGrad::to_none : nn::ZeroGrad::to_zero;
    const int which = below(random_, 3);
    for (Trained* t : both()) {
      if (which != 0) t->optimizers->weights.zero_grad(mode);
      if (which != 1) t->optimizers->others.zero_grad(mode);
    }
    return mode == nn::ZeroGrad::to_none ? "to-none" : "to-zero";
  }

  std::string change_gradient() {
    const std::size_t i = pick();
    nn::Param &whole = by_hand_.member(i), &mine = own_.member(i);
    if (once_in(random_, 3)) {
      whole.set_grad({});
      mine.set_grad({});
      return "drop-gradient-of-" + names_[i];
    }
    const Tensor value = drawn(whole.shape());
    if (whole.grad().defined() && once_in(random_, 2)) {
      const NoGrad guard;
      whole.set_grad(mul(whole.grad(), 0.5));
      if (mine.grad().defined()) mul_(mine.grad(), 0.5);
      return "halve-gradient-of-" + names_[i];
    }
    whole.set_grad(value);
    mine.set_grad(clone(parts_->of(names_[i], value)));
    return "set-gradient-of-" + names_[i];
  }

  std::string change_values() {
    const std::size_t i = pick();
    nn::Param &whole = by_hand_.member(i), &mine = own_.member(i);
    const Tensor value = drawn(whole.shape());
    if (once_in(random_, 2)) {
      whole.set_data(value);
      mine.set_data(clone(parts_->of(names_[i], value)));
      return "set-data-of-" + names_[i];
    }
    for (const nn::Param* p : {&whole, &mine}) mul_(p->local().detach(), 0.5);
    return "write-" + names_[i];
  }

  std::string replace_object() {
    const std::size_t i = pick();
    nn::Param &whole = by_hand_.member(i), &mine = own_.member(i);
    const Tensor value = drawn(whole.shape());
    whole = nn::Parameter(value);
    mine = nn::Parameter(clone(parts_->of(names_[i], value)));
    if (once_in(random_, 2)) return "replace-" + names_[i];
    for (Trained* t : both()) t->begin_anew();
    return "replace-and-step-" + names_[i];
  }

  std::string write_summoned() {
    const std::size_t i = pick();
    const bool writeback = !once_in(random_, 3);
    {
      const shard::SummonFullParams scope(own_.net, {.writeback = writeback});
      mul_(own_.member(i).data(), 2.0);
    }
    if (writeback) mul_(by_hand_.member(i).data(), 2.0);
    return "summon-and-write-" + names_[i];
  }

  std::string pass_state() {
    if (once_in(random_, 3)) {  // to a clone, which goes on without gradients
      shard::full_state_dict(own_.net);
      for (Trained* t : both()) {
        Net copy = t->net.clone();
        t->net = std::move(copy);
        t->begin_anew();
      }
      return "clone " + evaluate();
    }
    nn::StateDict state = shard::full_state_dict(own_.net);
    for (auto& [name, tensor] : state) mul_(tensor, 1.5);
    shard::load_full_state_dict(own_.net, state);
    by_hand_.net.load_state_dict(state);
    return "load";
  }

  std::string evaluate() {
    std::optional<NoGrad> guard;
    if (once_in(random_, 2)) guard.emplace();
    const Batch batch = batch_of(0, step_++, own_.net.width);
    const Tensor out = own_.net(batch.x), expected = by_hand_.net(batch.x);
    expect(out.to_vector<float>() == expected.to_vector<float>(), "an output differs");
    if (guard) return "evaluate";
    shard::reshard(own_.net);  // else what it kept for its backward could not be replaced
    return "abandon";
  }

  std::string change_flags() {
    const std::size_t i = pick();
    const bool trained = once_in(random_, 2);
    for (Trained* t : both()) {
      t->net.zero_grad();
      nn::Parameter(t->member(i).object()).set_requires_grad(trained);
    }
    return (trained ? "thaw-" : "freeze-") + names_[i];
  }

  std::size_t pick() { return static_cast<std::size_t>(below(random_, static_cast<int>(names_.size()))); }

  /// Values first: asking for whole ones takes in what was replaced.
  void compare() {
    expect_values(own_.net, by_hand_.net, "values");
    const std::string text = difference(whole_gradients(own_.net, world_.group()), gradients(by_hand_.net));
    expect(text.empty(), "{}", text);
  }

  World& world_;
  const Way& way_;
  Random random_;
  Trained by_hand_, own_;
  std::unique_ptr<Parts> parts_;
  std::vector<std::string> names_;
  std::string done_;
  int step_ = 0;
};

void play_seeds(std::uint64_t first, std::uint64_t last) {
  for (std::uint64_t seed = first; seed <= last; ++seed)
    on_ways([&](World& world, const Way& way) {
      Program program(world, way, seed);
      try {
        program.run(24);
      } catch (const std::exception& error) {
        throw RankFailure(fmt::format("seed {}, after{}: {}", seed, program.done(), error.what()));
      }
    });
}

}  // namespace

TEST_CASE("random programs over original parameters do what they do to one net by hand", "[threads meet]") {
  play_seeds(1, sanitized ? 1 : 4);
}
TEST_CASE("many random programs over original parameters do what they do to one net by hand", "[.soak]") {
  play_seeds(5, 300);
}
