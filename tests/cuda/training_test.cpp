// A two-layer perceptron learns the same on the GPU as on the CPU.
#include <cmath>

#include "autograd/autograd.h"
#include "runtime/apply.h"
#include "runtime/ops/optimizer_steps.h"
#include "tests/cuda/compare.h"

using namespace sherd;
using namespace sherd::test;

namespace {

enum class Optimizer { in_place, sgd, adamw };

/// linear, gelu, linear; the same start for every device.
struct Perceptron {
  std::vector<Tensor> parameters;

  Perceptron(Device device) {
    manual_seed(3);
    for (const Shape& shape : {Shape{64, 8}, Shape{64}, Shape{4, 64}, Shape{4}}) {
      parameters.push_back(to(randn(shape, {}, 0, shape.rank() == 2 ? 0.3 : 0), device));
      parameters.back().requires_grad_();
    }
  }
  Tensor operator()(const Tensor& x) const {
    return linear(gelu(linear(x, parameters[0], parameters[1])), parameters[2], parameters[3]);
  }
};

/// Losses of 60 steps.
std::vector<double> train(Device device, Optimizer kind) {
  Perceptron model(device);
  manual_seed(4);
  const Tensor x = to(randn({96, 8}), device);
  const Tensor wanted = sin(sum(x, {1}, Keep::dims)) * ones({1, 4}, {f32, device});
  const TensorOptions scalar{f64, device};
  Tensors arguments{Tensor::scalar(kind == Optimizer::adamw ? 0.01 : 0.05, scalar)};
  std::vector<double> losses;
  for (int step = 0; step < 60; ++step) {
    const Tensor loss = mean(square(model(x) - wanted));
    losses.push_back(loss.item());
    loss.backward();
    const NoGrad guard;
    if (kind == Optimizer::in_place) {
      for (const Tensor& p : model.parameters) sub_(p, p.grad() * 0.05);
    } else {
      const std::size_t stride = kind == Optimizer::sgd ? 4 : 5;
      for (std::size_t i = 0; i < model.parameters.size(); ++i) {
        const Tensor& p = model.parameters[i];
        if (step == 0) {
          arguments.push_back(p.detach());
          arguments.push_back(p.grad());
          for (std::size_t s = 2; s + 1 < stride; ++s) arguments.push_back(zeros_like(p));
          arguments.push_back(Tensor::scalar(0, scalar));
        }
        arguments[1 + i * stride + 1] = p.grad();
      }
      if (kind == Optimizer::sgd)
        apply_many(ops::SgdStep{.momentum = 0.9, .weight_decay = 0.01}, arguments);
      else
        apply_many(ops::AdamStep{.weight_decay = 0.1, .decoupled = true}, arguments);
    }
    for (const Tensor& p : model.parameters) p.set_grad({});
  }
  return losses;
}

}  // namespace

TEST_CASE(
    "cuda: optimizer steps of 16-bit gradients and twins, and those that are skipped, have the CPU's bits") {
  if (no_gpu()) return;
  for (DType dtype : {f32, bf16, f16})
    for (ops::Twins twins : {ops::Twins::no, ops::Twins::yes})
      for (double skip : {0.0, 1.0, std::nan("")})
        for (std::int64_t count : {1, 47, 48, 49}) {  // around what one launch takes
          const ops::Clipped clipped = count % 2 == 1 ? ops::Clipped::yes : ops::Clipped::no;
          INFO(name_of(dtype) << " skip " << skip << ", " << count << " parameters");
          const ops::AdamStep op{.weight_decay = 0.1,
                                 .decoupled = true,
                                 .skippable = ops::Skippable::yes,
                                 .clipped = clipped,
                                 .twins = twins};
          Values values(5);
          std::vector<Tensor> host{Tensor::scalar(0.1, {f64}), Tensor::scalar(skip)};
          if (clipped == ops::Clipped::yes) host.push_back(Tensor::scalar(0.3, {f64}));
          for (std::int64_t i = 0; i < count; ++i) {
            const Shape shape{i % 5 == 0 ? 20000 + i : i % 7};
            host.push_back(values(shape, f32));
            host.push_back(values(shape, dtype));
            host.push_back(values(shape, f32));
            host.push_back(values(shape, f32, 0, 2));
            host.push_back(Tensor::scalar(static_cast<double>(i), {f64}));
            if (twins == ops::Twins::yes) host.push_back(values(shape, dtype == f32 ? bf16 : dtype));
          }
          std::vector<Tensor> moved;
          for (const Tensor& t : host) moved.push_back(on_gpu(t));
          apply_many(op, host);
          apply_many(op, moved);
          for (std::size_t i = 0; i < host.size(); ++i) {
            INFO("input " << i);
            if (host[i].numel() > 0)
              CHECK(relative_distance(moved[i], host[i]) <= 2 * rounding(host[i].dtype()));
          }
        }
}

