// Hooks on sharded parameters, registered on any of their tensors at any time.
#include <array>
#include <deque>

#include "shard/fsdp.h"
#include "tests/sanitizer.h"
#include "tests/shard/twins.h"

using namespace sherd;
using namespace sherd::test;

namespace {

using Values = std::vector<double>;

Values values_of(const Tensor& t) { return to(t.detach(), f64).to_vector<double>(); }

/// A hook on one tensor of each parameter, and what they saw last.
class Watch {
 public:
  Watch(const std::vector<nn::Parameter>& parameters, const Tensor& (nn::Parameter::*leaf)() const) {
    for (const nn::Parameter& p : parameters) {
      Seen& seen = seen_.emplace_back();
      seen.end = register_hook((p.*leaf)(), [&seen](const Tensor& gradient) {
        ++seen.calls;
        seen.shape = gradient.shape();
        seen.values = values_of(gradient);
        return Tensor{};
      });
    }
  }
  /// Each was called `calls` times so far, the last time with what `expected` has in `.grad`.
  void check(int calls, const std::vector<nn::Parameter>& expected, std::string_view when) const {
    for (std::size_t p = 0; p < seen_.size(); ++p) {
      expect(seen_[p].calls == calls, "{}: {} calls for parameter {}, not {}", when, seen_[p].calls, p,
             calls);
      expect(seen_[p].shape == expected[p].shape(), "{}: a gradient of shape {}", when, seen_[p].shape);
      expect(seen_[p].values == values_of(expected[p].grad()), "{}: the gradient of parameter {}", when, p);
    }
  }
  void end() {
    for (Seen& seen : seen_) seen.end.reset();
  }

 private:
  struct Seen {
    int calls = 0;
    Shape shape;
    Values values;
    Subscription end;
  };
  std::deque<Seen> seen_;
};

using Shard = std::function<void(Net&)>;

/// Every layout and strategy on 1 to 4 ranks, and both forms of the handle; on 4, replicas of shards and
/// slices too.
template <class F>
void on_all_ways(F&& body) {
  using enum shard::ShardingStrategy;
  for (const int ranks : worlds()) {
    for (const shard::ShardingStrategy strategy : {full_shard, shard_grad_op, zero1, no_shard}) {
      for (const shard::GroupLayout layout : {shard::GroupLayout::per_parameter, shard::GroupLayout::flat}) {
        INFO(ranks << " ranks, strategy " << static_cast<int>(strategy) << ", layout "
                   << static_cast<int>(layout));
        const Shard shard = [=](Net& net) {
          shard_blocks_and_rest(net, {.layout = layout, .strategy = strategy});
        };
        CHECK_NOTHROW(run_ranks(ranks, [&](World& world) { body(world, shard); }));
        if (ranks != 4 || strategy != full_shard) continue;
        CHECK_NOTHROW(run_ranks(ranks, [&](World& world) {
          const shard::Options replicas{.mesh = world.mesh({2, 2}, {"replica", "shard"}), .layout = layout},
              slices{.layout = layout, .reshard_after_forward = 2};
          for (const shard::Options& options : {replicas, slices})
            body(world, Shard([&](Net& net) { shard_blocks_and_rest(net, options); }));
        }));
      }
      for (const bool originals : {true, false}) {
        INFO(ranks << " ranks, strategy " << static_cast<int>(strategy) << ", handle, originals "
                   << originals);
        const Shard shard = [=](Net& net) {
          const shard::FullyShardedDataParallel handle(net, {.strategy = strategy,
                                                             .auto_wrap = shard::wrap_classes({"Block"}),
                                                             .use_orig_params = originals});
        };
        CHECK_NOTHROW(run_ranks(ranks, [&](World& world) { body(world, shard); }));
      }
    }
  }
}

/// A backward of both nets with this rank's data, in the dtype of the parameters.
void backward_both(Net& net, Net& by_hand, DType dtype, int rank, int step) {
  by_hand.zero_grad();
  for (Net* n : {&net, &by_hand}) {
    Batch batch = batch_of(rank, step, n->width);
    batch.x = to(batch.x, dtype);
    loss_of(*n, batch).backward();
  }
}

}  // namespace

