// S5.15 to S5.19: parameters and gradients that the program replaces, and where nothing was replaced.
#include "runtime/ops.h"
#include "shard/fully_shard.h"
#include "shard/sharded_state.h"
#include "shard/summon.h"
#include "tests/message_of.h"
#include "tests/scenarios/s5_models.h"

namespace sherd::scenarios {
namespace {

using shard::FullyShardedDataParallel;

/// One unit of all parameters, beside replicas.
struct Both {
  Replicas<TwoLinears> replicas;
  TwoLinears model;
  FullyShardedDataParallel wrapped;
  explicit Both(Rank& rank)
      : replicas(rank, TwoLinears()), wrapped(model, {.mesh = rank.mesh, .use_orig_params = true}) {
    check_layout(
        rank, model, ShardingStrategy::full_shard,
        {{"",
          80,
          {{"lin1.weight", 25, 0}, {"lin1.bias", 5, 28}, {"lin2.weight", 35, 36}, {"lin2.bias", 7, 72}}}});
  }
};

nn::Param& weight_of(TwoLinears& model, bool first) { return first ? model.lin1.weight : model.lin2.weight; }

Tensor twos_like(const nn::Param& p) {
  const Tensor now = p.data();
  return full(now.shape(), 2, {now.dtype(), now.device()});
}

// ---- S5.15 ----

void param_writeback(Rank& rank, bool change_first_weight, bool change_data) {
  Both both(rank);
  for (TwoLinears* model : {&both.replicas.model, &both.model}) {
    nn::Param& weight = weight_of(*model, change_first_weight);
    if (change_data)
      weight.set_data(twos_like(weight));
    else
      weight = nn::Parameter(twos_like(weight));
  }
  check_parameters(rank, both.replicas.model, both.model);
}

// ---- S5.16 ----

/// What a gradient becomes: other memory for the gradient that is there, or another one.
enum class Change { data, value, none };
std::string show(Change change) {
  return change == Change::data ? "data" : change == Change::value ? "value" : "none";
}

void grad_writeback(Rank& rank, bool change_first_weight_grad, Change change) {
  Both both(rank);
  TwoLinears &reference = both.replicas.model, &model = both.model;
  nn::Adam reference_optim(reference.parameters(), {.lr = 1e-2}), optim(model.parameters(), {.lr = 1e-2});
  const auto backward_both = [&] {
    const Tensor x = input_of_linears();
    const std::array outputs = {reference(x), model(x)};
    for (const Tensor& output : outputs) sum(output).backward();
  };
  const auto step_both = [&](std::string_view) {
    reference_optim.step();
    optim.step();
    check_parameters(rank, reference, model);
  };
  backward_both();
  for (TwoLinears* m : {&reference, &model}) {
    nn::Param& weight = weight_of(*m, change_first_weight_grad);
    if (change == Change::data && !weight.grad().defined()) continue;
    weight.set_grad(change == Change::none ? Tensor() : twos_like(weight));
  }
  step_both("the step");
  // Not cleared: what was set, or was not, is added to.
  backward_both();
  step_both("the step after it");
}

// ---- S5.17 ----

void writeback_shape_mismatch(Rank& rank) {
  Both both(rank);
  // Each rank changes what it has itself.
  nn::Param& weight = weight_of(both.model, rank.index() == 0);
  const std::int64_t owned = weight.data().numel();
  rank.check.eq(owned, rank.index() == 0 ? 25 : 31, "elements of this rank");
  weight = nn::Parameter(to(randn({owned + 1}), compute));
  weight.set_grad(to(randn({owned + 1}), compute));
  const std::string error =
      test::message_of<ShapeError>([&] { const shard::SummonFullParams scope(both.model); });
  rank.check.contains(error, "Cannot writeback when the parameter shape changes", "error");
  rank.check.contains(error, fmt::format("Expects {} but got {}", Shape{owned}, Shape{owned + 1}), "error");
}

// ---- S5.18 ----

/// Of a parameter that is put in another's place.
enum class Replaced { data, object };
std::string show(Replaced replaced) { return replaced == Replaced::data ? "data" : "object"; }

void writeback_between_fwd_and_bwd(Rank& rank, Replaced replaced) {
  TwoLinears model;
  const FullyShardedDataParallel wrapped(model, {.mesh = rank.mesh,
                                                 .strategy = ShardingStrategy::shard_grad_op,
                                                 .auto_wrap = shard::wrap_classes({"Linear"}),
                                                 .use_orig_params = true});
  check_layout(rank, model, ShardingStrategy::shard_grad_op,
               {{"lin1", 34, {{"weight", 25, 0}, {"bias", 5, 28}}},
                {"lin2", 44, {{"weight", 35, 0}, {"bias", 7, 36}}}});
  const Tensor loss = sum(model(input_of_linears()));
  nn::Param& weight = model.lin1.weight;
  rank.check.eq(weight.data().shape(), {5, 5}, "shape between forward and backward");
  if (replaced == Replaced::data)
    weight.set_data(clone(weight.data()));
  else
    weight = nn::Parameter(clone(weight.data()));
  const std::string error = test::message_of<StateError>([&] { loss.backward(); });
  rank.check.contains(
      error, "FSDP does not support changing the parameters between forward and backward for ", "error");
  rank.check.contains(error, "SHARD_GRAD_OP", "error");
}

// ---- S5.19 ----

void no_reshard_and_mixed_precision(Rank& rank, bool use_full_prec_in_eval) {
  TwoLinears model;
  const FullyShardedDataParallel wrapped(
      model, {.mesh = rank.mesh,
              .strategy = ShardingStrategy::shard_grad_op,
              .auto_wrap = shard::wrap_classes({"Linear"}),
              .mixed_precision = {.param_dtype = f16,
                                  .evaluation = use_full_prec_in_eval ? shard::Precision::full
                                                                      : shard::Precision::reduced},
              .use_orig_params = true});
  check_layout(rank, model, ShardingStrategy::shard_grad_op,
               {{"lin1", 38, {{"weight", 25, 0}, {"bias", 5, 32}}},
                {"lin2", 48, {{"weight", 35, 0}, {"bias", 7, 40}}}});
  const Tensor x = input_of_linears();
  const DType evaluated = use_full_prec_in_eval ? f32 : f16;
  const auto forward = [&](DType dtype) {
    const Tensor loss = sum(model(x));
    rank.check.eq(loss.dtype(), dtype, "dtype of a loss");
    return loss;
  };
  const Tensor once = forward(f16);
  {
    const shard::SummonFullParams scope(model);
  }
  rank.check.same(forward(f16), once, "loss after summoning");

  model.train();
  forward(f16);
  model.eval();
  forward(evaluated);

  model.train();
  forward(f16).backward();
  model.eval();
  const Tensor before = forward(evaluated);
  const shard::ShardedStateDict state = shard::sharded_state_dict(model);
  shard::load_sharded_state_dict(model, state, rank.group());
  const Tensor loss = forward(evaluated);
  rank.check.same(loss, before, "loss after loading");
  loss.backward();
}

}  // namespace

std::vector<Scenario> s5_writeback() {
  std::vector<Scenario> list;
  const auto add = [&](std::string id, std::string test, auto grid, auto body) {
    list.push_back(scenario(std::move(id), std::move(test), Harness::processes, {2}, grid, body));
  };
  add("S5.15", "test_param_writeback",
      Grid(Axis<bool>{"change_first_weight", {true, false}}, Axis<bool>{"change_data", {true, false}}),
      param_writeback);
  // A gradient's memory cannot become none.
  add("S5.16", "test_grad_writeback",
      Grid(Axis<bool>{"change_first_weight_grad", {false, true}},
           Axis<Change>{"change", {Change::value, Change::none, Change::data}}),
      grad_writeback);
  add("S5.17", "test_writeback_shape_mismatch", Grid<>(), writeback_shape_mismatch);
  add("S5.18", "test_writeback_between_fwd_and_bwd_for_no_reshard_raises",
      Grid(Axis<Replaced>{"replaced", {Replaced::data, Replaced::object}}), writeback_between_fwd_and_bwd);
  add("S5.19", "test_no_reshard_and_mixed_precision",
      Grid(Axis<bool>{"use_full_prec_in_eval", {false, true}}), no_reshard_and_mixed_precision);
  return list;
}

}  // namespace sherd::scenarios
