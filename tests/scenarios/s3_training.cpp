// S3.1 to S3.3: precisions of the per-parameter layout, trained beside a reference that averages by hand.
#include <optional>

#include "nn/optimizer.h"
#include "runtime/ops.h"
#include "shard/fully_shard.h"
#include "tests/scenarios/models.h"
#include "tests/scenarios/parity.h"

namespace sherd::scenarios {
namespace {

/// A switch, or a number of ranks.
using Reshard = std::variant<bool, int>;
shard::ReshardAfterForward option_of(Reshard reshard) {
  return std::visit([](auto value) { return shard::ReshardAfterForward(value); }, reshard);
}
bool frees(Reshard reshard) { return option_of(reshard).ranks() != 1; }

constexpr int steps = 10;

nn::Sequential three_mlps() {
  manual_seed(42);
  nn::Sequential model;
  for (int i = 0; i < 3; ++i) model.append(Mlp(16));
  return model;
}

nn::Sequential on_compute(nn::Sequential model) {
  model.to(compute);
  return model;
}

/// The last one is the root and has no parameters left.
void shard_all(const Rank& rank, nn::Sequential& model, Reshard reshard, shard::MixedPrecisionPolicy policy) {
  const shard::Options options{.mesh = rank.mesh,
                               .reshard_after_forward = option_of(reshard),
                               .mixed_precision = policy,
                               .device = compute};
  for (std::size_t i = 0; i < model.size(); ++i) shard::fully_shard(model[i], options);
  shard::fully_shard(model, options);
}

/// A sharded model and its reference, with an optimizer each.
struct Pair {
  nn::Sequential model = three_mlps();
  nn::Sequential reference = on_compute(model.clone());
  nn::Adam reference_optim{reference.parameters(), {.lr = 1e-2, .foreach = false}};
  std::optional<nn::Adam> optim;

