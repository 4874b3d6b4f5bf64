// S5.20 to S5.25: names in forward, gradients without averaging, frozen beside trained parameters, lists of
// empty tensors.
#include "runtime/ops.h"
#include "shard/fully_shard.h"
#include "tests/scenarios/s5_models.h"

namespace sherd::scenarios {
namespace {

using shard::FullyShardedDataParallel;

// ---- S5.20 ----

/// Lists its own parameters during its forward.
struct Lists final : nn::Layer<Lists> {
  nn::Linear lin{5, 5, {.tensor = {f32, compute}}};
  std::vector<nn::NamedParameter> seen{};
  std::vector<Shape> shapes{};

  Tensor forward(const Tensor& x) {
    seen = named_parameters();
    for (const nn::NamedParameter& p : seen) shapes.push_back(p.parameter.data().shape());
    return lin(x);
  }
  void visit(auto&& on) { on("lin", lin); }
};

void named_parameters_in_forward(Rank& rank) {
  Lists model;
  const FullyShardedDataParallel wrapped(model, {.mesh = rank.mesh, .use_orig_params = true});
  check_layout(rank, model, ShardingStrategy::full_shard,
               {{"", 34, {{"lin.weight", 25, 0}, {"lin.bias", 5, 28}}}});
  model(to(randn({2, 5}), compute));
  rank.check.eq(model.seen.size(), 2u, "parameters in forward");
  rank.check.eq(model.seen[0].name, "lin.weight", "first name");
  rank.check.eq(model.seen[1].name, "lin.bias", "second name");
  rank.check.eq(model.shapes[0], {5, 5}, "shape of the weight");
  rank.check.eq(model.shapes[1], {5}, "shape of the bias");
}

// ---- S5.21 and S5.22 ----

/// The same elements of one parameter each: the flat one has padding behind them, and gradients without.
void check_flat_parity(Rank& rank, const nn::Module& flat, const nn::Module& original) {
  rank.check.eq(flat.parameters().size(), 1u, "flat parameters");
  rank.check.eq(original.parameters().size(), 1u, "original parameters");
  const nn::Parameter p1 = flat.parameters()[0], p2 = original.parameters()[0];
  const std::int64_t n = p2.data().numel();
  rank.check.eq(p1.data().numel() >= n, true, "the flat parameter has the elements");
  rank.check.close(narrow(p1.data(), 0, 0, n), flatten(p2.data()), "values");
  const Tensor gradient = p2.grad();
  rank.check.close(reshape(narrow(p1.grad(), 0, 0, gradient.numel()), gradient.shape()), gradient,
                   "gradient");
}

void no_sync_correctness(Rank& rank, ShardingStrategy strategy) {
  nn::Linear flat(7, 1, {.bias = nn::Bias::no, .tensor = {f32, compute}});
  nn::Linear original = flat.clone();
  const auto wrap = [&](nn::Linear& module, bool use_orig_params) {
    return FullyShardedDataParallel(
        module, {.mesh = rank.mesh, .strategy = strategy, .use_orig_params = use_orig_params});
  };
  struct Model {
    nn::Linear& module;
    FullyShardedDataParallel handle;
    nn::AdamW optim;
  };
  std::array models = {Model{flat, wrap(flat, false), {flat.parameters()}},
                       Model{original, wrap(original, true), {original.parameters()}}};
  const bool sharded = strategy != ShardingStrategy::no_shard;
  check_layout(rank, original, strategy, {{"", 8, {{"weight", 7, 0}}}});
  rank.check.eq(flat.parameters()[0].local().numel(), sharded ? 4 : 7, "elements of the flat shard");

  const Tensor x = to(randn({2, 7}), compute), upstream = to(randn({2, 1}), compute);
  const auto backward = [&](Model& m) {
    const Tensor out = m.module(x);
    out.backward(upstream);
    return out;
  };
  const auto zero = [&] {
    for (Model& m : models) m.optim.zero_grad();
  };
  const Tensor out = backward(models[0]);
  rank.check.close(backward(models[1]), out, "output");
  check_flat_parity(rank, flat, original);
  std::vector<Tensor> once;
  for (const Model& m : models) once.push_back(clone(m.module.parameters()[0].grad()));

  zero();
  for (Model& m : models) {
    const shard::NoSync scope = m.handle.no_sync();
    backward(m);
  }
  check_flat_parity(rank, flat, original);
  rank.check.eq(original.weight.grad().shape(), {1, 7}, "gradient without averaging");
  rank.check.eq(flat.parameters()[0].grad().numel(), 7, "flat gradient without averaging");
  rank.check.eq(original.weight.data().shape(), sharded ? Shape{rank.index() == 0 ? 4 : 3} : Shape{1, 7},
                "parameter beside it");
  for (Model& m : models) backward(m);
  check_flat_parity(rank, flat, original);
  for (std::size_t i = 0; i < 2; ++i)
    rank.check.close(models[i].module.parameters()[0].grad(), 2 * once[i], "accumulated gradient");
}

void no_sync_mixed_precision(Rank& rank, ShardingStrategy strategy) {
  nn::Linear model(3, 3, {.tensor = {f32, compute}});
  FullyShardedDataParallel wrapped(model, {.mesh = rank.mesh,
                                           .strategy = strategy,
                                           .mixed_precision = {.param_dtype = f16, .reduce_dtype = f32},
                                           .use_orig_params = true});
  check_layout(rank, model, strategy, {{"", 20, {{"weight", 9, 0}, {"bias", 3, 16}}}});
  const Tensor x = to(randn({2, 3}), compute);
  const auto check_gradients = [&](DType dtype, int count) {
    sum(model(x)).backward();
    int found = 0;
    for (const nn::Parameter& p : model.parameters())
      if (p.grad().defined()) {
        rank.check.eq(p.grad().dtype(), dtype, "dtype of a gradient");
        ++found;
      }
    rank.check.eq(found, count, "gradients");
  };
  {
    const shard::NoSync scope = wrapped.no_sync();
    check_gradients(f16, 2);
    check_gradients(f16, 2);
  }
  // Of two ranks one has the weight, and the other the bias.
  check_gradients(f32, strategy == ShardingStrategy::no_shard ? 2 : 1);
}

// ---- S5.23 ----

void non_uniform_requires_grad(Rank& rank) {
  const nn::LinearOptions on_compute{.tensor = {f32, compute}};
  nn::Sequential model(nn::Linear(3, 3, on_compute), nn::Linear(3, 3, on_compute));
  const auto linear = [&](std::size_t i) -> nn::Linear& { return dynamic_cast<nn::Linear&>(model[i]); };
  for (const std::size_t i : {0, 1}) nn::Parameter(linear(i).bias.object()).set_requires_grad(false);
  const FullyShardedDataParallel wrapped(model, {.mesh = rank.mesh, .use_orig_params = true});
  check_layout(rank, model, ShardingStrategy::full_shard,
               {{"", 32, {{"0.weight", 9, 0}, {"0.bias", 3, 12}, {"1.weight", 9, 16}, {"1.bias", 3, 28}}}});
  for (const std::size_t i : {0, 1}) {
    rank.check.eq(linear(i).weight.object().requires_grad(), true, "the weight is trained");
    rank.check.eq(linear(i).bias.object().requires_grad(), false, "the bias is trained");
  }
}

// ---- S5.24 and S5.25 ----

/// The library's list ops are those of the optimizers. This decay is a multiplication by 0.1.
auto multi_tensor_apply_size0_tensors(Device device) {
  return [device](Rank& rank) {
    std::vector<nn::Parameter> parameters;
    for (int i = 0; i < 1000; ++i) parameters.emplace_back(zeros({0}, {f32, device}));
    const nn::Parameter& last = parameters.emplace_back(ones({2}, {f32, device}));
    for (nn::Parameter& p : parameters) p.set_grad(zeros_like(p.data()));
    nn::AdamW(parameters, {.lr = 0.5, .weight_decay = 1.8}).step();
    rank.check.close(last.data(), full({2}, 0.1, {f32, device}), "the one that is not empty");
    nn::Sgd(parameters, {.lr = 0.5}).step();
    nn::clip_grad_norm_(parameters, 1);
    for (const nn::Parameter& p : parameters) rank.check.eq(p.data().device(), device, "device");
  };
}

/// Why nothing can be made on `device`; empty where that can.
std::string why_not(Device device) {
  try {
    zeros({1}, {f32, device});
    return {};
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace

std::vector<Scenario> s5_views() {
  using enum ShardingStrategy;
  const Grid all = strategies({full_shard, shard_grad_op, no_shard});
  std::vector<Scenario> list;
  const auto add = [&](std::string id, std::string test, Harness harness, std::vector<int> worlds, auto grid,
                       auto body) {
    list.push_back(scenario(std::move(id), std::move(test), harness, std::move(worlds), grid, body));
  };
  add("S5.20", "test_named_parameters_in_forward", Harness::processes, {2, 4}, Grid<>(),
      named_parameters_in_forward);
  add("S5.21", "test_no_sync_correctness", Harness::processes, {2}, all, no_sync_correctness);
  add("S5.22", "test_no_sync_mixed_precision", Harness::processes, {2}, all, no_sync_mixed_precision);
  add("S5.23", "test_non_uniform_requires_grad", Harness::processes, {2, 4}, Grid<>(),
      non_uniform_requires_grad);
  add("S5.24", "test_multi_tensor_apply_size0_tensors_cpu", Harness::threads, {1}, Grid<>(),
      multi_tensor_apply_size0_tensors(Device::cpu()));
  add("S5.25", "test_multi_tensor_apply_size0_tensors_cuda", Harness::threads, {1}, Grid<>(),
      multi_tensor_apply_size0_tensors(Device::cuda(0)));
  list.back().not_here = why_not(Device::cuda(0));
  return list;
}

}  // namespace sherd::scenarios
