// The cross entropy of a linear layer by chunks of its logits beside the two ops, and the memory that it
// takes.
#include <algorithm>
#include <cmath>

#include "autograd/autograd.h"
#include "runtime/context.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::test;

namespace {

/// Loss and gradients of x, weight and, where it is there, bias.
template <class F>
std::vector<Tensor> results(std::vector<Tensor> in, const Tensor& upstream, const F& f) {
  for (Tensor& t : in) t = t.detach().requires_grad_();
  const Tensor loss = f(in);
  std::vector<Tensor> all{loss.detach()};
  for (const Tensor& g : grad(loss, in, upstream)) all.push_back(g);
  return all;
}

struct Form {
  Reduction reduction;
  double smoothing;
  bool bias;
  LossPrecision precision;
};

/// Largest difference beside the largest number.
double error(const Tensor& found, const Tensor& wanted) {
  const std::vector<double> a = doubles(found), b = doubles(wanted);
  double most = 0, size = 1e-30;
  for (std::size_t i = 0; i < a.size(); ++i) {
    most = std::max(most, std::abs(a[i] - b[i]));
    size = std::max(size, std::abs(b[i]));
  }
  return most / size;
}

}  // namespace

TEST_CASE("linear_cross_entropy is cross_entropy of linear, for any options, sizes and chunks") {
  for (const DType dtype : {f64, f32, bf16, f16})
    for (const Reduction reduction : {Reduction::mean, Reduction::sum, Reduction::none})
      for (const double smoothing : {0.0, 0.1})
        for (const bool bias : {false, true})
          for (const LossPrecision precision : {LossPrecision::of_logits, LossPrecision::wide})
            for (const std::int64_t rows : {1, 6, 13}) {
              const std::int64_t classes = 11, width = 5;
              std::vector<Tensor> in{numbers({rows, width}, dtype, 1), numbers({classes, width}, dtype, 2)};
              if (bias) in.push_back(numbers({classes}, dtype, 3));
              Tensor targets = randint(0, classes, {rows});
              if (rows > 1) fill_(narrow(targets, 0, 1, 1), -100);
              const CrossEntropyOptions options{
                  .reduction = reduction, .precision = precision, .label_smoothing = smoothing};
              const auto b = [&](std::span<const Tensor> t) { return bias ? t[2] : Tensor(); };
              const DType loss_dtype = precision == LossPrecision::wide && size_of(dtype) == 2 ? f32 : dtype;
              const Tensor gy = numbers(reduction == Reduction::none ? Shape{rows} : Shape{}, loss_dtype, 4);
              const auto two_ops = [&](std::span<const Tensor> t) {
                return cross_entropy(linear(t[0], t[1], b(t)), targets, options);
              };
              const std::vector<Tensor> wanted = results(in, gy, two_ops);
              for (const std::int64_t chunk : {0, 1, 4, 13, 100}) {
                INFO(name_of(dtype) << " reduction " << static_cast<int>(reduction) << " smoothing "
                                    << smoothing << " bias " << bias << " rows " << rows << " chunk "
                                    << chunk);
                const std::vector<Tensor> found = results(in, gy, [&](std::span<const Tensor> t) {
                  return linear_cross_entropy(t[0], t[1], targets,
                                              {.bias = b(t),
                                               .reduction = reduction,
                                               .precision = precision,
                                               .label_smoothing = smoothing,
                                               .chunk = chunk});
                });
                REQUIRE(found.size() == wanted.size());
                const double rounding = dtype == f64   ? 1e-12
                                        : dtype == f32 ? 1e-5
                                        : dtype == f16 ? 1e-2
                                                       : 6e-2;
                for (std::size_t i = 0; i < found.size(); ++i) {
                  INFO("result " << i);
                  CHECK(found[i].spec() == wanted[i].spec());
                  CHECK(error(found[i], wanted[i]) < rounding);
                }
              }
            }
}

TEST_CASE("linear_cross_entropy: more axes, ignored targets, frozen parts and no targets at all") {
  const Tensor x = numbers({2, 3, 4}, f64, 1), w = numbers({7, 4}, f64, 2).requires_grad_();
  const Tensor targets = Tensor::from<std::int64_t>({1, 6, 3, 3, 0, 2}, {2, 3});
  const Tensor rows = linear_cross_entropy(x, w, targets, {.reduction = Reduction::none, .ignore_index = 3});
  CHECK(rows.shape() == Shape{2, 3});
  CHECK(rows.detach()[{0, 2}].item() == 0);
  CHECK(distance(linear_cross_entropy(x, w, targets, {.ignore_index = 3}), div(sum(rows), 4)) < 1e-12);
  // The classes as whole numbers of another dtype.
  CHECK(same_bits(linear_cross_entropy(x, w, to(targets, i32)).detach(),
                  linear_cross_entropy(x, w, targets).detach()));
  // Of x alone, and of the weight alone.
  Tensor leaf = x.detach().requires_grad_();
  const std::vector<Tensor> both = grad(linear_cross_entropy(leaf, w, targets), std::array{leaf, w});
  CHECK(same_bits(grad(linear_cross_entropy(leaf, w.detach(), targets), std::span(&leaf, 1))[0], both[0]));
  CHECK(same_bits(grad(linear_cross_entropy(x, w, targets), std::span(&w, 1))[0], both[1]));
  const Tensor none = zeros({0, 4}, {f64});
  CHECK(linear_cross_entropy(none, w, zeros({0}, {i64}), {.reduction = Reduction::sum}).item() == 0);
  CHECK(std::isnan(linear_cross_entropy(none, w, zeros({0}, {i64})).item()));
}

