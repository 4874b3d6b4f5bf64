// The losses: their digits at the ends, and the forms of cross entropy beside one another.
#include <cmath>

#include "autograd/autograd.h"
#include "runtime/apply.h"
#include "runtime/ops/list.h"
#include "tests/runtime/op_cases.h"

using namespace sherd;
using namespace sherd::test;

TEST_CASE("nll_loss without classes has no loss where all targets are ignored, second derivatives included") {
  const Tensor targets = full({2}, -100, {i64});
  for (const bool weighted : {false, true}) {
    Tensor x = zeros({2, 0}).requires_grad_();
    NllOptions options{.reduction = Reduction::sum};
    if (weighted) options.weight = zeros({0}).requires_grad_();
    const Tensor loss = nll_loss(x, targets, options);
    CHECK(loss.item() == 0);
    CHECK(grad(loss, std::span(&x, 1), {}, {.create_graph = true})[0].shape() == Shape{2, 0});
  }
}

TEST_CASE("cross_entropy does not use what an ignored row holds, whatever its options") {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  const Tensor targets = Tensor::from<std::int64_t>({1, -100, 2}, {3});
  for (const DType dtype : {f64, f32, bf16})
    for (const double bad : {infinity, -infinity, std::nan("")})
      for (const double smoothing : {0.0, 0.1})
        for (const bool weighted : {false, true})
          for (const Reduction reduction : {Reduction::mean, Reduction::sum, Reduction::none}) {
            INFO(name_of(dtype) << " " << bad << ", smoothing " << smoothing << ", weighted " << weighted);
            CrossEntropyOptions options{.reduction = reduction, .label_smoothing = smoothing};
            if (weighted) options.weight = numbers({4}, dtype, 3);
            const auto run = [&](double held) {
              Tensor x = numbers({3, 4}, dtype, 4);
              fill_(select(x, 0, 1), held);
              x.requires_grad_();
              const Tensor loss = cross_entropy(x, targets, options);
              return std::array{loss.detach(), grad(sum(loss), std::span(&x, 1))[0]};
            };
            const auto clean = run(0.5), found = run(bad);
            CHECK(same_bits(found[0], clean[0]));
            CHECK(same_bits(found[1], clean[1]));
            CHECK(amax(abs(found[1][1])).item() == 0);
          }
}

TEST_CASE("losses of probabilities at 0 and 1 have finite gradients") {
  const Tensor x = Tensor::from<float>({20, -20, 200, -200}, {4}).requires_grad_(),
               t = Tensor::from<float>({1, 0, 0, 1}, {4});
  bce_loss(sigmoid(x), t, {.reduction = Reduction::sum}).backward();
  CHECK(isfinite(x.grad()).to_vector<bool>() == std::vector<bool>(4, true));
}

TEST_CASE("smooth_l1_loss is finite where its value is") {
  for (const double beta : {0.5, 1.0, 2.0, 1e10})
    for (const double d : {3e38, -3e38, 1e30, 0.1, 0.0}) {
      INFO(d << " " << beta);
      const Tensor x = Tensor::scalar(d, {f32}), zero = Tensor::scalar(0, {f32});
      const double size = std::fabs(d), want = size < beta ? size * size / (2 * beta) : size - beta / 2;
      CHECK(std::fabs(smooth_l1_loss(x, zero, beta).item() - want) <= 2e-7 * want);
    }
}

