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

TEST_CASE("epilogues: what a step writes behind a product and its reader keeps them from nothing") {
  const TakesAll takes(DeviceType::cpu);
  const NoGrad guard;
  const Tensor weight = numbers({8, 8}, f32, 7);
  const auto count = [&](const Step& step) {
    const std::vector<Tensor> in{numbers({8, 8}, f32, 1)};
    const Tensor before = clone(weight);
    Program::Impl program = with_epilogues(step, in);
    copy_(weight, before);
    const std::vector<Tensor> got = program.replay(in);
    const Tensor written = clone(weight);
    copy_(weight, before);
    check_same(got, step(in));
    CHECK(same_bits(written, weight));
    copy_(weight, before);
    return products_with_regions(program);
  };
  const auto find_weight = [&](const Tensor&) { return weight; };
  const auto make_weight = [](const Tensor& x) { return mul(x, 2.0); };
  const auto reads = [](const Tensor& x, const Tensor& w) { return relu(matmul(x, w)); };
  const auto each = [&](const auto& its_weight) {
    CHECK(count([&](std::span<const Tensor> x) {
            const Tensor w = its_weight(x[0]), y = reads(x[0], w);
            add_(w, 1.0);
            return std::vector<Tensor>{y, clone(w)};
          }) == 1);
    CHECK(count([&](std::span<const Tensor> x) {
            const Tensor w = its_weight(x[0]), y = matmul(x[0], w);
            add_(w, softmax(w, -1));
            return std::vector<Tensor>{mul(y, softmax(w, -1)), clone(w)};
          }) == 0);
    CHECK(count([&](std::span<const Tensor> x) {
            const Tensor w = its_weight(x[0]);
            add_(w, 1.0);
            return std::vector<Tensor>{reads(x[0], w), clone(w)};
          }) == 1);
  };
  each(find_weight);
  each(make_weight);
}

TEST_CASE("epilogues: a captured training step goes on with its products, and trains with eager's bits") {
  const TakesAll takes(DeviceType::cpu);
  const auto make = [] {
    return std::vector{numbers({32, 16}, f32, 3).requires_grad_(),
                       numbers({16, 32}, f32, 4).requires_grad_()};
  };
  const auto step_of = [](std::vector<Tensor>& weights) {
    return [&](std::span<const Tensor> in) {
      const Tensor loss = sum(relu(linear(relu(linear(in[0], weights[0])), weights[1])));
      loss.backward();
      const NoGrad guard;
      for (Tensor& w : weights) {
        add_(w, mul(w.grad(), -0.01));
        w.set_grad({});
      }
      return std::vector{loss.detach()};
    };
  };
  std::vector<Tensor> eager = make(), captured = make();
  const auto eager_step = step_of(eager), captured_step = step_of(captured);
  const std::vector<Tensor> in{numbers({4, 16}, f32, 5)};
  eager_step(in);
  Program program = capture(captured_step, in, Executor::fused);
  for (int i = 0; i < 3; ++i) check_same(program.replay(in), eager_step(in));
  for (std::size_t i = 0; i < eager.size(); ++i) CHECK(same_bits(eager[i], captured[i]));
  const std::string text = to_string(program);
  INFO(text);
  std::size_t count = 0;
  for (std::size_t at = 0; (at = text.find("fused_product[", at)) != text.npos; ++at) ++count;
  CHECK(count >= 3);  // both layers, and the gradient that goes on through the first ReLU
}

TEST_CASE("epilogues: a chain behind a product that nobody reads is no part of it") {
  const TakesAll takes(DeviceType::cpu);
  const NoGrad guard;
  const Step step = [](std::span<const Tensor> in) {
    tanh(mul(matmul(in[0], in[1]), 2.0));
    return std::vector<Tensor>{mul(in[0], 2.0)};
  };
  const std::vector<Tensor> in{numbers({8, 8}, f32, 1), numbers({8, 8}, f32, 2)};
  Program program = capture(step, in, Executor::fused);
  for (int times = 0; times < 3; ++times) check_same(program.replay(in), step(in));
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
