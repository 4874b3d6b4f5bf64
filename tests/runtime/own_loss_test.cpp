// Losses of an application's own: what a functor of input and target says is its mean and sum in one pass, on
// kernels and in ops.
#include <map>
#include <vector>

#include "autograd/autograd.h"
#include "autograd/capture/capture.h"
#include "runtime/cpu/loss_loop.h"
#include "runtime/ops/huber.h"
#include "runtime/ops/squared_error.h"
#include "tests/message_of.h"
#include "tests/runtime/harness.h"
#include "tests/runtime/own_losses.h"

using namespace sherd;
using namespace sherd::test;

namespace {

/// Has kernels of the elementwise op alone.
struct Composed : Rooted {
  static constexpr std::string_view name = "composed";
  bool operator==(const Composed&) const = default;
};

struct OfDoubles : Functor<"of_doubles", 2, DTypeSet{1 << static_cast<int>(DType::f64)}> {
  static constexpr Reads reads_a{.inputs = 0b11}, reads_b{.inputs = 0b11};
  double operator()(double x, double t) const { return x * t; }
  template <class T>
  constexpr T grad_a(T gy, T, T t, T) const {
    return gy * t;
  }
  template <class T>
  constexpr T grad_b(T gy, T x, T, T) const {
    return gy * x;
  }
};

static_assert(ElementwiseLoss<Rooted> && ElementwiseLoss<Grown> && ElementwiseLoss<Tilted>);
static_assert(!ElementwiseLoss<OfDoubles*>);

void add_all() {
  cpu::add_loss<Rooted>();
  cpu::add_loss<Grown>();
  cpu::add_loss<Tilted>();
  cpu::add_elementwise<Composed>();
}

/// Calls `body` with each kind of loss.
void for_each_loss(const auto& body) {
  add_all();
  body(Rooted{0.7});
  body(Grown{});
  body(Tilted{});
  body(Composed{{0.7}});
}

/// Counts the ops that run, by name.
class Counted final : public Listener {
 public:
  void after(const AnyOp& op, Inputs, Outputs) override { ++times[std::string(op.name())]; }
  std::map<std::string, int> times;
};

Tensor total(const Tensor& loss, Reduction reduction) {
  return reduction == Reduction::none ? loss : reduction == Reduction::sum ? sum(loss) : mean(loss);
}

/// What an application would write without a loss in one pass: in f32 for 16 bits, rounded once.
Tensor composed(const auto& loss, const Tensor& x, const Tensor& t, Reduction reduction) {
  if (reduction == Reduction::none) return apply(loss, x, t);
  const DType wide = x.dtype() == f64 ? f64 : f32;
  return to(total(apply(loss, to(x, wide), to(t, wide)), reduction), x.dtype());
}

constexpr Reduction reductions[] = {Reduction::mean, Reduction::sum, Reduction::none};

}  // namespace

TEST_CASE("own losses: values and gradients have the bits of the mean and sum of the elementwise op") {
  for_each_loss([](const auto& loss) {
    for (const DType dtype : {f64, f32, f16, bf16})
      for (const std::int64_t n : {0, 1, 17, 513, 16385, 40000})
        for (const Reduction reduction : reductions)
          for (const bool of_target : {false, true}) {
            INFO(loss.name << " of " << n << " " << name_of(dtype) << ", reduction "
                           << static_cast<int>(reduction));
            const Tensor x = numbers({n}, dtype, 1).requires_grad_(),
                         t = numbers({n}, dtype, 2).requires_grad_(of_target);
            std::vector<Tensor> leaves{x};
            if (of_target) leaves.push_back(t);
            const Tensor one_pass = elementwise_loss(loss, x, t, reduction),
                         in_ops = composed(loss, x, t, reduction);
            CHECK(same_bits(one_pass, in_ops));
            const Tensor up = numbers(one_pass.shape(), dtype, 3);
            const std::vector<Tensor> got = grad(one_pass, leaves, up), want = grad(in_ops, leaves, up);
            for (std::size_t i = 0; i < leaves.size(); ++i) CHECK(same_bits(got[i], want[i]));
          }
  });
}

TEST_CASE("own losses: both gradients and the second derivative are those of finite differences") {
  for_each_loss([](const auto& loss) {
    for (const Reduction reduction : reductions)
      for (const auto& [a, b] : {std::pair{Shape{3, 5}, Shape{3, 5}}, {{}, {4}}, {{4}, {}}, {{}, {}}}) {
        INFO(loss.name << ", reduction " << static_cast<int>(reduction) << ", " << a << " and " << b);
        const std::vector<Tensor> in{numbers(a, f64, 1), numbers(b, f64, 2)};
        const auto f = [&](std::span<const Tensor> x) {
          return elementwise_loss(loss, x[0], x[1], reduction);
        };
        CHECK(gradient_error(f, in) < 1e-6);
        CHECK(second_gradient_error(f, in) < 1e-6);
      }
  });
}

