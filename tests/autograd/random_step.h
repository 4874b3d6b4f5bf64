// Random steps: the same instructions on any device, some of which are repeated, read by nobody, views,
// writes.
#pragma once

#include <random>
#include <span>
#include <vector>

#include "autograd/autograd.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "tests/catch.h"
#include "tests/runtime/op_cases.h"

namespace sherd::test {

/// Whether instructions write what others read, which only code without gradients may.
enum class Writes { never, sometimes };

/// A step of one or two inputs of shape (4, 6), over two tensors that it finds.
class RandomStep {
 public:
  RandomStep(unsigned seed, Writes writes, Device device = Device::cpu()) {
    manual_seed(seed);
    gain = to(randn({6}), device);
    running = to(zeros({4, 6}), device);
    std::mt19937 random(seed);
    const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
    const std::size_t size = 4 + below(14);
    for (std::size_t i = 0; i < size; ++i) {
      if (i > 0 && below(4) == 0) {
        code_.push_back(code_[below(i)]);  // once more
        continue;
      }
      code_.push_back({below(writes == Writes::sometimes ? 14 : 11), below(i + 2), below(i + 2), below(4)});
    }
    for (std::size_t i = 0; i < 1 + below(3); ++i) returned_.push_back(below(size + 2));
  }

  std::vector<Tensor> operator()(std::span<const Tensor> in) const {
    std::vector<Tensor> values{in[0], in[1]};
    for (const Instruction& i : code_) values.push_back(result(i, values));
    std::vector<Tensor> results;
    for (const std::size_t i : returned_) results.push_back(values[i]);
    return results;
  }

  Tensor gain, running;

 private:
  struct Instruction {
    std::size_t kind, a, b, number;
  };

  Tensor result(const Instruction& i, const std::vector<Tensor>& values) const {
    static constexpr double numbers[] = {0.0, -0.0, 0.5, 2.0};
    const Tensor &a = values[i.a], &b = values[i.b];
    switch (i.kind) {
      case 0:
        return add(a, b);
      case 1:
        return mul(a, numbers[i.number]);
      case 2:
        return gelu(a);
      case 3:
        return softmax(a, -1);
      case 4:
        return dropout(a, 0.25);
      case 5:
        return reshape(reshape(a, {6, 4}), {4, 6});
      case 6:
        return contiguous(transpose(transpose(a, 0, 1), 0, 1));
      case 7:
        return layer_norm(a, gain, {});
      case 8:
        return add(a, full({6}, numbers[i.number], {a.dtype(), a.device()}));
      case 9:
        return mul(narrow(a, 0, 0, 1), b);
      case 10: {
        const NoGrad guard;
        add_(running, a);
        return mul(running, 0.5);
      }
      case 11: {
        const Tensor made = clone(a);
        add_(narrow(made, 0, 1, 2), 1.5);
        return made;
      }
      case 12:
        fill_(narrow(empty({4, 6}, {a.dtype(), a.device()}), 0, 0, 2), 1);
        return add(a, 0.5);
      default:
        return i.a > 1 ? mul_(a, 0.5) : mul(a, 0.5);  // not the caller's
    }
  }

  std::vector<Instruction> code_;
  std::vector<std::size_t> returned_;
};

/// By bits; where there is no tensor there is none.
inline void check_same(std::span<const Tensor> got, std::span<const Tensor> expected) {
  REQUIRE(got.size() == expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    INFO("tensor " << i);
    REQUIRE(got[i].defined() == expected[i].defined());
    if (got[i].defined()) CHECK(same_bits(got[i], expected[i]));
  }
}

/// Inputs of a call, in each call others.
inline std::vector<Tensor> inputs_of(unsigned call, Device device = Device::cpu()) {
  return {to(numbers({4, 6}, f32, 2 * call + 1), device), to(numbers({4, 6}, f32, 2 * call + 2), device)};
}

/// What a call of `body`, which is `of` or a program of it, gives and writes, and the random numbers behind.
template <class F>
std::vector<Tensor> effects_of(const RandomStep& of, const F& body, unsigned call) {
  manual_seed(call);
  fill_(of.running, 0.25);
  const std::vector<Tensor> in = inputs_of(call);
  std::vector<Tensor> results = body(in);
  for (const Tensor& t : {in[0], in[1], clone(of.running), randn({2})}) results.push_back(t);
  return results;
}

/// The same, and gradients of a backward from all results, without gradients zeros.
template <class F>
std::vector<Tensor> gradients_of(RandomStep& of, const F& body, unsigned call,
                                 Device device = Device::cpu()) {
  manual_seed(call);
  of.gain.set_grad({});
  of.gain.requires_grad_();
  std::vector<Tensor> in = inputs_of(call, device);
  for (Tensor& x : in) x.requires_grad_();
  std::vector<Tensor> results = body(in);
  for (std::size_t i = 0; i < in.size(); ++i) results.push_back(in[i]);
  Tensor total = sum(mul(in[0], 0.0));
  for (const Tensor& y : results) total = add(total, sum(square(y)));
  total.backward();
  for (const Tensor& t : {in[0].grad(), in[1].grad(), of.gain.grad(), clone(of.running), randn({2})})
    results.push_back(t.defined() ? t : zeros({}));
  return results;
}

}  // namespace sherd::test
