// With which precision of f32 products the ops run that a backward, `recompute` and a captured step run.
#include "runtime/float32_precision.h"

#include "autograd/autograd.h"
#include "autograd/capture/capture.h"
#include "autograd/recompute.h"
#include "runtime/apply.h"
#include "runtime/kernel.h"
#include "runtime/ops.h"
#include "tests/catch.h"

using namespace sherd;

namespace {

constexpr auto highest = Float32MatmulPrecision::highest, high = Float32MatmulPrecision::high;

/// Gives, and has as its gradient, ones where its kernel runs with `high`, else zeros.
struct Seen {
  static constexpr std::string_view name = "seen";
  static constexpr Reads reads{};
  Specs infer(SpecSpan in) const { return {in[0]}; }
  Tensors grad(const GradArgs& args) const { return {apply(Seen{}, args.gy[0])}; }
  bool operator==(const Seen&) const = default;
};

void seen(const Seen&, Inputs, Outputs out) {
  fill_(alias(out[0], out[0].layout()), float32_matmul_precision() == high ? 1 : 0);
}

/// Fails for what is not 0.
struct Refuses {
  static constexpr std::string_view name = "refuses";
  static constexpr bool differentiable = false;
  Specs infer(SpecSpan in) const { return {in[0]}; }
  bool operator==(const Refuses&) const = default;
};

void refuses(const Refuses&, Inputs in, Outputs out) {
  check<StateError>(*in[0].data<float>() == 0, "refuses: {} given", *in[0].data<float>());
  copy_(alias(out[0], out[0].layout()), in[0]);
}

void add_kernels() {
  add_kernel<seen>(DeviceType::cpu);
  add_kernel<refuses>(DeviceType::cpu);
}

double shown(const Tensor& t) { return mean(t).item(); }
double shown(Float32MatmulPrecision precision) { return precision == high ? 1 : 0; }

}  // namespace

TEST_CASE("precision of f32 products: a gradient's are those of the moment of the backward") {
  add_kernels();
  for (const auto forward : {highest, high})
    for (const auto backward : {highest, high}) {
      const Tensor x = zeros({3}).requires_grad_();
      const Float32MatmulPrecisionScope first(forward);
      const Tensor y = apply(Seen{}, x);
      const Float32MatmulPrecisionScope then(backward);
      CHECK(shown(y) == shown(forward));
      CHECK(shown(grad(sum(y), {x})[0]) == shown(backward));
    }
}

TEST_CASE("precision of f32 products: recompute runs each op again with its own") {
  add_kernels();
  for (const auto forward : {highest, high})
    for (const auto backward : {highest, high}) {
      const Tensor x = zeros({3}), a = ones({3}).requires_grad_(), b = ones({3}).requires_grad_();
      const Float32MatmulPrecisionScope scope(backward);
      const Tensor y = recompute([&] {
        const Tensor as_set = apply(Seen{}, x);
        const Float32MatmulPrecisionScope inside(forward);
        return add(mul(as_set, a), mul(apply(Seen{}, x), b));
      });
      const std::vector<Tensor> g = grad(sum(y), {a, b});
      CHECK(shown(g[0]) == shown(backward));
      CHECK(shown(g[1]) == shown(forward));
      CHECK(float32_matmul_precision() == backward);
    }
}

TEST_CASE("precision of f32 products: a captured step replays each op with its own") {
  add_kernels();
  const Tensor w = ones({3}).requires_grad_();
  const Step step = [&](std::span<const Tensor> in) {
    const Tensor as_set = apply(Seen{}, in[0]);
    const Tensor y = recompute([&] {
      const Float32MatmulPrecisionScope scope(high);
      return mul(apply(Seen{}, in[0]), w);
    });
    const Float32MatmulPrecisionScope scope(highest);
    return std::vector{as_set.detach(), grad(sum(y), {w})[0], apply(Seen{}, in[0])};
  };
  for (const auto captured : {highest, high}) {
    Program program = [&] {
      const Float32MatmulPrecisionScope scope(captured);
      return capture(step, {zeros({3})});
    }();
    for (const auto now : {highest, high, highest}) {
      const Float32MatmulPrecisionScope scope(now);
      const std::vector<Tensor> out = program.replay({zeros({3})});
      CHECK(shown(out[0]) == shown(captured));
      CHECK(shown(out[1]) == 1);
      CHECK(shown(out[2]) == 0);
      CHECK(float32_matmul_precision() == now);
    }
  }
}

TEST_CASE("precision of f32 products: a replay that throws leaves the rank's as it was") {
  add_kernels();
  Program program = [] {
    const Float32MatmulPrecisionScope scope(high);
    return capture([](std::span<const Tensor> in) { return std::vector{apply(Refuses{}, in[0])}; },
                   {zeros({1})});
  }();
  CHECK(program.replay({zeros({1})})[0].item() == 0);
  CHECK_THROWS_AS(program.replay({ones({1})}), StateError);
  CHECK(float32_matmul_precision() == highest);
}
