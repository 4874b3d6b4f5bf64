// Losses of an application's own, whose kernels nvcc makes of their functors, on a GPU against the CPU.
#include "tests/cuda/own_loss.h"

#include "autograd/autograd.h"
#include "autograd/capture/capture.h"
#include "runtime/cpu/loss_loop.h"
#include "tests/cuda/agree.h"
#include "tests/runtime/harness.h"
#include "tests/runtime/own_losses.h"

using namespace sherd;
using namespace sherd::test;

namespace {

/// Calls `body` with each loss, and what of it is far from 0 on [1, 2] and [-2, -1].
void for_each_loss(const auto& body) {
  cpu::add_loss<Rooted>();
  cpu::add_loss<Grown>();
  cpu::add_loss<Tilted>();
  add_own_losses_on_gpu();
  body(Rooted{0.7});
  body(Grown{});
  body(Tilted{});
}

std::vector<Tensor> pair_of(const Shape& input, const Shape& target, DType dtype) {
  Values values(1);
  return {values(input, dtype, 1, 2), values(target, dtype, -2, -1)};
}

constexpr Reduction reductions[] = {Reduction::mean, Reduction::sum, Reduction::none};

}  // namespace

TEST_CASE("cuda: own losses agree with the CPU's, values and gradients", "[sanitized]") {
  if (no_gpu()) return;
  for_each_loss([](const auto& loss) {
    for (const DType dtype : {f64, f32, f16, bf16})
      for (const std::int64_t n : {1, 7, 8, 1000, 16384, 16391, 70001})
        for (const Reduction reduction : reductions) {
          if (reduction == Reduction::sum && dtype == f16) continue;  // beyond its largest number
          INFO(loss.name << " of " << n << " " << name_of(dtype) << ", reduction "
                         << static_cast<int>(reduction));
          agree(pair_of({n}, {n}, dtype), row_tolerance(dtype),
                [&](std::span<const Tensor> in) { return elementwise_loss(loss, in[0], in[1], reduction); });
        }
    for (const auto& [input, target] : {std::pair{Shape{3, 5}, Shape{}}, {{}, {3, 5}}})
      agree(pair_of(input, target, f32), row_tolerance(f32),
            [&](std::span<const Tensor> in) { return elementwise_loss(loss, in[0], in[1]); });
    const std::vector<Tensor> none = pair_of({0}, {0}, f32);
    CHECK(std::isnan(elementwise_loss(loss, on_gpu(none[0]), on_gpu(none[1])).item()));
    CHECK(elementwise_loss(loss, on_gpu(none[0]), on_gpu(none[1]), Reduction::sum).item() == 0);
  });
}

TEST_CASE("cuda: second derivatives of own losses agree with the CPU's") {
  if (no_gpu()) return;
  for_each_loss([](const auto& loss) {
    INFO(loss.name);
    agree(pair_of({33}, {33}, f64), row_tolerance(f64), [&](std::span<const Tensor> in) {
      const Tensor x = in[0] * 1.0, t = in[1] * 1.0;
      const std::vector<Tensor> g = grad(elementwise_loss(loss, x, t), {x, t}, {}, {.create_graph = true});
      return g[0] * x + g[1] * t;
    });
  });
}

TEST_CASE("cuda: the mean of an own loss is one op, its gradients are one, and a graph replays both") {
  if (no_gpu()) return;
  for_each_loss([](const auto& loss) {
    const std::string total = std::string(loss.name) + "_total";
    const auto on_device = [](unsigned seed) { return to(numbers({1000}, f32, seed), gpu); };
    const Tensor x = on_device(1).requires_grad_(), t = on_device(2).requires_grad_();
    Heard forward, backward;
    const Tensor y = [&] {
      const Listening scope(forward);
      return elementwise_loss(loss, x, t);
    }();
    {
      const Listening scope(backward);
      grad(y, {x, t});
    }
    CHECK(forward.names == std::set<std::string>{total});
    CHECK(backward.names == std::set<std::string>{"full", total + "_grad"});

    const auto step = [&](std::span<const Tensor> in) {
      const Tensor leaf = in[0].detach().requires_grad_(), value = elementwise_loss(loss, leaf, in[1]);
      return std::vector{value.detach(), grad(value, {leaf})[0]};
    };
    Program program = capture(step, std::vector{on_device(3), on_device(4)});
    const std::vector<Tensor> other{on_device(5), on_device(6)};
    const auto want = step(other);
    const auto got = program.replay(other);
    CHECK(program.is_device_graph());
    for (std::size_t i = 0; i < want.size(); ++i)
      CHECK(same_bits(to(got[i], Device::cpu()), to(want[i], Device::cpu())));
  });
}
