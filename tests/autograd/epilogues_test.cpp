// Products and the regions behind them as one op: on the CPU, which has no kernel for them, so that they run
// one after the other.
#include "autograd/capture/program.h"
#include "autograd/compile.h"
#include "tests/autograd/product_steps.h"
#include "tests/autograd/random_step.h"
#include "tests/catch.h"
#include "tests/runtime/op_cases.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;

TEST_CASE("epilogues: a product and what alone reads it are one op, with their bits") {
  const TakesAll takes(DeviceType::cpu);
  for (const DType dtype : {f32, f64, bf16, f16})
    for (const ProductStep& one : product_steps(dtype)) {
      INFO(one.name);
      Program::Impl program = with_epilogues(one.step, one.in);
      INFO(program.text());
      CHECK(products_with_regions(program) == 1);
      CHECK(program.steps.size() == 1);
      check_same(program.replay(one.in), one.step(one.in));
    }
}

TEST_CASE("epilogues: a product stays alone that others read, that is given, or whose place matters") {
  const TakesAll takes(DeviceType::cpu);
  const NoGrad guard;
  const Tensor weight = numbers({8, 8}, f32, 7);
  const auto count = [&](const Step& step) {
    const std::vector<Tensor> in{numbers({8, 8}, f32, 1), numbers({8, 8}, f32, 2)};
    Program::Impl program = with_epilogues(step, in);
    const Tensor before = clone(weight);
    const std::vector<Tensor> got = program.replay(in);
    copy_(weight, before);
    check_same(got, step(in));
    copy_(weight, before);
    return products_with_regions(program);
  };
  using Results = std::vector<Tensor>;
  CHECK(count([](std::span<const Tensor> x) { return Results{relu(matmul(x[0], x[1]))}; }) == 1);
  // Of two products one goes on.
  CHECK(count([](std::span<const Tensor> x) {
          return Results{add(matmul(x[0], x[1]), matmul(x[1], x[0]))};
        }) == 1);
  CHECK(count([](std::span<const Tensor> x) {
          const Tensor y = matmul(x[0], x[1]);
          return Results{relu(y), y};
        }) == 0);
  CHECK(count([](std::span<const Tensor> x) {
          const Tensor y = matmul(x[0], x[1]);
          return Results{relu(y), softmax(y, -1)};
        }) == 0);
  CHECK(count([](std::span<const Tensor> x) { return Results{relu(transpose(matmul(x[0], x[1]), 0, 1))}; }) ==
        0);
  CHECK(count([&](std::span<const Tensor> x) {
          const Tensor y = matmul(x[0], weight);
          add_(weight, 1.0);
          return Results{relu(y)};
        }) == 0);
  CHECK(count([](std::span<const Tensor> x) {
          Tensor y = matmul(x[0], x[1]);
          add_(y, x[0]);
          return Results{y};
        }) == 0);
}

TEST_CASE("epilogues: a compiled layer has eager's bits and fewer ops, forward and backward") {
  const TakesAll takes(DeviceType::cpu);
  const Tensor up = numbers({32, 16}, f32, 3).requires_grad_(),
               down = numbers({16, 32}, f32, 4).requires_grad_();
  const Tensor x = numbers({12, 16}, f32, 5);
  const Step step = [&](std::span<const Tensor> in) {
    return std::vector<Tensor>{mean(square(linear(relu(linear(in[0], up)), down)))};
  };
  const auto gradients = [&](const auto& call) {
    for (const Tensor& t : {up, down}) t.set_grad({});
    call(std::span(&x, 1))[0].backward();
    return std::vector<Tensor>{up.grad(), down.grad()};
  };
  const std::vector<Tensor> expected = gradients(step);
  const Compiled replayed = compile(step), fused = compile(step, {.executor = Executor::fused});
  for (int call = 0; call < 3; ++call) {
    check_same(gradients(fused), expected);
    check_same(gradients(replayed), expected);
  }
  INFO(fused.text());
  CHECK_THAT(fused.text(), ContainsSubstring("fused_product[product=linear, ops="));
  CHECK(fused.stats().launches < replayed.stats().launches);
  CHECK(fused.stats().regions >= 2);
}