TEST_CASE("own losses: a mean is one op, and its gradients are one") {
  add_all();
  const auto heard = [](const auto& loss, const char* name) {
    const Tensor x = numbers({3, 5}, f32, 1).requires_grad_(), t = numbers({3, 5}, f32, 2).requires_grad_();
    Counted forward, backward;
    const Tensor y = [&] {
      const Listening scope(forward);
      return elementwise_loss(loss, x, t);
    }();
    {
      const Listening scope(backward);
      grad(y, {x, t});
    }
    const std::string total = std::string(name) + "_total";
    CHECK(forward.times == std::map<std::string, int>{{total, 1}});
    CHECK(backward.times[total + "_grad"] == 1);
    for (const auto& [op, times] : backward.times) {
      INFO(op);
      CHECK((op == total + "_grad" || op == "full"));  // the gradient of the mean itself is 1
    }
  };
  heard(Rooted{}, "rooted");
  heard(Grown{}, "grown");
  heard(Tilted{}, "tilted");
}

TEST_CASE(
    "own losses: fields are part of the op, in its text and in what is equal, and a capture replays it") {
  add_all();
  const OpModel<ops::LossTotal<Rooted>> near({{0.5}, true}), far({{2}, true}), summed({{0.5}, false});
  CHECK(near.text() == "rooted_total[delta=0.5, mean=true]");
  CHECK(near.equals(*near.keep()));
  CHECK(!near.equals(far));
  CHECK(!near.equals(summed));
  const auto step = [](std::span<const Tensor> in) {
    return std::vector{elementwise_loss(Rooted{0.5}, in[0], in[1])};
  };
  const std::vector<Tensor> first{numbers({33}, f32, 1), numbers({33}, f32, 2)},
      second{numbers({33}, f32, 3), numbers({33}, f32, 4)};
  Program program = capture(step, first);
  CHECK(to_string(program).find("rooted_total[delta=0.5, mean=true]") != std::string::npos);
  CHECK(same_bits(program.replay(second)[0], step(second)[0]));
}

TEST_CASE("own losses: threads and layouts change no bit") {
  for_each_loss([](const auto& loss) {
    const Tensor x = numbers({300, 301}, f32, 1), t = numbers({300, 301}, f32, 2);
    const auto results = [&](const Tensor& a, const Tensor& b) {
      const Tensor u = a.detach().requires_grad_(), v = b.detach().requires_grad_();
      const Tensor y = elementwise_loss(loss, u, v);
      const std::vector<Tensor> g = grad(y, {u, v});
      return std::vector{y.detach(), g[0], g[1]};
    };
    std::vector<Tensor> want;
    {
      const Threads scope(1);
      want = results(x, t);
    }
    const Threads scope(2);
    for (const Lay lay : all_lays) {
      INFO(loss.name << ", " << to_string(lay));
      const std::vector<Tensor> got = results(laid(x, lay), laid(t, lay));
      for (std::size_t i = 0; i < want.size(); ++i) CHECK(same_bits(got[i], want[i]));
    }
  });
}

TEST_CASE("own losses: what does not fit is refused by the loss's name") {
  add_all();
  cpu::add_loss<OfDoubles>();
  const Tensor x = zeros({3}), far = zeros({3}, {f32, Device::meta()});
  for (const Reduction reduction : reductions) {
    const auto says = [&](const Tensor& a, const Tensor& b) {
      return [&, a, b] { elementwise_loss(Rooted{}, a, b, reduction); };
    };
    CHECK(message_of<ShapeError>(says(zeros({4, 1}), zeros({4})))
              .starts_with("rooted: an input of shape (4, 1)"));
    CHECK(one_line_about(message_of<DTypeError>(says(x, zeros({3}, {f64}))), "rooted"));
    CHECK(one_line_about(message_of<DTypeError>(says(zeros({3}, {i32}), zeros({3}, {i32}))), "rooted"));
    CHECK(one_line_about(message_of<DeviceError>(says(x, far)), "rooted"));
    CHECK(message_of<ValueError>(says({}, x)).starts_with("rooted: input 0 is an empty handle"));
    CHECK(message_of<ValueError>(says(x, {})).starts_with("rooted: input 1 is an empty handle"));
    CHECK(one_line_about(message_of<DTypeError>([&] { elementwise_loss(OfDoubles{}, x, x, reduction); }),
                         "of_doubles"));
    const Tensor two = full({3}, 2, {f64});
    CHECK(sum(elementwise_loss(OfDoubles{}, two, two, reduction)).item() ==
          (reduction == Reduction::mean ? 4 : 12));
  }
}

TEST_CASE("own losses: the library's are such, with the bits of the functors that are entered as ops") {
  for (const DType dtype : {f64, f32, f16, bf16}) {
    const Tensor x = numbers({20000}, dtype, 1), t = numbers({20000}, dtype, 2);
    CHECK(same_bits(mse_loss(x, t), elementwise_loss(ops::SquaredError{}, x, t)));
    CHECK(same_bits(mse_loss(x, t, Reduction::sum), composed(ops::SquaredError{}, x, t, Reduction::sum)));
    CHECK(same_bits(huber_loss(x, t, 0.3), composed(ops::Huber{0.3}, x, t, Reduction::mean)));
  }
}