TEST_CASE("a hook sees this rank's whole gradient once a backward, whenever and wherever it was registered") {
  for (const Recomputed recomputed : {Recomputed::no, Recomputed::blocks})
    on_all_ways([recomputed](World& world, const Shard& shard) {
      const NetOptions options{.tied = Tied::across_groups, .uneven = true, .recomputed = recomputed};
      Net net(options), by_hand(options);
      const std::vector<nn::Parameter> watched = net.parameters(), expected = by_hand.parameters();
      Watch before(watched, &nn::Parameter::tensor);
      shard(net);
      Watch local(watched, &nn::Parameter::local), tensor(watched, &nn::Parameter::tensor);
      backward_both(net, by_hand, f32, world.rank(), 0);
      for (const Watch* watch : {&before, &local, &tensor}) watch->check(1, expected, "sharded");

      net.to(f64);
      by_hand.to(f64);
      Watch cast(watched, &nn::Parameter::tensor);
      backward_both(net, by_hand, f64, world.rank(), 1);
      for (const Watch* watch : {&before, &local, &tensor}) watch->check(2, expected, "cast");
      cast.check(1, expected, "registered after the cast");
      {
        const auto own = shard::no_sync(net);
        backward_both(net, by_hand, f64, world.rank(), 2);
      }
      for (const Watch* watch : {&before, &local, &tensor}) watch->check(3, expected, "without averages");

      const Values last = values_of(expected[0].grad());
      for (Watch* watch : {&before, &tensor}) watch->end();
      const std::vector<nn::Parameter> ended = Net(by_hand.clone()).parameters();
      for (std::size_t p = 0; p < ended.size(); ++p) nn::Parameter(ended[p]).set_grad(expected[p].grad());
      backward_both(net, by_hand, f64, world.rank(), 3);
      before.check(3, ended, "ended");
      tensor.check(3, ended, "ended");
      local.check(4, expected, "another registration ended");
    });
}

TEST_CASE("what a hook returns is what is averaged") {
  on_all_ways([](World& world, const Shard& shard) {
    Net net({.uneven = true}), plain({.uneven = true});
    std::vector<Subscription> hooks;
    for (const nn::Parameter& p : net.parameters())
      hooks.push_back(register_hook(p.tensor(), [](const Tensor& gradient) { return mul(gradient, 2.0); }));
    for (Net* n : {&net, &plain}) {
      shard(*n);
      loss_at(*n, world.rank(), 0).backward();
    }
    // Twice the gradient, or twice the rate: equal to the bit.
    nn::Sgd(net.parameters(), {.lr = 0.125}).step();
    nn::Sgd(plain.parameters(), {.lr = 0.25}).step();
    const nn::StateDict found = shard::full_state_dict(net), expected = shard::full_state_dict(plain);
    for (std::size_t i = 0; i < found.size(); ++i)
      expect(values_of(found[i].second) == values_of(expected[i].second), "'{}' differs", found[i].first);
    Net untouched({.uneven = true});
    expect(values_of(found[0].second) != values_of(untouched.embed.weight.tensor()), "nothing was stepped");
  });
}

