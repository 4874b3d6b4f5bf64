// S3.4 to S3.7: which casts the per-parameter layout makes around forwards.
#include <array>

#include "runtime/ops.h"
#include "shard/fully_shard.h"
#include "tests/scenarios/models.h"

namespace sherd::scenarios {
namespace {

using shard::MixedPrecisionPolicy;

shard::Options with(const Rank& rank, MixedPrecisionPolicy policy = {}) {
  return {.mesh = rank.mesh, .mixed_precision = policy, .device = compute};
}

// ---- S3.4 ----

struct OneHalf {
  bool module_casts;
  bool first;  ///< c1 has the policy, else c2
  MixedPrecisionPolicy policy;
  DType model, c1, c2;  ///< what they see
};
const std::vector<OneHalf>& one_half_cases() {
  static const std::vector<OneHalf> cases = {
      {false, false, {.param_dtype = f16}, f32, f32, f16},
      {true, false, {.param_dtype = f16, .cast_forward_inputs = false}, f32, f32, f32},
      {false, true, {.param_dtype = f16, .output_dtype = f32}, f32, f16, f32},
  };
  return cases;
}

void float16_on_one_submodule(Rank& rank, int number) {
  const OneHalf& c = one_half_cases()[static_cast<std::size_t>(number - 1)];
  SaveForwardInputsModel model(c.module_casts);
  model.to(compute);
  shard::fully_shard(c.first ? model.c1 : model.c2, with(rank, c.policy));
  shard::fully_shard(model, with(rank));
  sum(model(zeros({2, 100}, {f32, compute}))).backward();
  rank.check.eq(model.inputs->at(&model).dtype(), c.model, "input of the model");
  rank.check.eq(model.inputs->at(&model.c1).dtype(), c.c1, "input of c1");
  rank.check.eq(model.inputs->at(&model.c2).dtype(), c.c2, "input of c2");
}

// ---- S3.5 ----

/// By name: "model.x", "l2.x", "l2.y".
using NamedInputs = std::map<std::string, Tensor>;

struct TwoInputs final : nn::Layer<TwoInputs> {
  nn::Linear l{100, 100};
  std::shared_ptr<NamedInputs> inputs;

  explicit TwoInputs(std::shared_ptr<NamedInputs> inputs) : inputs(std::move(inputs)) {}
  Tensor forward(const Tensor& x, const Tensor& y) const {
    (*inputs)["l2.x"] = x;
    (*inputs)["l2.y"] = y;
    return l(x);
  }
  void visit(auto&& on) { on("l", l); }
};

/// Makes an input of its child itself.
struct ExternalInput final : nn::Layer<ExternalInput> {
  std::shared_ptr<NamedInputs> inputs = std::make_shared<NamedInputs>();
  nn::Linear l1{100, 100};
  TwoInputs l2{inputs};

  Tensor forward(const Tensor& x) const {
    (*inputs)["model.x"] = x;
    const Tensor y = ones({2, 100}, {f32, compute});
    return l2(l1(x), y);
  }
  void visit(auto&& on) {
    on("l1", l1);
    on("l2", l2);
  }
};

void submodules_with_external_inputs(Rank& rank, bool enable_submodule_cast) {
  ExternalInput model;
  model.to(compute);
  shard::fully_shard(model.l2,
                     with(rank, {.param_dtype = f16, .cast_forward_inputs = enable_submodule_cast}));
  shard::fully_shard(model, with(rank, {.param_dtype = f16}));
  sum(model(zeros({2, 100}, {f32, compute}))).backward();
  rank.check.eq(model.inputs->at("model.x").dtype(), f16, "input of the model");
  rank.check.eq(model.inputs->at("l2.x").dtype(), f16, "first input of l2");
  rank.check.eq(model.inputs->at("l2.y").dtype(), enable_submodule_cast ? f16 : f32, "second input of l2");
}

// ---- S3.6 and S3.7 ----

/// In the order of the catalogue.
enum class Norm { layer, batch_1d, batch_2d, batch_2d_low_buffers, batch_2d_in_f32 };
constexpr std::array<std::string_view, 5> norm_names = {
    "LayerNorm", "BatchNorm1d", "BatchNorm2d", "BatchNorm2d with cast statistics", "BatchNorm2d in f32"};
std::string show(Norm norm) { return std::string(norm_names[static_cast<std::size_t>(norm)]); }

/// Three layers on the host, the second a norm; and an input.
struct NormModel {
  nn::Sequential model;
  nn::BatchNorm2d* norm_2d = nullptr;
  Tensor x;

