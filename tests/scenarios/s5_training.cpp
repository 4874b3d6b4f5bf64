// S5.2 to S5.9: training with groups of hyperparameters on original parameters, beside replicas.
#include "runtime/ops.h"
#include "tests/scenarios/s5_models.h"

namespace sherd::scenarios {
namespace {

/// Whether the model is moved to the compute device before it is sharded, or after.
enum class Moved { before, after };
enum class OptimClass { adam, adam_w };
/// When a backward gathers the next unit: when it is needed, before the gradients of this one, or after them.
enum class Prefetch { none, pre, post };

std::string show(Moved moved) { return moved == Moved::before ? "before" : "after"; }
std::string show(OptimClass c) { return c == OptimClass::adam ? "Adam" : "AdamW"; }
std::string show(Prefetch p) { return p == Prefetch::none ? "none" : p == Prefetch::pre ? "pre" : "post"; }

/// Weights, biases, and others, of which the model has none.
std::vector<nn::ParamGroup> groups_of(const nn::Module& module) {
  std::vector<nn::ParamGroup> groups = {
      {.params = {}, .lr = 1e-2, .weight_decay = 0.1}, {.params = {}, .lr = 1e-3, .weight_decay = 0.01}, {}};
  for (const nn::NamedParameter& p : module.named_parameters()) {
    const auto has = [&](std::string_view part) { return p.name.find(part) != std::string::npos; };
    groups[has("weight") ? 0 : has("bias") ? 1 : 2].params.push_back(p.parameter);
  }
  return groups;
}

shard::BackwardPrefetch option_of(Prefetch p) {
  if (p == Prefetch::none) return shard::BackwardPrefetch::none();
  return p == Prefetch::pre ? shard::BackwardPrefetch::pre() : shard::BackwardPrefetch::post();
}

using Optim = std::unique_ptr<nn::Optimizer>;
Optim make_optim(const nn::Module& module, OptimClass c, bool multi_tensor) {
  if (c == OptimClass::adam)
    return std::make_unique<nn::Adam>(groups_of(module),
                                      nn::AdamOptions{.lr = 5e-3, .foreach = multi_tensor});
  return std::make_unique<nn::AdamW>(groups_of(module),
                                     nn::AdamWOptions{.lr = 5e-3, .foreach = multi_tensor});
}

struct Setup {
  ShardingStrategy strategy;
  Moved moved = Moved::before;
  bool optim_before_wrap = false;
  OptimClass optim_class = OptimClass::adam;
  bool multi_tensor = false;
  Prefetch prefetch = Prefetch::pre;
  bool offload = false;
  bool skip_writeback_check = false;
};

/// The transformer, replicated and sharded, with an optimizer each.
struct Both {
  Replicas<TransformerWithSharedParams> replicas;
  Optim replicas_optim;
  TransformerWithSharedParams model;
  Optim optim;
  bool offload;