TEST_CASE("losses with class weights name themselves where a target is no class") {
  const Tensor x = numbers({2, 4}, f32), log_p = log_softmax(x), weight = ones({4});
  for (const std::int64_t target : {-1, 4, 1000}) {
    const Tensor targets = Tensor::from<std::int64_t>({0, target}, {2});
    const std::string about = ": target " + std::to_string(target);
    const auto says = [&](const auto& call) { return message_of<ValueError>(call); };
    CHECK(one_line_about(says([&] { cross_entropy(x, targets, {.weight = weight}); }),
                         "cross_entropy" + about));
    CHECK(one_line_about(says([&] { cross_entropy(x, targets, {.label_smoothing = 0.1}); }),
                         "cross_entropy" + about));
    CHECK(one_line_about(says([&] { nll_loss(log_p, targets); }), "nll_loss" + about));
    CHECK(one_line_about(says([&] { nll_loss(log_p, targets, {.weight = weight}); }), "nll_loss" + about));
  }
  const Tensor floats = zeros({2});
  CHECK(one_line_about(message_of<DTypeError>([&] { nll_loss(log_p, floats); }), "nll_loss"));
  const Tensor p = full({3}, 0.5), t = ones({3}), far = ones({4}, {f32, Device::meta()});
  CHECK(one_line_about(message_of<DeviceError>([&] { cross_entropy(x, ones({2}, {i64}), {.weight = far}); }),
                       "cross_entropy: weights on meta"));
  using Options = BinaryCrossEntropyOptions;
  const auto both = [&](const Options& o, const auto& name_of_error) {
    CHECK(one_line_about(name_of_error([&] { bce_loss(p, t, o); }), "bce_loss"));
    CHECK(one_line_about(name_of_error([&] { bce_with_logits(p, t, o); }), "bce_with_logits"));
  };
  const auto shape = [](const auto& call) { return message_of<ShapeError>(call); };
  const auto dtype = [](const auto& call) { return message_of<DTypeError>(call); };
  both({.weight = ones({4})}, shape), both({.positive_weight = ones({4})}, shape);
  both({.weight = ones({3}, {f64})}, dtype), both({.positive_weight = ones({3}, {i32})}, dtype);
  both({.weight = ones({3}, {f32, Device::meta()})},
       [](const auto& call) { return message_of<DeviceError>(call); });
  const Tensor bits = zeros({2}, {boolean});
  CHECK(one_line_about(message_of<DTypeError>([&] { cross_entropy(x, bits, {.weight = weight}); }),
                       "cross_entropy"));
}

TEST_CASE("bce_with_logits of sure answers has all digits") {
  for (const double logit : {5.0, 10.0, 15.0, 20.0, 30.0}) {
    Tensor z = Tensor::from<float>({static_cast<float>(logit), static_cast<float>(-logit)}, {2});
    z.requires_grad_();
    bce_with_logits(z, Tensor::from<float>({1, 0}, {2}), {.reduction = Reduction::sum}).backward();
    const double slope = 1 / (1 + std::exp(logit));
    CHECK(std::fabs(z.grad().to_vector<float>()[0] / -slope - 1) < 1e-6);
    CHECK(std::fabs(z.grad().to_vector<float>()[1] / slope - 1) < 1e-6);
  }
}

TEST_CASE("bce_with_logits bends at a logit of 0 by a quarter of its weight") {
  const Tensor target = Tensor::from({0.0, 1.0, 0.5}), positive = full({3}, 2, {f64});
  const std::vector<double> plain(3, 0.25), weighted{0.25, 0.5, 0.375};  // (1 + (weight - 1) target) / 4
  for (const bool with_weight : {false, true}) {
    Tensor x = zeros({3}, {f64});
    x.requires_grad_();
    const Tensor loss = bce_with_logits(
        x, target, {.reduction = Reduction::sum, .positive_weight = with_weight ? positive : Tensor()});
    const Tensor slope = grad(loss, {x}, {}, {.create_graph = true})[0];
    CHECK(grad(sum(slope), {x})[0].to_vector<double>() == (with_weight ? weighted : plain));
  }
}

TEST_CASE("cross_entropy is the same to the bit where all logits of a row are moved by one number") {
  for (const DType dtype : {f64, f32, f16, bf16}) {
    INFO(name_of(dtype));
    const double far = dtype == bf16 ? 128 : dtype == f16 ? 1024 : 1 << 20;  // the sums are exact
    const Tensor x = to(randint(-9, 10, {37, 131}), dtype), targets = randint(0, 131, {37});
    for (const double by : {far, -far})
      for (const LossPrecision precision : {LossPrecision::of_logits, LossPrecision::wide}) {
        const CrossEntropyOptions options{Reduction::mean, -100, precision};
        const auto results = [&](const Tensor& logits) {
          Tensor leaf = clone(logits).requires_grad_();
          const Tensor loss = cross_entropy(leaf, targets, options),
                       written = cross_entropy_(clone(leaf), targets, options);
          return std::vector{loss, written, grad(loss, std::span(&leaf, 1), {}, {.retain_graph = true})[0],
                             grad(written, std::span(&leaf, 1))[0],
                             grad(loss, std::span(&leaf, 1), {}, {.create_graph = true})[0]};
        };
        const auto here = results(x), there = results(add(x, by));
        for (std::size_t i = 0; i < here.size(); ++i) {
          INFO("result " << i);
          CHECK(same_bits(here[i], there[i]));
        }
      }
  }
}

