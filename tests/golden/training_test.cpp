// Optimizers, clipping, the schedule and a small Gpt, step by step against PyTorch.
#include <functional>

#include "nn/gpt.h"
#include "nn/optimizer.h"
#include "nn/schedules.h"
#include "nn/state_file.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "tests/catch.h"
#include "tests/golden/golden.h"

namespace sherd::test {
namespace {

using nlohmann::json;
using nn::Optimizer;
using nn::Parameter;
using nn::ParamGroup;

std::string numbered(const char* prefix, std::size_t i) { return prefix + std::to_string(i); }

std::vector<Parameter> copies(const std::vector<Tensor>& tensors) {
  std::vector<Parameter> params;
  for (const Tensor& tensor : tensors) params.emplace_back(clone(tensor));
  return params;
}

double number_of(const json& value) { return value.is_boolean() ? value.get<bool>() : value.get<double>(); }

std::vector<ParamGroup> groups_of(const GoldenCase& golden, const std::vector<Parameter>& params) {
  std::vector<ParamGroup> groups;
  for (const json& about : golden.args.at("groups")) {
    ParamGroup& group = groups.emplace_back();
    for (const std::size_t member : about.at("members")) group.params.push_back(params.at(member));
    for (const auto& [name, value] : about.items())
      if (name != "members") group.options[name] = number_of(value);
  }
  return groups;
}

template <class O, class Options>
std::unique_ptr<Optimizer> make_adam(std::vector<ParamGroup> groups, const json& d) {
  Options options;
  options.lr = d.at("lr");
  options.beta1 = d.at("betas").at(0);
  options.beta2 = d.at("betas").at(1);
  options.eps = d.at("eps");
  options.weight_decay = d.at("weight_decay");
  return std::make_unique<O>(std::move(groups), options);
}

std::unique_ptr<Optimizer> make_sgd(std::vector<ParamGroup> groups, const json& d) {
  nn::SgdOptions options;
  options.lr = d.at("lr");
  options.momentum = d.at("momentum");
  options.weight_decay = d.at("weight_decay");
  options.dampening = d.at("dampening");
  options.nesterov = d.at("nesterov");
  return std::make_unique<nn::Sgd>(std::move(groups), options);
}

std::unique_ptr<Optimizer> make_rmsprop(std::vector<ParamGroup> groups, const json& d) {
  return std::make_unique<nn::Rmsprop>(std::move(groups),
                                       nn::RmspropOptions{.lr = d.at("lr"),
                                                          .alpha = d.at("alpha"),
                                                          .eps = d.at("eps"),
                                                          .weight_decay = d.at("weight_decay"),
                                                          .momentum = d.at("momentum"),
                                                          .centered = d.at("centered")});
}

using Make = std::function<std::unique_ptr<Optimizer>(std::vector<ParamGroup>, const json& defaults)>;
const std::map<std::string, Make> optimizers{{"Adam", make_adam<nn::Adam, nn::AdamOptions>},
                                             {"AdamW", make_adam<nn::AdamW, nn::AdamWOptions>},
                                             {"SGD", make_sgd},
                                             {"RMSprop", make_rmsprop}};

/// Sets the gradients of `step`; none where the case says so.
void set_grads(const GoldenCase& golden, std::vector<Parameter>& params, std::int64_t step) {
  for (std::size_t i = 0; i < params.size(); ++i) {
    const json steps = golden.args.at("absent").value(std::to_string(i), json::array());
    const bool absent = std::find(steps.begin(), steps.end(), step) != steps.end();
    params[i].set_grad(absent ? Tensor() : clone(select(golden.find(numbered("grads", i)), 0, step)));
  }
}

void check_optimizer(const GoldenCase& golden) {
  std::vector<Parameter> params = copies(golden.list("in"));
  std::vector<ParamGroup> groups = groups_of(golden, params);
  const std::int64_t late = golden.args.value("late", -1);
  const auto optimizer =
      optimizers.at(golden.op)(late < 0 ? groups : std::vector{groups[0]}, golden.args.at("defaults"));
  std::vector<double> rates;
  for (std::size_t g = 0; g < optimizer->group_count(); ++g) rates.push_back(optimizer->lr(g));
  for (std::int64_t step = 0; step < golden.find("out0").size(0); ++step) {
    for (std::size_t g = 0; g < rates.size() && golden.args.contains("rates"); ++g)
      optimizer->set_lr(g,
                        rates[g] * golden.args.at("rates").at(static_cast<std::size_t>(step)).get<double>());
    if (step == late) optimizer->add_param_group(groups[1]);
    for (const json& change : golden.args.value("changes", json::array()))
      if (change.at("step") == step)
        optimizer->set_option(change.at("group").get<std::size_t>(), change.at("option").get<std::string>(),
                              number_of(change.at("value")));
    set_grads(golden, params, step);
    optimizer->step();
    for (std::size_t i = 0; i < params.size(); ++i) {
      INFO("step " << step << ", parameter " << i);
      CHECK(difference(params[i].data(), select(golden.find(numbered("out", i)), 0, step),
                       golden.tolerance) == "");
    }
  }
}

void check_clipping(const GoldenCase& golden) {
  std::vector<Parameter> params = copies(golden.list("in"));
  for (std::size_t i = 0; i < params.size(); ++i) {
    if (golden.has(numbered("grads", i))) params[i].set_grad(clone(golden.find(numbered("grads", i))));
  }
  const Tensor norm = nn::clip_grad_norm_(params, golden.args.at("max_norm"));
  CHECK(difference(norm, golden.find("norm"), golden.tolerance) == "");
  for (std::size_t i = 0; i < params.size(); ++i) {
    INFO("parameter " << i);
    const Tensor expected = golden.find(numbered("clipped", i));
    if (expected.defined())
      CHECK(difference(params[i].grad(), expected, golden.tolerance) == "");
    else
      CHECK(!params[i].grad().defined());
  }
}

void check_schedule(const GoldenCase& golden) {
  nn::CosineSchedule schedule;
  schedule.lr = golden.args.at("lr");
  schedule.min_lr = golden.args.at("min_lr");
  schedule.warmup = golden.args.at("warmup");
  schedule.steps = golden.args.at("steps");
  const auto steps = golden.find("in0").to_vector<std::int64_t>();
  const auto rates = golden.find("out0").to_vector<double>();
  for (std::size_t i = 0; i < steps.size(); ++i) CHECK(schedule(steps[i]) == Approx(rates[i]).epsilon(1e-12));
}

// ---- the small Gpt ----

nn::Gpt load_gpt(const json& o, DType dtype, Device device = Device::cpu()) {
  nn::GptOptions options;
  options.layers = o.at("layers");
  options.heads = o.at("heads");
  options.width = o.at("width");
  options.context = o.at("context");
  options.vocab = o.at("vocab");
  nn::Gpt model(options);
  model.to(dtype);
  model.load_state_dict(nn::load_state(golden_path("gpt_weights")));
  model.to(device);
  return model;
}

nn::AdamW adamw_for(const nn::Gpt& model, const json& training) {
  ParamGroup matrices{{}, std::nullopt, training.at("weight_decay").get<double>()},
      vectors{{}, std::nullopt, 0.0};
  for (const Parameter& p : model.parameters())
    (p.shape().rank() >= 2 ? matrices : vectors).params.push_back(p);
  nn::AdamWOptions options;
  options.lr = training.at("lr");
  options.beta1 = training.at("beta1");
  options.beta2 = training.at("beta2");
  options.eps = training.at("eps");
  return nn::AdamW({std::move(matrices), std::move(vectors)}, options);
}

struct Batch {
  Tensor inputs, targets;
};

Batch batch_of(const GoldenCase& golden, std::int64_t step, Device device = Device::cpu()) {
  const Tensor window = select(to(golden.find("windows"), device), 0, step);
  const std::int64_t length = window.size(1) - 1;
  return {contiguous(narrow(window, 1, 0, length)), flatten(narrow(window, 1, 1, length))};
}

Tensor loss_of(const nn::Gpt& model, const Batch& batch) {
  return cross_entropy(flatten(model(batch.inputs), 0, 1), batch.targets);
}

/// Losses and gradient norms of every step lie within `allowed` (relative) of the stored ones.
void check_training(const GoldenCase& golden, DType dtype, const std::string& suffix, double allowed,
                    Device device = Device::cpu()) {
  const json& training = golden.args.at("training");
  const nn::Gpt model = load_gpt(golden.args.at("model"), dtype, device);
  nn::AdamW optimizer = adamw_for(model, training);
  const Tensor losses = to(golden.find("losses" + suffix), f64),
               norms = to(golden.find("norms" + suffix), f64);
  for (std::int64_t step = 0; step < losses.size(0); ++step) {
    INFO("step " << step);
    const Tensor loss = loss_of(model, batch_of(golden, step, device));
    loss.backward();
    const Tensor norm = nn::clip_grad_norm_(model.parameters(), training.at("clip"));
    optimizer.step();
    optimizer.zero_grad();
    CHECK(loss.item() == Approx(select(losses, 0, step).item()).epsilon(allowed));
    CHECK(norm.item() == Approx(select(norms, 0, step).item()).epsilon(10 * allowed));
  }
}

GoldenCase gpt_golden() { return load_goldens("gpt").at(0); }

}  // namespace

TEST_CASE("optimizers, clipping and the schedule agree with PyTorch") {
  for (const GoldenCase& golden : load_goldens("optim")) {
    INFO(golden.name);
    if (golden.op == "clip_grad_norm_") {
      check_clipping(golden);
    } else if (golden.op == "warmup_cosine") {
      check_schedule(golden);
    } else {
      REQUIRE(optimizers.contains(golden.op));
      check_optimizer(golden);
    }
  }
}

TEST_CASE("a Gpt with PyTorch's weights gives PyTorch's logits and gradients") {
  const GoldenCase golden = gpt_golden();
  const nn::Gpt model = load_gpt(golden.args.at("model"), f32);
  const Batch batch = batch_of(golden, 0);
  CHECK(difference(model(batch.inputs).detach(), golden.find("logits")) == "");
  loss_of(model, batch).backward();
  for (const auto& [name, parameter] : model.named_parameters()) {
    INFO(name);
    CHECK(difference(parameter.grad(), golden.find("grad." + name)) == "");
  }
}

TEST_CASE("twenty training steps of a Gpt agree with PyTorch") {
  const GoldenCase golden = gpt_golden();
  check_training(golden, f32, "", 1e-5);
  check_training(golden, f64, "_f64", 1e-9);
}

TEST_CASE("cuda: twenty training steps of a Gpt agree with PyTorch") {
  if (skip_if(!has_gpu(), "no GPU here")) return;
  const GoldenCase golden = gpt_golden();
  check_training(golden, f32, "", 1e-4, Device::cuda(0));  // training magnifies the rounding of other orders
}

}  // namespace sherd::test