  Both(Rank& rank, const Setup& setup)
      : replicas(rank, make_transformer(compute)),
        replicas_optim(make_optim(replicas.model, setup.optim_class, setup.multi_tensor)),
        model(make_transformer(setup.moved == Moved::before ? compute : host)),
        offload(setup.offload) {
    const auto make = [&] { optim = make_optim(model, setup.optim_class, setup.multi_tensor); };
    if (setup.optim_before_wrap) make();
    const shard::FsdpOptions options{.mesh = rank.mesh,
                                     .strategy = setup.strategy,
                                     .auto_wrap = wrap_layers(),
                                     .writeback_check = setup.skip_writeback_check
                                                            ? shard::WritebackCheck::off
                                                            : shard::WritebackCheck::on,
                                     .device = offload ? std::optional(compute) : std::nullopt,
                                     .cpu_offload = offload,
                                     .use_orig_params = true,
                                     .backward_prefetch = option_of(setup.prefetch)};
    const shard::FullyShardedDataParallel wrapped(model, options);
    if (!setup.optim_before_wrap) make();
    if (setup.moved == Moved::after) model.to(compute);
    rank.check.eq(optim->group_count(), 3u, "groups");
    rank.check.eq(optim->parameters(2).size(), 0u, "parameters of the last group");
    check_layout(rank, model, setup.strategy, transformer_units());
  }
};

// ---- S5.2 to S5.8 ----

/// Ten steps of both. Even ones clear gradients before the forward, odd ones between it and the backward.
void check_training(Rank& rank, Both& both, nn::ZeroGrad zero) {
  const auto step = [&](const TransformerWithSharedParams& model, nn::Optimizer& optim, int i, bool moves) {
    if (i % 2 == 0) optim.zero_grad(zero);
    const Tokens tokens;
    const Tensor loss = loss_of(tokens, model(tokens.src, tokens.tgt));
    if (i % 2 == 1) optim.zero_grad(zero);
    loss.backward();
    if (moves) both.replicas.model.to(host);
    optim.step();
    if (moves) both.replicas.model.to(compute);
    return loss;
  };
  for (int i = 0; i < 10; ++i) {
    const Tensor expected = step(both.replicas.model, *both.replicas_optim, i, both.offload);
    rank.check.same(step(both.model, *both.optim, i, false), expected, fmt::format("loss {}", i));
  }
  check_parameters(rank, both.replicas.model, both.model);
}

nn::ZeroGrad zero_mode(bool set_to_none) {
  return set_to_none ? nn::ZeroGrad::to_none : nn::ZeroGrad::to_zero;
}

auto diff_hyperparams(ShardingStrategy strategy) {
  return [strategy](Rank& rank, Moved moved, bool optim_before_wrap, OptimClass optim_class,
                    bool multi_tensor, bool set_to_none, Prefetch prefetch, bool skip_writeback_check) {
    Both both(rank, {.strategy = strategy,
                     .moved = moved,
                     .optim_before_wrap = optim_before_wrap,
                     .optim_class = optim_class,
                     .multi_tensor = multi_tensor,
                     .prefetch = prefetch,
                     .skip_writeback_check = skip_writeback_check});
    check_training(rank, both, zero_mode(set_to_none));
  };
}

auto diff_hyperparams_cpu_offload(ShardingStrategy strategy) {
  return [strategy](Rank& rank, bool skip_writeback_check) {
    Both both(rank, {.strategy = strategy, .offload = true, .skip_writeback_check = skip_writeback_check});
    for (const nn::Parameter& p : both.model.parameters())
      rank.check.eq(p.local().device(), host, "device of a parameter");
    check_training(rank, both, nn::ZeroGrad::to_zero);
    for (const nn::Parameter& p : both.model.parameters())
      if (p.grad().defined()) rank.check.eq(p.grad().device(), host, "device of a gradient");
  };
}

void diff_trainability(Rank& rank, bool multi_tensor, ShardingStrategy strategy) {
  Both both(rank, {.strategy = strategy, .multi_tensor = multi_tensor});
  const auto biases = [](const nn::Module& module, auto&& act) {
    for (const nn::NamedParameter& p : module.named_parameters())
      if (p.name.find("bias") != std::string::npos) act(p.name, nn::Parameter(p.parameter));
  };
  const auto freeze = [](const std::string&, nn::Parameter p) { p.set_requires_grad(false); };
  biases(both.replicas.model, freeze);
  biases(both.model, freeze);
  const nn::StateDict before = shard::full_state_dict(both.model);
  check_training(rank, both, nn::ZeroGrad::to_zero);
  biases(both.model, [&](const std::string& name, const nn::Parameter& p) {
    rank.check.eq(p.grad().defined(), false, name + " has a gradient");
  });
  const nn::StateDict after = shard::full_state_dict(both.model);
  for (std::size_t i = 0; i < before.size(); ++i)
    if (before[i].first.find("bias") != std::string::npos)
      rank.check.same(after[i].second, before[i].second, before[i].first);
}

// ---- S5.9 ----

/// The number of elements that this rank has of some parameter of `unit` whose name has `part` in it.
bool owns(const shard::GroupReport& unit, int rank, std::string_view part) {
  return std::ranges::any_of(unit.parameters, [&](const shard::ParameterReport& p) {
    return p.name.find(part) != std::string::npos && p.owned_numels[static_cast<std::size_t>(rank)] > 0;
  });
}

/// One optimizer for weights and another for biases; rates and decays are the optimizers' own.
struct TwoOptims {
  nn::Adam weights;
  nn::AdamW biases;
  explicit TwoOptims(const nn::Module& module)
      : weights(groups_of(module)[0].params, {.lr = 5e-3}),
        biases(groups_of(module)[1].params, {.lr = 1e-2}) {}
  void step() {
    weights.step();
    biases.step();
  }
};

void multiple_optimizers(Rank& rank, ShardingStrategy strategy) {
  Both both(rank, {.strategy = strategy});
  TransformerWithSharedParams &reference = both.replicas.model, &model = both.model;
  rank.check.eq(groups_of(reference).size(), 3u, "groups");
  TwoOptims reference_optims(reference), optims(model);
  rank.check.eq(std::ranges::any_of(shard::groups_of(model),
                                    [&](const shard::GroupReport& unit) {
                                      return owns(unit, rank.index(), "weight") &&
                                             owns(unit, rank.index(), "bias");
                                    }),
                true, "a unit with both weights and biases");

  const Tokens tokens;
  const auto forward = [&](const TransformerWithSharedParams& m) {
    return loss_of(tokens, m(tokens.src, tokens.tgt));
  };
  const auto iterate = [&](std::string_view when) {
    std::vector<Tensor> losses;
    for (const auto& [m, o] : {std::pair(&reference, &reference_optims), std::pair(&model, &optims)}) {
      losses.push_back(forward(*m));
      losses.back().backward();
      o->step();
    }
    rank.check.same(losses[1], losses[0], fmt::format("{} loss", when));
    check_parameters(rank, reference, model);
  };
  iterate("first");

  reference_optims.weights.zero_grad(nn::ZeroGrad::to_none);
  optims.weights.zero_grad(nn::ZeroGrad::to_none);
  const Tensor expected = forward(reference), loss = forward(model);
  // Gradients are not shown between forward and backward there: this step is left as it is.
  if (strategy == ShardingStrategy::shard_grad_op) return;

  const std::vector<nn::NamedParameter> whole = reference.named_parameters(),
                                        parts = model.named_parameters();
  rank.check.eq(parts.size(), whole.size(), "parameters");
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const nn::Parameter &p1 = whole[i].parameter, &p2 = parts[i].parameter;
    rank.check.eq(parts[i].name, whole[i].name, "name");
    if (p2.data().numel() == 0 || !p1.grad().defined()) {
      rank.check.eq(p2.grad().defined(), false, parts[i].name + " has a gradient");
    } else {
      rank.check.same(flatten(p2.data()), flatten(p1.data()), parts[i].name);
      rank.check.same(flatten(p2.grad()), flatten(p1.grad()), parts[i].name + "'s gradient");
    }
  }
  check_parameters(rank, reference, model);

