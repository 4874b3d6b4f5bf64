// Batch norm with a residual and ReLU in the same op.
#include "runtime/ops/batch_norm.h"
#include "runtime/apply.h"
#include "tests/runtime/norm_epilogue.h"

using namespace sherd;
using namespace sherd::test;

TEST_CASE("batch_norm: with a residual and ReLU it has the bits of the three ops, gradients too") {
  for (const Shape& shape :
       {Shape{5, 3}, Shape{33, 70}, Shape{1, 1, 2}, Shape{3, 17, 33}, Shape{2, 3, 5, 7}, Shape{2, 2, 33, 70}})
    for (const Lay lay : {Lay::dense, Lay::offset, Lay::permuted}) {
      INFO(to_string(lay));
      check_norm_epilogues(shape, Device::cpu(), [lay](const Tensor& t) { return laid(t, lay); });
    }
  for (bool training : {false, true})
    check_norm_epilogue({{0, 3, 2}, f32, training}, Device::cpu(), 0b1111, [](const Tensor& t) { return t; });
}

TEST_CASE("batch_norm: second derivatives with a residual and ReLU are those of the three ops") {
  for (bool training : {false, true})
    for (bool relued : {false, true})
      for (unsigned subset = 1; subset < 16; ++subset) {
        INFO((training ? "training, " : "") << (relued ? "relu, " : "") << "subset " << subset);
        const auto penalties = [&](bool fused) {
          const std::vector<Tensor> in = {
              numbers({5, 3, 2}, f64, 1).requires_grad_(), numbers({3}, f64, 2).requires_grad_(),
              numbers({3}, f64, 3).requires_grad_(), numbers({5, 3, 2}, f64, 4).requires_grad_()};
          const Tensor mean = full({3}, 0.25, {f64}), var = full({3}, 1.5, {f64});
          BatchNormOptions options{.training = training};
          if (fused) {
            options.residual = in[3];
            options.activation = relued ? Activation::relu : Activation::none;
          }
          Tensor y = batch_norm(in[0], mean, var, in[1], in[2], options);
          if (!fused) y = relued ? relu(add(y, in[3])) : add(y, in[3]);
          std::vector<Tensor> some;
          for (std::size_t i = 0; i < in.size(); ++i)
            if ((subset >> i) & 1) some.push_back(in[i]);
          Tensor penalty = zeros({}, {f64});
          for (const Tensor& g : grad(sum(square(y)), some, {}, {.create_graph = true}))
            penalty = add(penalty, sum(square(g)));
          return grad(penalty, in);
        };
        const std::vector<Tensor> got = penalties(true), expected = penalties(false);
        for (std::size_t i = 0; i < got.size(); ++i) CHECK(distance(got[i], expected[i]) < 1e-12);
      }
}

TEST_CASE("batch_norm: a residual may be written before the backward, which does not read it") {
  for (bool training : {false, true}) {
    const Tensor x = numbers({4, 3, 5}, f32, 1).requires_grad_(),
                 leaf = numbers({4, 3, 5}, f32, 2).requires_grad_();
    const Tensor r = mul(leaf, 2.0), mean = zeros({3}), var = ones({3});
    const Tensor y = batch_norm(x, mean, var, {}, {},
                                {.training = training, .residual = r, .activation = Activation::relu});
    mul_(r, 3.0);
    sum(y).backward();
    CHECK(same_bits(leaf.grad(), mul(to(greater(y.detach(), 0), f32), 2.0)));
  }
}

TEST_CASE("batch_norm: GELU follows it as an op of its own") {
  const Tensor x = numbers({4, 3, 5}, f32, 1), r = numbers({4, 3, 5}, f32, 2);
  const Tensor y = batch_norm(x, {}, {}, {}, {}, {.training = true, .residual = r});
  CHECK(same_bits(
      batch_norm(x, {}, {}, {}, {}, {.training = true, .residual = r, .activation = Activation::gelu}),
      gelu(y)));
}

TEST_CASE("batch_norm: a residual of another shape or dtype is refused in one line") {
  const Tensor x = numbers({4, 3, 5}, f32);
  const auto call = [&](const Tensor& r) {
    batch_norm(x, {}, {}, {}, {}, {.training = true, .residual = r});
  };
  for (const Shape& shape : {Shape{4, 3}, Shape{1, 3, 1}, Shape{4, 3, 5, 1}}) {
    const std::string text = message_of<ShapeError>([&] { call(zeros(shape)); });
    CHECK(one_line_about(
        text, fmt::format("batch_norm: residual of shape {} for an input of shape {}", shape, x.shape())));
  }
  CHECK(one_line_about(message_of<DTypeError>([&] { call(zeros({4, 3, 5}, {f64})); }),
                       "batch_norm: input is f32 and its residual f64"));
}

TEST_CASE("running statistics move as their reference says, to the bit, in any layout and dtype") {
  for (const DType running : {f64, f32, bf16, f16})
    for (const DType batch : {f32, f64})
      for (const std::int64_t channels : {1, 5, 64, 1003})
        for (const bool dense : {true, false}) {
          INFO(name_of(running) << " of " << name_of(batch) << ", " << channels << ", dense " << dense);
          const auto drawn = [&](DType dtype, unsigned seed) { return numbers({channels, 2}, dtype, seed); };
          const auto of = [&](const Tensor& t) {
            const Tensor column = select(t, 1, 0);
            return dense ? clone(column) : column;
          };
          const ops::RunningStatistics op{.momentum = 0.13, .unbiased = 1.0 / 3};
          const std::vector<Tensor> in{of(drawn(running, 1)), of(drawn(batch, 2)), of(drawn(running, 3)),
                                       of(drawn(batch, 4))};
          const Tensors want = op.reference(Inputs(in.data(), in.size()));
          apply_many(op, in);
          CHECK(same_bits(in[0], want[0]));
          CHECK(same_bits(in[2], want[1]));
        }
}

TEST_CASE("running statistics that do not fit are refused") {
  const auto move = [](std::vector<Tensor> in) { apply_many(ops::RunningStatistics{}, in); };
  const Tensor c = ones({3});
  CHECK_THROWS_WITH(move({c, ones({4}), clone(c), clone(c)}),
                    Catch::Matchers::ContainsSubstring("shapes (3) and (4)"));
  CHECK_THROWS_WITH(move({c, to(c, bf16), clone(c), to(c, bf16)}),
                    Catch::Matchers::ContainsSubstring("a mean of bf16"));
  CHECK_THROWS_WITH(move({c, clone(c), to(c, f64), clone(c)}),
                    Catch::Matchers::ContainsSubstring("a running mean of f32 beside a variance of f64"));
  CHECK_THROWS_WITH(move({to(c, i64), clone(c), to(c, i64), clone(c)}),
                    Catch::Matchers::ContainsSubstring("statistics of i64"));
}
