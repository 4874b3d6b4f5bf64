// Rules over lists of tensors: the library's follow their formulas, and an application's own is what its
// functor says, on kernels and in ops.
#include "runtime/cpu/list_step_loop.h"

#include <cmath>
#include <vector>

#include "runtime/ops/optimizer_steps.h"
#include "tests/message_of.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::test;

namespace {

/// The sign of an average of gradients: the least that a rule says.
struct SignStep : ListStep<SignStep> {
  static constexpr std::string_view name = "sign_step_";
  static constexpr std::string_view states[] = {"momentum"};

  template <class D, class Rounded>
  constexpr auto factors(D lr, D, const Rounded& rounded) const {
    return rounded(-lr);
  }
  template <class T>
  constexpr Stepped<T, 1> operator()(T rate, T p, T g, T m) const {
    using math::fma;
    using math::where;
    const T ahead = fma(T(0.1), g, m * T(0.9));
    const T sign = where(ahead > T(0), T(1), where(ahead < T(0), T(-1), T(0)));
    return {fma(rate, sign, p), {fma(T(0.01), g, m * T(0.99))}};
  }
  bool operator==(const SignStep&) const = default;
};

/// All that a rule may have: forms, state that one form drops, a count in one of them, and what may surround
/// a step.
struct FullStep : ListStep<FullStep> {
  static constexpr std::string_view name = "full_step_";
  static constexpr std::string_view states[] = {"first", "second", "third"};
  bool counted = false;
  ops::Skippable skippable = ops::Skippable::no;
  ops::Clipped clipped = ops::Clipped::no;
  ops::Twins twins = ops::Twins::no;

  static constexpr int forms = 2;
  constexpr int form() const { return counted; }
  static constexpr Mask keeps(int form) { return form == 0 ? 0b101 : 0b111; }
  static constexpr bool counts(int form) { return form == 1; }
  template <class T>
  struct Factors {
    T rate, share;
  };
  template <class D, class Rounded>
  constexpr auto factors(D lr, D step, const Rounded& rounded) const {
    return Factors<decltype(rounded(lr))>{rounded(-lr), rounded(D(1.0) / step)};
  }
  template <int form, class T>
  constexpr Stepped<T, 3> operator()(const Factors<T>& f, T p, T g, T a, T b, T c) const {
    using math::fma;
    const T first = fma(f.share, g, a);
    T third = first + c;
    if constexpr (form == 1) third = third * b;
    return {fma(f.rate, third, p), {first, b + g, third}};
  }
  void fields(auto&& on) const { on("counted", counted); }
  bool operator==(const FullStep&) const = default;
};

const std::vector<std::int64_t> sizes{0, 1, 3, 1000, 40000, 0, 17};

/// Inputs of one step of `rule`.
template <class Rule>
std::vector<Tensor> inputs(const Rule& rule, DType gradients = f32, double skip = 0, DType dtype = f32) {
  const StepLists lists = rule.lists();
  std::vector<Tensor> in{Tensor::scalar(0.1, {f64})};
  if (lists.skippable) in.push_back(Tensor::scalar(skip, {f32}));
  if (lists.clipped) in.push_back(Tensor::scalar(0.3, {f64}));
  unsigned seed = 1;
  for (const std::int64_t n : sizes) {
    in.push_back(numbers({n}, dtype, ++seed));
    in.push_back(numbers({n}, gradients, ++seed));
    for (std::size_t k = 0; k < lists.states.size(); ++k)
      if (has(lists.kept, k)) in.push_back(numbers({n}, dtype, ++seed));
    if (lists.counts) in.push_back(Tensor::scalar(static_cast<double>(n % 5), {f64}));
    if (lists.twins) in.push_back(numbers({n}, bf16, ++seed));
  }
  return in;
}

/// A step by the CPU's kernel writes what the rule gives in ops, and nothing else.
template <class Rule>
void check_step(const Rule& rule, DType gradients, double skip = 0) {
  INFO(detail::op_text(rule.name, rule) << " of " << name_of(gradients) << ", skip " << skip);
  std::vector<Tensor> in = inputs(rule, gradients, skip), before;
  for (const Tensor& t : in) before.push_back(clone(t));
  const Tensors expected = rule.reference(before);
  const Tensors got = apply_many(rule, in);
  REQUIRE(got.size() == expected.size());
  std::size_t written = 0;
  for (std::size_t i = 0; i < in.size(); ++i) {
    INFO("input " << i);
    if (!rule.writes(i)) {
      CHECK(same_bits(in[i], before[i]));
      continue;
    }
    CHECK(distance(in[i], expected[written++]) < (in[i].dtype() == bf16  ? 1e-2
                                                  : in[i].dtype() == f16 ? 1e-3
                                                                         : 1e-6));
    if (skip != 0) CHECK(same_bits(in[i], before[i]));
  }
  CHECK(written == expected.size());
}

/// Where `in` has the first parameter, one tensor of all.
std::vector<Tensor> joined(const std::vector<Tensor>& in, std::size_t stride) {
  std::vector<Tensor> one{in[0]};
  for (std::size_t k = 0; k < stride; ++k) {
    std::vector<Tensor> parts;
    for (std::size_t i = 1 + k; i < in.size(); i += stride) parts.push_back(in[i]);
    one.push_back(parts[0].shape().rank() == 0 ? clone(parts[0]) : cat(parts, 0));
  }
  return one;
}

}  // namespace

