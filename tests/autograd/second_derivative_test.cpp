// What create_graph gives, or refuses: second derivatives of ops of an application's own.
#include <map>

#include "autograd/autograd.h"
#include "runtime/apply.h"
#include "runtime/cpu/elementwise_loop.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::test;

namespace sherd::test {

/// How the op below comes by the factor of its gradient, 3 x^2.
enum class Rule {
  in_ops,
  through_masks,
  of_detached,
  without_gradient,
  by_item,
  by_vector,
  by_pointer,
  by_print
};

/// 3 x^2, as an op without a gradient.
struct Slope {
  static constexpr std::string_view name = "slope";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr bool differentiable = false;
  template <class T>
  constexpr T operator()(T x) const {
    return T(3) * x * x;
  }
  bool operator==(const Slope&) const = default;
};

/// x^3 of one element.
struct Cube {
  static constexpr std::string_view name = "cube";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr Reads reads{.inputs = 1};
  Rule rule = Rule::in_ops;

  template <class T>
  constexpr T operator()(T x) const {
    return x * x * x;
  }
  Tensor slope(const Tensor& x) const {
    const auto of_value = [](double v) { return full({1}, 3 * v * v, {f64}); };
    switch (rule) {
      case Rule::in_ops:
        return mul(square(x), 3.0);
      case Rule::through_masks:
        return mul(where(greater(x, 0.0), square(x), mul(x, x)), 3.0);
      case Rule::of_detached:
        return apply(Slope{}, x.detach());
      case Rule::without_gradient:
        return apply(Slope{}, x);
      case Rule::by_item:
        return of_value(x.item());
      case Rule::by_vector:
        return of_value(x.to_vector<double>()[0]);
      case Rule::by_pointer:
        return of_value(*x.data<double>());
      case Rule::by_print:
        return mul(square(x), to_string(x).empty() ? 1.0 : 3.0);
    }
    return {};
  }
  Tensors grad(const GradArgs& args) const { return {mul(args.gy[0], slope(args.inputs[0]))}; }
  bool operator==(const Cube&) const = default;
};

}  // namespace sherd::test

namespace sherd::test {

/// x^3, whose gradient is that of its reference.
struct CubeByReference {
  static constexpr std::string_view name = "cube_by_reference";
  Rule rule = Rule::in_ops;

  Specs infer(SpecSpan in) const { return {in[0]}; }
  Tensors reference(Inputs in) const { return {mul(Cube{rule}.slope(in[0]), mul(in[0], 1.0 / 3))}; }
  bool operator==(const CubeByReference&) const = default;
};

}  // namespace sherd::test

namespace {

void add_kernels() {
  cpu::add_elementwise<Slope>();
  cpu::add_elementwise<Cube>();
}

}  // namespace

TEST_CASE("backward: a reference that would lose a term of the gradient is refused by name") {
  add_kernels();
  const Tensor x = full({1}, 2, {f64}).requires_grad_();
  const auto gradient = [&](Rule rule, bool create_graph) {
    return grad(apply(CubeByReference{rule}, x), std::span(&x, 1), {}, {.create_graph = create_graph})[0]
        .item();
  };
  for (const bool create_graph : {false, true}) {
    CHECK(gradient(Rule::in_ops, create_graph) == Approx(12));
    CHECK(gradient(Rule::through_masks, create_graph) == Approx(12));
    CHECK(gradient(Rule::of_detached, create_graph) == Approx(4));  // its word that the factor is constant
    for (const Rule rule : {Rule::without_gradient, Rule::by_item, Rule::by_vector, Rule::by_pointer}) {
      const std::string text = message_of<NotImplementedError>([&] { gradient(rule, create_graph); });
      INFO(text);
      CHECK(one_line_about(text, "cube_by_reference"));
      CHECK(one_line_about(text, rule == Rule::without_gradient ? "slope" : "on the host"));
    }
  }
}