TEST_CASE("linear_cross_entropy: gradients and second derivatives are those of finite differences") {
  const Tensor targets = Tensor::from<std::int64_t>({1, -100, 2, 0, 2}, {5});
  const std::vector<Tensor> in{numbers({5, 3}, f64, 1), numbers({4, 3}, f64, 2), numbers({4}, f64, 3)};
  for (const double smoothing : {0.0, 0.2}) {
    const auto loss = [&](std::span<const Tensor> t) {
      return linear_cross_entropy(t[0], t[1], targets,
                                  {.bias = t[2], .label_smoothing = smoothing, .chunk = 2});
    };
    CHECK(gradient_error(loss, in) < 1e-6);
    const auto slope = [&](std::span<const Tensor> t) {
      return sum(square(grad(loss(t), t, {}, {.create_graph = true})[1]));
    };
    CHECK(gradient_error(slope, in) < 1e-6);
  }
}

TEST_CASE("linear_cross_entropy repeats to the bit for any number of threads") {
  const Tensor targets = randint(0, 700, {600});
  const std::vector<Tensor> in{numbers({600, 16}, f32, 1), numbers({700, 16}, f32, 2)};
  const auto run = [&](int threads) {
    const Threads scope(threads);
    return results(in, {},
                   [&](std::span<const Tensor> t) { return linear_cross_entropy(t[0], t[1], targets); });
  };
  const std::vector<Tensor> one = run(1), two = run(2);
  for (std::size_t i = 0; i < one.size(); ++i) CHECK(same_bits(one[i], two[i]));
}

TEST_CASE("linear_cross_entropy never holds all logits: its peak is a small part of their size",
          "[one thread]") {
  const std::int64_t rows = 4096, classes = 8192, width = 32;
  const Tensor x = numbers({rows, width}, f32, 1).requires_grad_(),
               w = numbers({classes, width}, f32, 2).requires_grad_();
  const Tensor targets = randint(0, classes, {rows});
  const std::int64_t logits = rows * classes * 4;
  const auto peak = [&](const std::function<Tensor()>& loss) {
    MemoryLedger& memory = Context::current().memory();
    const std::int64_t before = memory.held(DeviceType::cpu).total();
    memory.reset_peak(DeviceType::cpu);
    grad(loss(), std::array{x, w});
    return memory.peak(DeviceType::cpu) - before;
  };
  CHECK(peak([&] { return cross_entropy(linear(x, w), targets); }) >= logits);
  for (const double smoothing : {0.0, 0.1})
    CHECK(peak([&] { return linear_cross_entropy(x, w, targets, {.label_smoothing = smoothing}); }) <
          logits / 4);
  CHECK(peak([&] { return linear_cross_entropy(x, w, targets, {.chunk = 64}); }) < logits / 16);
}

TEST_CASE("linear_cross_entropy: what does not fit is refused in one line") {
  const Tensor x = numbers({3, 4}, f32), w = numbers({5, 4}, f32), t = zeros({3}, {i64});
  const auto refuses = [&]<class E>(std::type_identity<E>, const std::function<void()>& call,
                                    const char* about) { CHECK(one_line_about(message_of<E>(call), about)); };
  const std::type_identity<ShapeError> shape;
  const std::type_identity<DTypeError> dtype;
  const std::type_identity<ValueError> value;
  refuses(shape, [&] { linear_cross_entropy(x, numbers({5, 3}, f32), t); }, "linear_cross_entropy");
  refuses(shape, [&] { linear_cross_entropy(x, w, zeros({4}, {i64})); }, "linear_cross_entropy");
  refuses(shape, [&] { linear_cross_entropy(x, w, zeros({3, 1}, {i64})); }, "linear_cross_entropy");
  refuses(shape, [&] { linear_cross_entropy(numbers({}, f32), w, t); }, "linear_cross_entropy");
  refuses(shape, [&] { linear_cross_entropy(x, w, t, {.bias = zeros({4})}); }, "bias");
  refuses(dtype, [&] { linear_cross_entropy(x, to(w, f64), t); }, "linear_cross_entropy");
  refuses(dtype, [&] { linear_cross_entropy(x, w, numbers({3}, f32)); }, "linear_cross_entropy");
  refuses(dtype, [&] { linear_cross_entropy(x, w, t, {.bias = zeros({5}, {f64})}); }, "bias");
  refuses(value, [&] { linear_cross_entropy(x, w, t, {.label_smoothing = 1.5}); }, "label smoothing");
  refuses(value, [&] { linear_cross_entropy(x, w, t, {.chunk = -1}); }, "chunks of -1 rows");
  CHECK_THROWS(linear_cross_entropy(x, w, full({3}, 5, {i64})));
}