TEST_CASE("lists: a rule of an application's own runs in ops until it has a kernel, and then as those say") {
  const std::vector<Tensor> in = inputs(SignStep{});
  const Tensors expected = SignStep{}.reference(in);
  const Tensors got = apply_many(SignStep{}, in);
  for (std::size_t i = 0; i < got.size(); ++i) CHECK(same_bits(got[i], expected[i]));
  cpu::add_list_step<SignStep>();
  for (const DType gradients : {f32, bf16, f16}) check_step(SignStep{}, gradients);
}

TEST_CASE("lists: forms, counts, skipped and clipped steps and twins are what a rule says of itself") {
  cpu::add_list_step<FullStep>();
  for (const DType gradients : {f32, bf16, f16})
    for (const bool counted : {false, true})
      for (const ops::Clipped clipped : {ops::Clipped::no, ops::Clipped::yes})
        for (const ops::Twins twins : {ops::Twins::no, ops::Twins::yes}) {
          check_step(FullStep{.counted = counted, .clipped = clipped, .twins = twins}, gradients);
          for (const double skip : {0.0, 1.0})
            check_step(
                FullStep{
                    .counted = counted, .skippable = ops::Skippable::yes, .clipped = clipped, .twins = twins},
                gradients, skip);
        }
}

TEST_CASE("lists: a step of 16 bits has the bits of one of f32 copies, rounded once, in ops and in kernels") {
  const auto check = [](const auto& rule, DType dtype) {
    INFO(detail::op_text(rule.name, rule) << " of " << name_of(dtype));
    const std::vector<Tensor> in =
        inputs(rule, dtype == bf16 ? f16 : bf16, 0, dtype);  // clipped in their own
    std::vector<Tensor> wide, by_ops;
    for (const Tensor& t : in) {
      wide.push_back(t.dtype() == dtype ? to(t, f32) : clone(t));
      by_ops.push_back(clone(t));
    }
    const Tensors in_ops = rule.reference(by_ops), wide_in_ops = rule.reference(wide);
    apply_many(rule, in);
    apply_many(rule, wide);
    std::size_t written = 0;
    for (std::size_t i = 0; i < in.size(); ++i) {
      INFO("input " << i);
      if (!rule.writes(i)) continue;
      CHECK(same_bits(in[i], to(wide[i], in[i].dtype())));
      CHECK(same_bits(in_ops[written], to(wide_in_ops[written], in[i].dtype())));
      ++written;
    }
  };
  for (const DType dtype : {bf16, f16}) {
    check(SignStep{}, dtype);
    for (const bool counted : {false, true})
      for (const ops::Clipped clipped : {ops::Clipped::no, ops::Clipped::yes})
        check(FullStep{.counted = counted, .skippable = ops::Skippable::yes, .clipped = clipped}, dtype);
    check(ops::AdamStep{.weight_decay = 0.1, .decoupled = true}, dtype);
    check(ops::SgdStep{.momentum = 0.9}, dtype);
    check(ops::RmspropStep{}, dtype);
    check(ops::LionStep{.weight_decay = 0.1}, dtype);
    check(ops::AdagradStep{.lr_decay = 0.1}, dtype);
  }
}

