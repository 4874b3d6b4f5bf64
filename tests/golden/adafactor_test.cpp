// Adafactor beside PyTorch's.
#include "shard/adafactor.h"

#include "runtime/ops.h"
#include "tests/catch.h"
#include "tests/golden/golden.h"

namespace sherd::test {
namespace {

shard::AdafactorOptions options_of(const nlohmann::json& o) {
  shard::AdafactorOptions options;
  options.lr = o.value("lr", options.lr);
  options.beta2_decay = o.value("beta2_decay", options.beta2_decay);
  if (o.contains("eps")) options.eps1 = o.at("eps")[0], options.eps2 = o.at("eps")[1];
  options.d = o.value("d", options.d);
  options.weight_decay = o.value("weight_decay", options.weight_decay);
  options.maximize = o.value("maximize", options.maximize);
  return options;
}

}  // namespace

TEST_CASE("Adafactor's twenty steps agree with PyTorch's, of vectors, matrices and stacks of them") {
  std::size_t cases = 0;
  for (const GoldenCase& golden : load_goldens("adafactor")) {
    INFO(golden.name);
    std::vector<nn::Parameter> params;
    for (const Tensor& t : golden.list("in")) params.emplace_back(clone(t));
    shard::Adafactor optimizer(params, options_of(golden.args.at("options")));
    for (std::int64_t step = 0; step < 20; ++step) {
      INFO("step " << step);
      for (std::size_t i = 0; i < params.size(); ++i)
        params[i].set_grad(clone(select(golden.find("grads" + std::to_string(i)), 0, step)));
      optimizer.step();
      for (std::size_t i = 0; i < params.size(); ++i)
        CHECK(difference(params[i].data(), select(golden.find("out" + std::to_string(i)), 0, step), 10) ==
              "");
    }
    ++cases;
  }
  CHECK(cases == 4 * 2);
}

}  // namespace sherd::test