  rank.check.same(loss, expected, "second loss");
  expected.backward();
  loss.backward();
  reference_optims.step();
  optims.step();
  check_parameters(rank, reference, model);
  iterate("third");  // and adds to what was not cleared
}

}  // namespace

std::vector<Scenario> s5_training() {
  const auto& [full_shard, shard_grad_op, no_shard] =
      std::tuple{ShardingStrategy::full_shard, ShardingStrategy::shard_grad_op, ShardingStrategy::no_shard};
  const Grid hyperparams(Axis<Moved>{"cuda_init_mode", {Moved::before, Moved::after}},
                         Axis<bool>{"init_optim_before_wrap", {false, true}},
                         Axis<OptimClass>{"optim_class", {OptimClass::adam_w}},
                         Axis<bool>{"multi_tensor", {false, true}}, Axis<bool>{"set_to_none", {false, true}},
                         Axis<Prefetch>{"backward_prefetch", {Prefetch::none, Prefetch::pre, Prefetch::post}},
                         Axis<bool>{"skip_writeback_check", {false, true}});
  const Grid skip(Axis<bool>{"skip_writeback_check", {false, true}});
  const Grid trainability(Axis<bool>{"multi_tensor", {false, true}},
                          Axis<ShardingStrategy>{"sharding_strategy", {full_shard, shard_grad_op, no_shard}});
  const Grid kept(Axis<ShardingStrategy>{"sharding_strategy", {full_shard, shard_grad_op}});
  std::vector<Scenario> list;
  const auto add = [&](std::string id, std::string test, auto grid, auto body) {
    list.push_back(scenario(std::move(id), std::move(test), Harness::processes, {2}, grid, body));
  };
  add("S5.2", "test_diff_hyperparams [no_shard]", hyperparams, diff_hyperparams(no_shard));
  add("S5.3", "test_diff_hyperparams [shard_grad_op]", hyperparams, diff_hyperparams(shard_grad_op));
  add("S5.4", "test_diff_hyperparams [full_shard]", hyperparams, diff_hyperparams(full_shard));
  add("S5.5", "test_diff_hyperparams_cpu_offload [no_shard]", skip, diff_hyperparams_cpu_offload(no_shard));
  add("S5.6", "test_diff_hyperparams_cpu_offload [shard_grad_op]", skip,
      diff_hyperparams_cpu_offload(shard_grad_op));
  add("S5.7", "test_diff_hyperparams_cpu_offload [full_shard]", skip,
      diff_hyperparams_cpu_offload(full_shard));
  add("S5.8", "test_diff_trainability", trainability, diff_trainability);
  add("S5.9", "test_multiple_optimizers", kept, multiple_optimizers);
  return list;
}

}  // namespace sherd::scenarios