TEST_CASE("cross_entropy of sure answers has all digits, however large the logits") {
  const Tensor target = Tensor::from<std::int64_t>({0}, {1});
  for (const double height : {0.0, 5000.0, 1e8}) {
    constexpr double step = 8;  // which f32 numbers of 1e8 are apart
    const Tensor x =
        add(Tensor::from<float>({0, static_cast<float>(-step), static_cast<float>(-step)}, {1, 3}), height)
            .requires_grad_();
    const Tensor loss = cross_entropy(x, target);
    loss.backward();
    const double others = 2 * std::exp(-step);
    CHECK(std::fabs(loss.item() / std::log1p(others) - 1) < 1e-3);
    CHECK(std::fabs(x.grad().to_vector<float>()[1] / (std::exp(-step) / (1 + others)) - 1) < 1e-6);
  }
}

TEST_CASE("ops: a wide loss has the bits of casting the logits first, gradients too") {
  for (DType dtype : {f64, f32, f16, bf16})
    for (Reduction r : {Reduction::mean, Reduction::sum, Reduction::none}) {
      INFO(name_of(dtype) << " reduction " << static_cast<int>(r));
      const Tensor leaf = numbers({37, 131}, dtype, 1, -9, 9).requires_grad_(),
                   targets = numbers({37}, i64, 2, 0, 130);
      const Tensor wide = cross_entropy(leaf, targets, {r, 5, LossPrecision::wide}),
                   cast = cross_entropy(to(leaf, dtype == f64 ? f64 : f32), targets, {r, 5});
      CHECK(same_bits(wide, cast));
      const Tensor up = numbers(wide.shape(), wide.dtype(), 3);
      CHECK(same_bits(grad(wide, std::span(&leaf, 1), up)[0], grad(cast, std::span(&leaf, 1), up)[0]));
    }
}

TEST_CASE(
    "ops: cross_entropy_ has the loss and gradient of cross_entropy, to the bit, and refuses what it cannot "
    "give") {
  for (DType dtype : {f64, f32, f16, bf16})
    for (Reduction r : {Reduction::mean, Reduction::sum})
      for (LossPrecision precision : {LossPrecision::of_logits, LossPrecision::wide}) {
        INFO(name_of(dtype) << " reduction " << static_cast<int>(r));
        const Tensor leaf = numbers({37, 131}, dtype, 1, -9, 9).requires_grad_(),
                     targets = numbers({37}, i64, 2, 0, 130);
        const CrossEntropyOptions options{r, 5, precision};
        const Tensor over = cross_entropy_(clone(leaf), targets, options),
                     beside = cross_entropy(leaf, targets, options);
        CHECK(same_bits(over, beside));
        const Tensor expected = grad(beside, std::span(&leaf, 1))[0];
        CHECK(same_bits(grad(over, std::span(&leaf, 1), {}, {.retain_graph = true})[0], expected));
        CHECK(same_bits(grad(over, std::span(&leaf, 1), {}, {.retain_graph = true})[0], expected));
        const Tensor half = full({}, 0.5, {over.dtype()});
        CHECK(
            same_bits(grad(over, std::span(&leaf, 1), half, {.retain_graph = true})[0], mul(expected, 0.5)));
        CHECK(same_bits(grad(over, std::span(&leaf, 1), half)[0], mul(expected, 0.5)));
      }
  const Tensor x = numbers({3, 4}, f32).requires_grad_(), targets = numbers({3}, i64, 2, 0, 3);
  CHECK(one_line_about(message_of<ValueError>([&] { cross_entropy_(clone(x), targets, {Reduction::none}); }),
                       "cross_entropy_"));
  CHECK_THROWS_AS(cross_entropy_(x, targets), StateError);  // a leaf
  const Tensor loss = cross_entropy_(clone(x), targets);
  CHECK(one_line_about(
      message_of<NotImplementedError>([&] { grad(loss, std::span(&x, 1), {}, {.create_graph = true}); }),
      "cross_entropy_"));
  const Tensor logits = clone(x), written = cross_entropy_(logits, targets), both = add(written, sum(logits));
  CHECK(one_line_about(message_of<StateError>([&] { grad(both, std::span(&x, 1)); }), "cross_entropy_"));
  CHECK_THROWS_AS(apply(ops::ScaleUnlessOne{}, clone(x.detach()), zeros({2})), ShapeError);
  CHECK_THROWS_AS(apply(ops::ScaleUnlessOne{}, clone(x.detach()), zeros({}, {f64})), DTypeError);
}