  explicit NormModel(Norm norm) {
    if (norm == Norm::layer || norm == Norm::batch_1d) {
      model.append(nn::Linear(32, 32));
      if (norm == Norm::layer)
        model.append(nn::LayerNorm(32));
      else
        model.append(nn::BatchNorm1d(32));
      model.append(nn::Linear(32, 32));
      x = randn({4, 32});
    } else {
      model.append(nn::Conv2d(1, 5, 3));
      norm_2d = &model.append(nn::BatchNorm2d(5));
      model.append(nn::Conv2d(5, 4, 3));
      x = randn({3, 1, 9, 9});
    }
  }
};

void shard_children_and_root(const Rank& rank, NormModel& m, Norm norm, DType low) {
  const shard::Options options = with(rank, {.param_dtype = low});
  if (norm == Norm::batch_2d_in_f32) {
    shard::fully_shard(m.model[1], with(rank, {.output_dtype = low}));
    for (std::size_t i : {0u, 2u}) shard::fully_shard(m.model[i], options);
  } else {
    for (std::size_t i = 0; i < 3; ++i) shard::fully_shard(m.model[i], options);
  }
  shard::fully_shard(m.model, options);
  if (norm == Norm::batch_2d_low_buffers)
    for (nn::Buffer* buffer : {&m.norm_2d->running_mean, &m.norm_2d->running_var})
      buffer->set(to(buffer->tensor(), low));
}

void norm_modules(Rank& rank, DType low, Norm norm) {
  NormModel m(norm);
  shard_children_and_root(rank, m, norm, low);
  const Tensor z = m.model(m.x);
  rank.check.eq(z.dtype(), low, "dtype of the output");
  rank.check.eq(z.device(), compute, "device of the output");
  rank.check.eq(z.shape(), m.norm_2d != nullptr ? Shape{3, 4, 5, 5} : Shape{4, 32}, "shape of the output");
  std::string error = "none";
  try {
    sum(z).backward();
  } catch (const DTypeError& thrown) {
    error = thrown.what();
  }
  if (norm == Norm::batch_2d)
    rank.check.contains(error, "Expected running_mean to have type", "error");
  else
    rank.check.eq(error, "none", "error");
}
void norm_modules_bf16(Rank& rank, Norm norm) { norm_modules(rank, bf16, norm); }
void norm_modules_fp16(Rank& rank, Norm norm) { norm_modules(rank, f16, norm); }

}  // namespace

std::vector<Scenario> s3_casts() {
  Axis<int> one_half{"case", {}};
  for (std::size_t i = 1; i <= one_half_cases().size(); ++i) one_half.values.push_back(static_cast<int>(i));
  const Axis<bool> cast{"enable_submodule_cast", {false, true}};
  const Axis<Norm> norm{
      "norm",
      {Norm::layer, Norm::batch_1d, Norm::batch_2d, Norm::batch_2d_low_buffers, Norm::batch_2d_in_f32}};
  std::vector<Scenario> list;
  const auto add = [&](std::string id, std::string test, auto axis, auto body) {
    list.push_back(scenario(std::move(id), std::move(test), Harness::threads, {2}, Grid(axis), body));
  };
  add("S3.4", "test_float16_on_one_submodule", one_half, float16_on_one_submodule);
  add("S3.5", "test_submodules_with_external_inputs", cast, submodules_with_external_inputs);
  add("S3.6", "test_norm_modules_bf16", norm, norm_modules_bf16);
  add("S3.7", "test_norm_modules_fp16", norm, norm_modules_fp16);
  return list;
}

}  // namespace sherd::scenarios
