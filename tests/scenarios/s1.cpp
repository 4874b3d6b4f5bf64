// S1: which dtype every module sees, for every mix of the flat layout's two cast flags.
#include <array>
#include <optional>

#include "runtime/ops.h"
#include "shard/fully_shard.h"
#include "tests/scenarios/models.h"

namespace sherd::scenarios {
namespace {

struct Expected {
  bool cast_root, cast, use_root_no_params;
  DType model, c1;
  std::optional<DType> c2;  ///< none: an error was thrown before it ran
};
constexpr std::array<Expected, 8> table = {{
    {true, true, true, f16, f16, f16},
    {true, true, false, f32, f32, f16},
    {true, false, true, f16, f16, f16},
    {true, false, false, f32, f32, f16},
    {false, true, true, f32, f16, f16},
    {false, true, false, f32, f32, f16},
    {false, false, true, f32, f32, std::nullopt},
    {false, false, false, f32, f32, f32},
}};

const Expected& expected(bool cast_root, bool cast, bool use_root_no_params) {
  for (const Expected& e : table)
    if (e.cast_root == cast_root && e.cast == cast && e.use_root_no_params == use_root_no_params) return e;
  fail<InternalError>("S1.1: the table lacks a combination");
}

void shard_model(Rank& rank, SaveForwardInputsModel& model, const Expected& e) {
  shard::Options plain{.mesh = rank.mesh, .layout = shard::GroupLayout::flat, .device = compute};
  shard::Options half = plain;
  half.mixed_precision = {
      .param_dtype = f16, .cast_forward_inputs = e.cast, .cast_root_forward_inputs = e.cast_root};
  shard::fully_shard(model.c2, half);
  if (e.use_root_no_params) shard::fully_shard(model.c1, half);
  shard::fully_shard(model, e.use_root_no_params ? half : plain);
}

/// Each child's parameters are one flat parameter, without padding, cut in halves.
void check_layout(Rank& rank, SaveForwardInputsModel& model) {
  const std::vector<shard::GroupReport> groups = shard::groups_of(model);
  rank.check.eq(groups.size(), 2u, "groups");
  for (const shard::GroupReport& group : groups) {
    rank.check.eq(group.dtype, f32, "stored dtype");
    rank.check.eq(group.gathered_numel, 10100, "elements of the flat parameter");
    rank.check.eq(group.shard_numel, 5050, "elements of the shard");
  }
}

void float16_cast_forward(Rank& rank, bool cast_root, bool cast, bool use_root_no_params) {
  const Expected& e = expected(cast_root, cast, use_root_no_params);
  SaveForwardInputsModel model(false);
  model.to(compute);
  shard_model(rank, model, e);
  check_layout(rank, model);

  const Tensor x = zeros({2, 100}, {f32, compute});
  std::string error = "none";
  try {
    sum(model(x)).backward();
  } catch (const DTypeError& thrown) {
    error = thrown.what();
  }
  if (cast_root || cast)
    rank.check.eq(error, "none", "error");
  else
    rank.check.contains(error, "mat1 and mat2 must have the same dtype", "error");

  const ForwardInputs& seen = *model.inputs;
  rank.check.eq(seen.at(&model).dtype(), e.model, "input of the model");
  rank.check.eq(seen.at(&model.c1).dtype(), e.c1, "input of c1");
  rank.check.eq(seen.contains(&model.c2), e.c2.has_value(), "c2 ran");
  if (e.c2) rank.check.eq(seen.at(&model.c2).dtype(), *e.c2, "input of c2");
}

}  // namespace

std::vector<Scenario> s1() {
  const Axis<bool> cast_root{"cast_root_forward_inputs", {true, false}};
  const Axis<bool> cast{"cast_forward_inputs", {true, false}};
  const Axis<bool> use_root_no_params{"use_root_no_params", {true, false}};
  return {scenario("S1.1", "test_float16_cast_forward", Harness::processes, {2},
                   Grid(cast_root, cast, use_root_no_params), float16_cast_forward)};
}

}  // namespace sherd::scenarios