TEST_CASE("lists: a clipped gradient has the same bits in ops and in kernels, in every dtype") {
  for (const DType dtype : {f32, bf16, f16})
    for (const double factor : {0.3, 0.5 * (1 + 0x1p-8 + 0x1p-30), 0.5 * (1 + 0x1p-11 + 0x1p-30), 1e-3}) {
      INFO(name_of(dtype) << " times " << factor);
      ops::SgdStep op;
      op.clipped = ops::Clipped::yes;
      const Tensor gradient = cat(std::vector{ones({8}, {dtype}), numbers({3000}, dtype, 5)}, 0);
      const std::vector<Tensor> in{Tensor::scalar(-1.0, {f64}), Tensor::scalar(factor, {f64}),
                                   zeros(gradient.shape()), gradient};
      const Tensor expected = op.reference(in)[0];
      apply_many(op, in);
      CHECK(same_bits(in[2], expected));
    }
}

TEST_CASE("lists: a step that is refused for one parameter has changed nothing of the others") {
  const Tensor holes = slice(ones({2, 4}), 1, 0, 4, 2);
  for (const std::size_t bad : {0, 1, 2}) {
    std::vector<Tensor> in{Tensor::scalar(0.1, {f64})};
    for (std::size_t k = 0; k < 3; ++k)
      for (const Tensor& t : {k == bad ? holes : ones({2, 2}), ones({2, 2}), zeros({2, 2}), zeros({2, 2}),
                              Tensor::scalar(0.0, {f64})})
        in.push_back(t);
    std::vector<Tensor> before;
    for (const Tensor& t : in) before.push_back(clone(t));
    CHECK_THROWS_AS(apply_many(ops::AdamStep{}, in), StateError);
    for (std::size_t i = 0; i < in.size(); ++i) CHECK(same_bits(in[i], before[i]));
  }
}

TEST_CASE("lists: what does not fit an own rule is refused by its name") {
  const Tensor lr = Tensor::scalar(0.1, {f64}), p = zeros({3});
  CHECK(one_line_about(message_of<ValueError>([&] { apply_many(SignStep{}, {lr, p, p}); }), "sign_step_"));
  CHECK(message_of<ShapeError>([&] { apply_many(SignStep{}, {lr, p, ones({3}), zeros({4})}); }) ==
        "sign_step_: a parameter of shape (3) has a momentum of shape (4)");
  CHECK(one_line_about(
      message_of<DTypeError>([&] { apply_many(SignStep{}, {lr, p, ones({3}), zeros({3}, {f64})}); }),
      "sign_step_"));
}

TEST_CASE("lists: a step has the same bits however the elements are split over tensors and threads") {
  const auto check = [](const auto& rule) {
    std::vector<Tensor> parts = inputs(rule);
    const std::size_t stride = rule.stride();
    for (std::size_t i = 1; i < parts.size(); ++i)  // one count for all
      if (parts[i].shape().rank() == 0) parts[i] = Tensor::scalar(2, {f64});
    const std::vector<Tensor> whole = joined(parts, stride);
    {
      const Threads scope(1);
      apply_many(rule, whole);
    }
    const Threads scope(2);
    apply_many(rule, parts);
    const std::vector<Tensor> after = joined(parts, stride);
    for (std::size_t i = 0; i < whole.size(); ++i) {
      INFO(rule.name << " input " << i);
      CHECK(same_bits(whole[i], after[i]));
    }
    apply_many(rule, {parts[0]});
  };
  check(ops::AdamStep{.weight_decay = 0.01, .decoupled = true});
  check(ops::AdamStep{.weight_decay = 0.01, .amsgrad = true, .maximize = true});
  check(ops::SgdStep{.momentum = 0.9, .nesterov = true});
  check(ops::RmspropStep{.momentum = 0.9});
  check(ops::LionStep{.weight_decay = 0.1});
  check(ops::AdagradStep{.weight_decay = 0.1});
}