namespace {

/// A step of `count` parameters whose state is `kept` tensors of their shape, and a count of steps if that is
/// asked for, on both devices.
template <class Op>
void check_step(const Op& op, std::int64_t count, std::size_t kept, bool counts) {
  Values values(6);
  std::vector<Tensor> host{Tensor::scalar(0.1, {f64})};
  for (std::int64_t i = 0; i < count; ++i) {
    const Shape shape{i % 5 == 0 ? 20000 + i : i % 7};
    for (std::size_t k = 0; k < 2 + kept; ++k)
      host.push_back(values(shape, f32, k == 2 || k == 3 ? 0 : -2, 2));
    if (counts) host.push_back(Tensor::scalar(static_cast<double>(i), {f64}));
  }
  std::vector<Tensor> moved;
  for (const Tensor& t : host) moved.push_back(on_gpu(t));
  apply_many(op, host);
  apply_many(op, moved);
  for (std::size_t i = 0; i < host.size(); ++i) {
    INFO("input " << i);
    if (host[i].numel() > 0) CHECK(relative_distance(moved[i], host[i]) <= 2 * rounding(host[i].dtype()));
  }
}

}  // namespace

TEST_CASE("cuda: steps of all optimizers' forms have the CPU's bits") {
  if (no_gpu()) return;
  for (std::int64_t count : {1, 48, 49})
    for (bool form : {false, true}) {
      check_step(ops::SgdStep{.momentum = 0.9, .weight_decay = 0.1, .dampening = 0.2, .nesterov = form},
                 count, 1, true);
      for (double momentum : {0.0, 0.9})
        check_step(ops::AdamStep{.weight_decay = 0.1, .amsgrad = true, .maximize = momentum != 0}, count, 3,
                   true);
      for (double momentum : {0.0, 0.9})
        check_step(ops::RmspropStep{.weight_decay = 0.1, .momentum = momentum, .centered = form}, count,
                   1u + form + (momentum != 0), false);
      check_step(ops::LionStep{.weight_decay = 0.1, .maximize = form}, count, 1, false);
      check_step(ops::AdagradStep{.lr_decay = 0.1, .weight_decay = 0.1, .maximize = form}, count, 1, true);
    }
}

TEST_CASE("cuda: a two-layer perceptron trains as on the CPU") {
  if (no_gpu()) return;
  for (Optimizer kind : {Optimizer::in_place, Optimizer::sgd, Optimizer::adamw}) {
    const std::vector<double> host = train(Device::cpu(), kind), moved = train(gpu, kind);
    INFO("optimizer " << static_cast<int>(kind));
    CHECK(host.back() < 0.5 * host.front());
    for (std::size_t i = 0; i < host.size(); ++i) {
      INFO("step " << i << ": " << host[i] << " and " << moved[i]);
      // Products and sums are taken in another order, and training magnifies what that rounds away.
      CHECK(std::abs(moved[i] - host[i]) <= 1e-4 * host[i]);
    }
    const std::vector<double> again = train(gpu, kind);
    CHECK(again == moved);
  }
}