TEST_CASE("create_graph: a rule that would lose its second derivative is refused by name") {
  add_kernels();
  struct Expected {
    Rule rule;
    const char* refused_for;  // null: it is not
    double second;            // at 2, where it is given
  };
  const Expected rules[] = {
      {Rule::in_ops, nullptr, 12},          {Rule::through_masks, nullptr, 12},
      {Rule::of_detached, nullptr, 0},      {Rule::without_gradient, "slope", 0},
      {Rule::by_item, "on the host", 0},    {Rule::by_vector, "on the host", 0},
      {Rule::by_pointer, "on the host", 0}, {Rule::by_print, "on the host", 0},
  };
  for (const Expected& expected : rules) {
    INFO("rule " << static_cast<int>(expected.rule));
    const Tensor x = full({1}, 2, {f64}).requires_grad_(), w = ones({1}, {f64}).requires_grad_();
    const Tensor y = mul(apply(Cube{expected.rule}, x), w);
    CHECK(grad(y, std::span(&x, 1), {}, {.retain_graph = true})[0].item() == 12);  // the first is right
    const auto first = [&] { return grad(y, std::span(&x, 1), {}, {.create_graph = true})[0]; };
    if (expected.refused_for != nullptr) {
      const std::string text = message_of<NotImplementedError>(first);
      INFO(text);
      CHECK(one_line_about(text, "cube"));
      CHECK(one_line_about(text, expected.refused_for));
      CHECK(one_line_about(text, "detach"));
      CHECK_FALSE(in_backward());
    } else {
      const Tensor inputs[] = {x, w};
      const std::vector<Tensor> second = grad(first(), inputs);
      CHECK((second[0].defined() ? second[0].item() : 0) == expected.second);
      CHECK(second[1].item() == 12);
    }
    // A backward that records nothing inside one that does may do as it likes.
    const Subscription hook = register_hook(y, [&](const Tensor&) {
      const GradMode recording(true);
      const Tensor z = full({1}, 2, {f64}).requires_grad_();
      CHECK(grad(apply(Cube{expected.rule}, z), std::span(&z, 1))[0].item() == 12);
      return Tensor{};
    });
    const Tensor u[] = {w};
    CHECK(grad(y, u, {}, {.create_graph = true})[0].item() == 8);
  }
}

TEST_CASE("a row that sees nothing, and one that is ignored, have no gradient of any order") {
  for (const DType dtype : {f32, f64})
    for (const bool again : {false, true}) {
      const auto leaf = [&](const Shape& shape, unsigned seed) {
        return numbers(shape, dtype, seed).requires_grad_();
      };
      const Tensor q = leaf({1, 1, 5, 4}, 1), k = leaf({1, 1, 2, 4}, 2), v = leaf({1, 1, 2, 4}, 3);
      const Tensor y = attention(q, k, v, {.causal = true});
      for (const double value : to(narrow(y, 2, 0, 3), f64).to_vector<double>()) CHECK(value == 0);
      const std::vector<Tensor> leaves{q, k, v};
      for (const Tensor& g : grad(sum(square(y)), leaves, {}, {.create_graph = again}))
        for (const double value : to(g.detach(), f64).to_vector<double>()) CHECK(std::isfinite(value));

      const Tensor logits = Tensor::from<double>({1, 2, double(INFINITY), 4, 5, double(NAN)}, {3, 2});
      const Tensor x = to(logits, dtype).detach().requires_grad_();
      const Tensor targets = Tensor::from<std::int64_t>({0, -100, -100}, {3});
      const Tensor g = grad(cross_entropy(x, targets), std::span(&x, 1), {}, {.create_graph = again})[0];
      const std::vector<double> values = to(g.detach(), f64).to_vector<double>();
      CHECK((values[0] != 0 && std::fabs(values[0] + values[1]) < 1e-6));
      CHECK(std::vector(values.begin() + 2, values.end()) == std::vector<double>(4, 0));
    }
}
