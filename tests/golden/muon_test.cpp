// Muon beside PyTorch's.
#include "shard/muon.h"

#include "runtime/ops.h"
#include "tests/catch.h"
#include "tests/golden/golden.h"

namespace sherd::test {
namespace {

using nlohmann::json;

shard::MuonOptions options_of(const json& args, DType dtype) {
  const json& o = args.at("options");
  shard::MuonOptions options;
  options.lr = o.value("lr", options.lr);
  options.momentum = o.value("momentum", options.momentum);
  options.weight_decay = o.value("weight_decay", options.weight_decay);
  options.nesterov = o.value("nesterov", options.nesterov);
  options.iterations = o.value("ns_steps", options.iterations);
  if (o.contains("adjust_lr_fn")) options.scale = shard::MuonScale::like_adamw;
  if (args.at("exact")) options.precision = dtype;
  return options;
}

}  // namespace

TEST_CASE("Muon's steps agree with PyTorch's, in bf16 as nearly as PyTorch's own rounding lets it") {
  std::size_t cases = 0;
  for (const GoldenCase& golden : load_goldens("muon")) {
    INFO(golden.name);
    const bool exact = golden.args.at("exact");
    std::vector<nn::Parameter> params, unrounded;  // the second by iterations in f64
    for (const Tensor& t : golden.list("in")) {
      params.emplace_back(clone(t));
      unrounded.emplace_back(to(t, DType::f64));
    }
    shard::Muon optimizer(params, options_of(golden.args, params[0].dtype()));
    shard::MuonOptions in_f64 = options_of(golden.args, DType::f64);
    in_f64.precision = DType::f64;
    shard::Muon reference(unrounded, in_f64);
    double ours = 0, theirs = 0;  // squares of what rounding to bf16 does, all elements and steps together
    for (std::int64_t step = 0; step < 5; ++step) {
      INFO("step " << step);
      for (std::size_t i = 0; i < params.size(); ++i) {
        const Tensor g = select(golden.find("grads" + std::to_string(i)), 0, step);
        params[i].set_grad(clone(g));
        unrounded[i].set_grad(to(g, DType::f64));
      }
      optimizer.step();
      reference.step();
      for (std::size_t i = 0; i < params.size(); ++i) {
        const Tensor expected = select(golden.find("out" + std::to_string(i)), 0, step);
        const auto distance = [&](const Tensor& from) {
          return sum(square(sub(to(from, DType::f64), unrounded[i].data()))).item();
        };
        // Each iteration multiplies what was rounded before by up to 3.4.
        if (exact)
          CHECK(difference(params[i].data(), expected, 10) == "");
        else
          ours += distance(params[i].data()), theirs += distance(expected);
      }
    }
    INFO(ours << " beside " << theirs);
    CHECK(ours <= 4 * theirs);
    ++cases;
  }
  CHECK(cases == 4 * 2 * 2);
}

}  // namespace sherd::test
