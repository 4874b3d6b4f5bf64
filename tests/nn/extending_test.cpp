// What docs/extending.md shows of modules and optimizers works as it stands there.
#include <fstream>
#include <sstream>

#include "autograd/capture/capture.h"
#include "nn/layers.h"
#include "nn/optimizer.h"
#include "nn/state_file.h"
#include "tests/runtime/harness.h"
#include "tests/source_root.h"

using namespace sherd;
using namespace sherd::test;

namespace {

// page: begin
struct Residual final : nn::Layer<Residual> {
  nn::Linear up, down;
  nn::Param scale{ones({1})};  // a 0-d one could not be sharded

  explicit Residual(std::int64_t width) : up(width, 4 * width), down(4 * width, width) {}
  Tensor forward(const Tensor& x) const { return x + down(gelu(up(x))) * scale.tensor(); }
  void visit(auto&& on) {
    on("up", up);
    on("down", down);
    on("scale", scale);
  }
};
// page: end

// page: begin
class Lion final : public nn::Optimizer {
 public:
  Lion(std::vector<nn::Parameter> params, double lr) : Optimizer({{std::move(params)}}, {{"lr", lr}}) {}
  std::vector<std::string> state_names() const override { return {"momentum"}; }

 protected:
  void step_group(const Group& group, std::span<const nn::Parameter> params,
                  std::span<Slots* const> slots) override {
    for (std::size_t i = 0; i < params.size(); ++i) {
      const Tensor p = params[i].local().detach(), g = params[i].grad(), m = (*slots[i])[0];
      const Tensor ahead = add(mul(m, 0.9), mul(g, 0.1));
      const Tensor sign = sub(to(greater(ahead, 0), p.dtype()), to(less(ahead, 0), p.dtype()));
      sub_(p, mul(sign, to(to(group.lr, p.dtype()), p.device())));
      add_(mul_(m, 0.99), mul(g, 0.01));
    }
  }
};
// page: end

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  REQUIRE(file.good());
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

struct Trainee {
  nn::Sequential model{Residual(3), nn::Linear(3, 2), Residual(2)};
  Lion optimizer{model.parameters(), 0.01};

  Tensor step(const Tensor& x) {
    const Tensor loss = mean(square(model(x)));
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    return loss.detach();
  }
};

}  // namespace

TEST_CASE("extending: the page shows what is tested here") {
  const std::string page = text_of(std::string(source_root) + "/docs/extending.md"),
                    here = text_of(std::string(source_root) + "/tests/nn/extending_test.cpp");
  int seen = 0;
  for (std::size_t at = 0; (at = here.find("\n// page: begin\n", at)) != std::string::npos; ++seen) {
    const std::size_t begin = here.find('\n', at + 1) + 1, end = here.find("// page: end", begin);
    CHECK(page.find("```cpp\n" + here.substr(begin, end - begin) + "```") != std::string::npos);
    at = end;
  }
  CHECK(seen == 2);
}

TEST_CASE("extending: a module and an optimizer of one's own train, save, copy, move and are captured") {
  manual_seed(1);
  Trainee eager;
  const Tensor x = numbers({8, 3}, f32);
  const float first = eager.step(x).item<float>();
  CHECK(eager.model.named_parameters().front().name == "0.up.weight");

  manual_seed(1);
  Trainee captured;
  captured.step(x);
  Program program =
      capture([&](std::span<const Tensor> in) { return std::vector{captured.step(in[0])}; }, {x});
  eager.step(x);
  for (int i = 0; i < 20; ++i) CHECK(same_bits(program.replay({x})[0], eager.step(x)));
  CHECK(eager.step(x).item<float>() < first);

  nn::Sequential copy = eager.model.clone();
  CHECK(same_bits(copy(x), eager.model(x)));
  copy.to(f64);
  CHECK(copy(to(x, f64)).dtype() == f64);
  Lion other(copy.parameters(), 1);
  other.load_state_dict(eager.optimizer.state_dict());
  CHECK(other.lr() == 0.01);

  copy.to(Device::cpu(1));  // the rate stays where it is
  Lion elsewhere(copy.parameters(), 0.01);
  mean(square(copy(to(to(x, f64), Device::cpu(1))))).backward();
  const Tensor before = clone(copy.parameters()[0].data());
  elsewhere.step();
  CHECK_FALSE(same_bits(copy.parameters()[0].data(), before));
}