TEST_CASE("a hook runs once a backward in every precision, and through both at once") {
  on_ranks([](World& world, shard::GroupLayout layout) {
    Net net;
    shard_blocks_and_rest(
        net, {.layout = layout,
              .mixed_precision = {
                  .param_dtype = bf16, .reduce_dtype = f32, .evaluation = shard::Precision::full}});
    const nn::Parameter watched = net.blocks[1].in.weight.object();
    int first_calls = 0, second_calls = 0;
    Tensor seen;
    const auto loss = [&](bool training) {
      net.train(training);
      return loss_at(net, world.rank(), 0);
    };
    const Subscription first = register_hook(watched.tensor(), [&](const Tensor& gradient) {
      ++first_calls;
      seen = gradient.detach();
      return Tensor{};
    });
    loss(true).backward();
    const Tensor reduced = seen;
    const Tensor evaluated = loss(false);
    const Subscription second = register_hook(watched.tensor(), [&](const Tensor&) {
      ++second_calls;
      return Tensor{};
    });
    evaluated.backward();
    const Tensor full = seen;
    expect(reduced.dtype() == bf16 && full.dtype() == f32, "the gradient's dtypes");
    expect(first_calls == 2 && second_calls == 1, "{} and {} calls", first_calls, second_calls);
    net.zero_grad();
    const Tensor trained = loss(true);
    add(trained, loss(false)).backward();
    expect(first_calls == 3 && second_calls == 2, "at once: {} and {} calls", first_calls, second_calls);
    expect(values_of(seen) == values_of(add(to(reduced, f32), full)), "the sum of both");
    // What is frozen is so in both.
    nn::Parameter(watched).set_requires_grad(false);
    net.zero_grad();
    loss(false).backward();
    expect(first_calls == 3 && !watched.grad().defined(), "frozen");
  });
}

TEST_CASE("hooks after accumulation run once with the average, also after a cast") {
  on_all_ways([](World& world, const Shard& shard) {
    Net net({.uneven = true}), by_hand({.uneven = true});
    const nn::Parameter watched = net.blocks[1].in.weight.object();
    std::array<int, 3> calls{};
    std::vector<Subscription> hooks;
    const auto watch = [&](const Tensor& leaf, std::size_t i) {
      hooks.push_back(register_post_accumulate_hook(leaf, [&calls, i](Leaf& shown) {
        expect(shown.grad.defined(), "no gradient yet");
        ++calls[i];
      }));
    };
    watch(watched.tensor(), 0);
    shard(net);
    watch(watched.local(), 1);
    watch(watched.tensor(), 2);
    const bool hidden = net.parameters().size() < 5;  // one flat parameter a unit
    const bool has = hidden ? net.blocks[1].parameters()[0].local().numel() > 0
                            : watched.local().numel() > 0 || watched.local().shape().rank() == 2;
    for (const int times : {1, 2}) {
      const DType dtype = times == 1 ? f32 : f64;
      net.to(dtype);
      by_hand.to(dtype);
      backward_both(net, by_hand, dtype, world.rank(), times);
      for (std::size_t i = 0; i < calls.size(); ++i)
        expect(calls[i] == (has ? times : 0), "hook {}: {} calls after {}", i, calls[i], times);
    }
  });
}

TEST_CASE("hooks of a model that is gone still see the backward of its loss") {
  on_all_ways([](World& world, const Shard& shard) {
    int calls = 0;
    Subscription hook;
    Tensor loss;
    {
      Net net;
      shard(net);
      hook = register_hook(net.blocks[0].in.weight.tensor(), [&](const Tensor&) {
        ++calls;
        return Tensor{};
      });
      loss = loss_at(net, world.rank(), 0);
    }
    loss.backward();
    expect(calls == 1, "{} calls", calls);
  });
}

TEST_CASE("a flat parameter refuses a hook and names the way out") {
  run_ranks(2, [](World&) {
    Net net;
    const shard::FullyShardedDataParallel handle(net, {});
    const nn::Parameter flat = handle.flat_param();
    for (const DType dtype : {f32, f64}) {
      net.to(dtype);
      const std::string message = message_of<StateError>([&] {
        const Subscription hook = register_hook(flat.tensor(), [](const Tensor&) { return Tensor{}; });
      });
      expect(message.starts_with("register_hook: ") && message.find("parameters in it") != std::string::npos,
             "{}", message);
      const Subscription after = register_post_accumulate_hook(flat.local(), [](Leaf&) {});
    }
  });
  SUCCEED();
}