  Pair(Rank& rank, Reshard reshard, shard::MixedPrecisionPolicy policy) {
    shard_all(rank, model, reshard, policy);
    optim.emplace(model.parameters(), nn::AdamOptions{.lr = 1e-2, .foreach = true});
    const std::vector<shard::GroupReport> groups = shard::groups_of(model);
    rank.check.eq(groups.size(), 3u, "groups");
    for (const shard::GroupReport& group : groups) {
      rank.check.eq(group.gathered_numel, 2128, "gathered elements of a group");
      rank.check.eq(group.shard_numel, 2128 / rank.world(), "elements of a shard");
    }
  }
};

Tensor input(const Rank& rank, std::int64_t rows, DType dtype) {
  manual_seed(static_cast<std::uint64_t>(42 + rank.index() + 1));
  return to(to(randn({rows, 16}), compute), dtype);
}

nn::ZeroGrad zero_mode(int step) { return step % 2 == 0 ? nn::ZeroGrad::to_none : nn::ZeroGrad::to_zero; }

/// The last ReLU brings the loss to nothing after some steps; before that there is something to compare.
void check_first_loss(Rank& rank, const Tensor& loss, int step) {
  if (step == 0) rank.check.eq(loss.item() > 0, true, "a first loss");
}

// ---- averaging by hand ----

/// By slices, so that the sum has the order that the engine's has.
Tensor combine_by_slices(const Group& group, const Tensor& gradient, ReduceOp reduction) {
  const Tensor whole = contiguous(gradient);
  const Tensor slice =
      zeros({whole.size(0) / group.size(), whole.numel() / whole.size(0)}, {whole.dtype(), whole.device()});
  const Tensor combined = zeros_like(whole);
  group.reduce_scatter(slice, whole, reduction);
  group.all_gather(combined, slice);
  return combined;
}

Tensor average_over_all(const Group& group, const Tensor& gradient) {
  const Tensor average = clone(gradient);
  group.all_reduce(average);
  return div_(average, group.size());
}

/// Gives `to` what `of` makes of the gradients of `from`, which loses them.
template <class Of>
void hand_over_gradients(const nn::Module& from, const nn::Module& to, Of&& of) {
  const NoGrad guard;
  const std::vector<nn::Parameter> givers = from.parameters(), takers = to.parameters();
  for (std::size_t i = 0; i < givers.size(); ++i) {
    nn::Parameter giver = givers[i], taker = takers[i];
    const Tensor gradient = giver.grad();
    giver.set_grad({});
    taker.set_grad(of(gradient, taker));
  }
}

void copy_values(const nn::Module& from, const nn::Module& to) {
  const NoGrad guard;
  const std::vector<nn::Parameter> givers = from.parameters(), takers = to.parameters();
  for (std::size_t i = 0; i < givers.size(); ++i) copy_(takers[i].local(), givers[i].local());
}

// ---- S3.1, S3.2a, S3.2b ----

/// One step of the sharded model. Gradients of the step before are still there.
Tensor step(Rank& rank, Pair& pair, const Tensor& x, int i, Reshard reshard, DType reduced) {
  pair.optim->zero_grad(zero_mode(i));
  const WatchedCalls calls(rank, reduced);
  const Tensor loss = sum(pair.model(x));
  loss.backward();
  pair.optim->step();

  const bool among_fewer = option_of(reshard).ranks() > 1 && option_of(reshard).ranks() < rank.world();
  rank.check.eq(calls.reduce_scatters(), 3, "reduce_scatters");
  rank.check.eq(calls.gathers(), frees(reshard) && !among_fewer ? 6 : 3, "gathers among all ranks");
  rank.check.eq(calls.smaller_gathers(), among_fewer ? 3 : 0, "gathers among fewer ranks");
  return loss;
}

/// Ten steps of both models, on one input a rank. `reference_loss(x)` leaves averaged gradients in the
/// reference; `after()` follows its step.
template <class Loss, class After>
void train_both(Rank& rank, Pair& pair, const Tensor& x, Reshard reshard, DType reduced,
                const Loss& reference_loss, const After& after) {
  for (int i = 0; i < steps; ++i) {
    const Tensor loss = step(rank, pair, x, i, reshard, reduced);
    pair.reference_optim.zero_grad(zero_mode(i));
    const Tensor expected = reference_loss(x);
    pair.reference_optim.step();
    after();
    rank.check.eq(loss, expected, fmt::format("loss {}", i));
    check_first_loss(rank, loss, i);
    check_sharded_parity(rank, pair.reference, pair.model);
  }
}

/// Computes in bf16; `average` says how the ranks' gradients become one.
template <class Average>
void train_in_bf16(Rank& rank, Reshard reshard, shard::MixedPrecisionPolicy policy, DType reduced,
                   const Average& average) {
  Pair pair(rank, reshard, policy);
  nn::Sequential low = pair.reference.clone();
  low.to(bf16);
  const auto reference_loss = [&](const Tensor& x) {
    const Tensor loss = sum(low(x));
    loss.backward();
    hand_over_gradients(low, pair.reference,
                        [&](const Tensor& gradient, const nn::Parameter&) { return average(gradient); });
    return loss;
  };
  const auto after = [&] { copy_values(pair.reference, low); };
  train_both(rank, pair, input(rank, 4, bf16), reshard, reduced, reference_loss, after);
}

void compute_dtype(Rank& rank, const Reshard& reshard) {
  train_in_bf16(rank, reshard, {.param_dtype = bf16}, bf16, [&](const Tensor& gradient) {
    const Tensor total = combine_by_slices(rank.group(), gradient, ReduceOp::sum());
    return to(div_(total, rank.world()), f32);
  });
}

void fp32_reduce(Rank& rank, const Reshard& reshard) {
  train_in_bf16(rank, reshard, {.param_dtype = bf16, .reduce_dtype = f32}, f32,
                [&](const Tensor& gradient) { return average_over_all(rank.group(), to(gradient, f32)); });
}

void bf16_reduce(Rank& rank, const Reshard& reshard) {
  Pair pair(rank, reshard, {.param_dtype = f32, .reduce_dtype = bf16});
  const auto reference_loss = [&](const Tensor& x) {
    const Tensor loss = sum(pair.reference(x));
    loss.backward();
    const auto average = [&](const Tensor& gradient, const nn::Parameter&) {
      return to(combine_by_slices(rank.group(), to(gradient, bf16), ReduceOp::average()), f32);
    };
    hand_over_gradients(pair.reference, pair.reference, average);
    return loss;
  };
  train_both(rank, pair, input(rank, 4, f32), reshard, bf16, reference_loss, [] {});
}

// ---- S3.3 ----

constexpr int microbatches = 4;

/// Forward and backward on one microbatch.
Tensor accumulate(Rank& rank, nn::Sequential& model, const Tensor& x) {
  const Tensor loss = sum(model(x.detach()));
  rank.check.eq(loss.dtype(), bf16, "dtype of a loss");
  loss.backward();
  return loss;
}

/// The sharded model's microbatch: it averages in the last one only.
Tensor accumulate_sharded(Rank& rank, nn::Sequential& model, const Tensor& x, int microbatch, bool reshard) {
  const bool last = microbatch == microbatches - 1;
  shard::set_requires_gradient_sync(model, last);
  shard::set_reshard_after_backward(model, last || reshard);
  const WatchedCalls calls(rank, f32);
  Tensor loss = accumulate(rank, model, x);
  rank.check.eq(calls.reduce_scatters(), last ? 3 : 0, "reduce_scatters");
  rank.check.eq(calls.gathers(), reshard ? 6 : microbatch == 0 ? 3 : 0, "gathers");
  return loss;
}

/// The first gradient becomes an f32 one, the others are added to it.
void accumulate_in_f32(Rank& rank, const nn::Module& low, const nn::Module& reference) {
  hand_over_gradients(low, reference, [&](const Tensor& gradient, const nn::Parameter& taker) {
    rank.check.eq(gradient.defined(), true, "a gradient of the reference");
    rank.check.eq(taker.local().dtype(), f32, "dtype of the reference");
    return taker.grad().defined() ? add_(taker.grad(), gradient) : to(gradient, f32);
  });
}

void grad_acc_with_reduce_dtype(Rank& rank, bool reshard) {
  Pair pair(rank, reshard, {.param_dtype = bf16, .reduce_dtype = f32});
  nn::Sequential low = pair.reference.clone();
  low.to(bf16);
  const Tensor x = input(rank, 2 * microbatches, bf16);
  for (int i = 0; i < steps; ++i) {
    for (int j = 0; j < microbatches; ++j) {
      const Tensor part = narrow(x, 0, 2 * j, 2);
      const Tensor expected = accumulate(rank, low, part);
      const Tensor loss = accumulate_sharded(rank, pair.model, part, j, reshard);
      rank.check.eq(loss, expected, fmt::format("loss {} of step {}", j, i));
      check_first_loss(rank, loss, i);
      accumulate_in_f32(rank, low, pair.reference);
    }
    hand_over_gradients(pair.reference, pair.reference, [&](const Tensor& gradient, const nn::Parameter&) {
      return average_over_all(rank.group(), gradient);
    });
    check_sharded_parity(rank, pair.reference, pair.model);
    pair.optim->step();
    pair.reference_optim.step();
    pair.optim->zero_grad(zero_mode(i));
    pair.reference_optim.zero_grad(zero_mode(i));
    copy_values(pair.reference, low);
  }
}

}  // namespace

std::vector<Scenario> s3_training() {
  const std::vector<int> worlds = {2, 4};
  const Grid reshard(Axis<Reshard>{"reshard_after_forward", {false, true, 2}});
  const Grid switched(Axis<bool>{"reshard_after_forward", {true, false}});
  return {
      scenario("S3.1", "test_compute_dtype", Harness::processes, worlds, reshard, compute_dtype),
      scenario("S3.2a", "test_reduce_dtype (fp32 reduce)", Harness::processes, worlds, reshard, fp32_reduce),
      scenario("S3.2b", "test_reduce_dtype (bf16 reduce)", Harness::processes, worlds, reshard, bf16_reduce),
      scenario("S3.3", "test_grad_acc_with_reduce_dtype", Harness::processes, worlds, switched,
               grad_acc_with_reduce_dtype),
  };
}

}  // namespace sherd::scenarios
