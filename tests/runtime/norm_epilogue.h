// That batch norm with an epilogue is batch norm, an addition and ReLU to the bit, on any device.
#pragma once

#include <array>

#include "autograd/autograd.h"
#include "runtime/ops.h"
#include "tests/runtime/harness.h"

namespace sherd::test {

/// What is added: nothing, another tensor, or the normalised one as it was.
enum class Residual { none, other, itself };

struct NormEpilogueCase {
  Shape shape;
  DType dtype = DType::f32;
  bool training = true;
  Residual residual = Residual::other;
  bool relu = true;
  /// Of the weights and biases, so small that results are zeros of both signs; the residual is none then.
  double scale = 1;
};

/// Values, running statistics, and the gradients of two backwards, for inputs x, weight, bias and residual.
class NormEpilogueRun {
 public:
  /// `lay` brings images into an order of memory; bit i of `needs`: input i has a gradient.
  NormEpilogueRun(const NormEpilogueCase& c, Device device, unsigned needs, const auto& lay) {
    const DType wide = c.dtype == f64 ? f64 : f32;
    const Shape channels{c.shape[1]};
    const auto scaled = [&](unsigned seed) {
      return to(to(mul(numbers(channels, f64, seed), c.scale), wide), device);
    };
    in_[0] = lay(to(numbers(c.shape, c.dtype, 1), device)).detach();
    in_[1] = scaled(2), in_[2] = c.scale == 1 ? scaled(3) : zeros(channels, {wide, device});
    if (c.residual == Residual::other) in_[3] = lay(to(with_specials(c.shape, c.dtype, 4), device)).detach();
    gy_ = lay(to(numbers(c.shape, c.dtype, 5), device));
    running_[0] = to(numbers(channels, wide, 6), device), running_[1] = full(channels, 1.5, {wide, device});
    for (std::size_t i = 0; i < in_.size(); ++i)
      if (in_[i].defined() && ((needs >> i) & 1)) in_[i].requires_grad_();
  }

  enum class How { in_one_op, in_several };
  std::vector<Tensor> operator()(const NormEpilogueCase& c, How how) const {
    const Tensor mean = clone(running_[0]), var = clone(running_[1]);
    const Tensor& residual = c.residual == Residual::itself ? in_[0] : in_[3];
    for (const Tensor& t : in_)
      if (t.defined()) t.set_grad({});
    const Tensor y =
        how == How::in_one_op ? in_one_op(c, mean, var, residual) : in_several(c, mean, var, residual);
    std::vector<Tensor> all{y.detach(), mean, var};
    if (!y.requires_grad()) return all;
    for (int repeat = 0; repeat < 2; ++repeat) {
      y.backward(gy_, true);
      for (const Tensor& t : in_)
        all.push_back(t.defined() && t.requires_grad() ? clone(t.grad()) : Tensor());
    }
    return all;
  }

 private:
  Tensor in_one_op(const NormEpilogueCase& c, const Tensor& mean, const Tensor& var,
                   const Tensor& residual) const {
    return batch_norm(in_[0], mean, var, in_[1], in_[2],
                      {.training = c.training,
                       .residual = residual,
                       .activation = c.relu ? Activation::relu : Activation::none});
  }
  Tensor in_several(const NormEpilogueCase& c, const Tensor& mean, const Tensor& var,
                    const Tensor& residual) const {
    Tensor y = batch_norm(in_[0], mean, var, in_[1], in_[2], {.training = c.training});
    if (residual.defined()) y = add(y, residual);
    return c.relu ? relu(y) : y;
  }

  std::array<Tensor, 4> in_;
  std::array<Tensor, 2> running_;
  Tensor gy_;
};

inline void check_norm_epilogue(const NormEpilogueCase& c, Device device, unsigned needs, const auto& lay) {
  INFO(name_of(c.dtype) << " " << to_string(c.shape) << (c.training ? " training" : "") << " residual "
                        << static_cast<int>(c.residual) << (c.relu ? " relu" : "") << " scale " << c.scale
                        << " needs " << needs);
  const NormEpilogueRun run(c, device, needs, lay);
  const std::vector<Tensor> got = run(c, NormEpilogueRun::How::in_one_op),
                            expected = run(c, NormEpilogueRun::How::in_several);
  REQUIRE(got.size() == expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    INFO("result " << i);
    REQUIRE(got[i].defined() == expected[i].defined());
    if (got[i].defined()) CHECK(same_bits(got[i], expected[i]));
  }
}

/// Every kind of epilogue, some gradients or all of them.
inline void check_norm_epilogues(const Shape& shape, Device device, const auto& lay) {
  constexpr unsigned all = 0b1111;
  for (DType dtype : {f64, f32, bf16, f16})
    for (bool training : {false, true}) {
      for (Residual residual : {Residual::none, Residual::other, Residual::itself})
        for (bool relu : {false, true})
          check_norm_epilogue({shape, dtype, training, residual, relu}, device, all, lay);
      for (unsigned needs : {0b0000u, 0b0001u, 0b0110u, 0b1000u, 0b1110u})
        check_norm_epilogue({shape, dtype, training}, device, needs, lay);
      const double tiny = dtype == f16 ? 1e-8 : dtype == f64 ? 1e-323 : 1e-40;
      check_norm_epilogue({shape, dtype, training, Residual::none, true, tiny}, device, all, lay);
    }
}

}  // namespace sherd::test