TEST_CASE("lists: ten steps of Adam and AdamW follow the formulas") {
  const double lr = 1e-2, beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  for (const bool decoupled : {false, true})
    for (const double decay : {0.0, 0.1}) {
      const Tensor start = numbers({1000}, f32, 1), gradient = numbers({1000}, f32, 2);
      const std::vector<Tensor> in{
          Tensor::scalar(lr, {f64}), clone(start), gradient, zeros({1000}), zeros({1000}), zeros({}, {f64})};
      std::vector<double> p = doubles(start), m(1000), v(1000);
      const std::vector<double> gradients = doubles(gradient);
      for (int step = 1; step <= 10; ++step) {
        apply_many(ops::AdamStep{.beta2 = beta2, .weight_decay = decay, .decoupled = decoupled}, in);
        for (std::size_t i = 0; i < p.size(); ++i) {
          double g = gradients[i];
          if (decoupled)
            p[i] *= 1 - lr * decay;
          else
            g += decay * p[i];
          m[i] = beta1 * m[i] + (1 - beta1) * g;
          v[i] = beta2 * v[i] + (1 - beta2) * g * g;
          p[i] -=
              lr / (1 - std::pow(beta1, step)) * m[i] / (std::sqrt(v[i] / (1 - std::pow(beta2, step))) + eps);
        }
      }
      INFO("decoupled " << decoupled << " decay " << decay);
      CHECK(in[5].item() == 10);
      CHECK(distance(in[1], Tensor::from(p, {1000})) < 4e-6);
    }
}

TEST_CASE("lists: amsgrad divides by the largest average so far, NaN included") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  // Of v = 0.5 v + 0.5 g^2: the third is below the second.
  std::vector<Tensor> in{Tensor::scalar(1, {f64}), zeros({3}), Tensor(), zeros({3}), zeros({3}), zeros({3}),
                         zeros({}, {f64})};
  const ops::AdamStep op{.beta1 = 0, .beta2 = 0.5, .eps = 0, .amsgrad = true};
  double v = 0, most = 0, p = 0;
  for (int step = 1; const double g : {1.0, 4.0, -1.0, 0.5, 8.0}) {
    in[2] = Tensor::from<float>({static_cast<float>(g), static_cast<float>(step == 2 ? nan : g), 1});
    apply_many(op, in);
    v = 0.5 * v + 0.5 * g * g;
    most = std::max(most, v);
    p -= g / std::sqrt(most / (1 - std::pow(0.5, step++)));
    const auto values = in[1].to_vector<float>();
    CHECK(std::abs(values[0] - p) < 1e-5);
    CHECK(std::isnan(values[1]) == (step > 2));
    CHECK(std::abs(in[5].to_vector<float>()[0] - most) < 1e-5);
  }
}

TEST_CASE("lists: SGD with and without momentum follows the formulas") {
  for (const double momentum : {0.0, 0.9}) {
    const Tensor start = numbers({300}, f32, 1), gradient = numbers({300}, f32, 2);
    std::vector<Tensor> in{Tensor::scalar(0.1, {f64}), clone(start), gradient};
    if (momentum != 0) in.insert(in.end(), {zeros({300}), zeros({}, {f64})});
    std::vector<double> p = doubles(start), buffer(300);
    const std::vector<double> gradients = doubles(gradient);
    for (int step = 0; step < 5; ++step) {
      apply_many(ops::SgdStep{.momentum = momentum, .weight_decay = 0.01}, in);
      for (std::size_t i = 0; i < p.size(); ++i) {
        const double g = gradients[i] + 0.01 * p[i];
        buffer[i] = momentum * buffer[i] + g;
        p[i] -= 0.1 * (momentum > 0 ? buffer[i] : g);
      }
    }
    CHECK(distance(in[1], Tensor::from(p, {300})) < 1e-5);
  }
}
