// The table of docs/edges.md: every row is what this build gives, and no row is missing.
#include <cmath>
#include <fstream>
#include <map>
#include <sstream>

#include "autograd/autograd.h"
#include "runtime/ops.h"
#include "tests/runtime/harness.h"
#include "tests/source_root.h"

using namespace sherd;
using namespace sherd::test;

namespace {

constexpr double inf = std::numeric_limits<double>::infinity();

std::string text_of(const Tensor& x) {
  std::string text;
  for (double v : doubles(x))
    text += (text.empty() ? "" : " ") + (std::isnan(v) ? "nan" : fmt::format("{:.10g}", v + 0.0));
  return text;
}

/// Second derivatives of pow: of its gradient in the exponent, with respect to base or exponent.
std::string second_of_pow(double base, double exponent, std::size_t with_respect_to) {
  const Tensor x = Tensor::from({base}, {1}).requires_grad_(),
               e = Tensor::from({exponent}, {1}).requires_grad_();
  const std::vector<Tensor> both{x, e};
  const std::vector<Tensor> first = grad(sum(pow(x, e)), both, {}, {.create_graph = true});
  return text_of(grad(sum(first[1]), both)[with_respect_to]);
}

std::string second_at_zero(const std::function<Tensor(const Tensor&)>& f) {
  const Tensor x = Tensor::scalar(0, {f64}).requires_grad_();
  const Tensor first = grad(f(x), std::span(&x, 1), {}, {.create_graph = true})[0];
  return text_of(grad(first, std::span(&x, 1))[0]);
}

const std::map<std::string, std::function<std::string()>>& rows() {
  static const std::map<std::string, std::function<std::string()>> list = {
      {"`gelu(inf)`, f32", [] { return text_of(gelu(Tensor::scalar(inf))); }},
      {"`gelu(inf)`, bf16 and f16",
       [] {
         const std::string half = text_of(gelu(Tensor::scalar(inf, {f16})));
         return half == text_of(gelu(Tensor::scalar(inf, {bf16}))) ? half : "they differ";
       }},
      {"`pow(-0, -0.5)`", [] { return text_of(pow(Tensor::scalar(-0.0), -0.5)); }},
      {"gradient of `cross_entropy` at a row of NaN whose target is ignored",
       [] {
         const Tensor x = Tensor::from<float>({NAN, NAN, 1, 2}, {2, 2}).requires_grad_();
         cross_entropy(x, Tensor::from<std::int64_t>({-100, 0}, {2})).backward();
         return text_of(select(x.grad(), 0, 0));
       }},
      {"second derivative of `erf` at 3e38, f32",
       [] {
         const Tensor x = Tensor::scalar(3e38, {f32}).requires_grad_();
         const Tensor slope = grad(erf(x), std::span(&x, 1), {}, {.create_graph = true})[0];
         return text_of(abs(grad(slope, std::span(&x, 1))[0]));
       }},
      {"causal `attention` of equal scores to 16 values of which the 13th is inf, f32: rows",
       [] {
         const Tensor q = zeros({1, 1, 16, 2}), v = ones({1, 1, 16, 2});
         fill_(select(v, 2, 12), inf);
         return text_of(select(reshape(attention(q, q, v, {.causal = true}), {16, 2}), 1, 0));
       }},
      {"`pow(-inf, 0.5)`", [] { return text_of(pow(Tensor::scalar(-inf), 0.5)); }},
      {"gradient of `pow(x, 0.5)` at -inf",
       [] {
         const Tensor x = Tensor::scalar(-inf).requires_grad_();
         pow(x, 0.5).backward();
         return text_of(abs(x.grad()));
       }},
      {"`layer_norm` of (1, -2, 3, 0.5) 1e30, f32",
       [] { return text_of(abs(layer_norm(mul(Tensor::from<float>({1, -2, 3, 0.5}, {4}), 1e30), {}, {}))); }},
      {"positions of `topk` of (1, 3, 3, 2, 3), k = 2",
       [] { return text_of(topk(Tensor::from<float>({1, 3, 3, 2, 3}, {5}), 2).indices); }},
      {"`remainder(7, 0)`, i32", [] { return text_of(remainder(Tensor::scalar(7, {i32}), 0)); }},
      {"gradient of `selu` at NaN",
       [] {
         const Tensor x = Tensor::scalar(NAN, {f64}).requires_grad_();
         selu(x).backward();
         return text_of(x.grad());
       }},
      {"`softplus(25) - 25`, f64", [] { return text_of(sub(softplus(Tensor::scalar(25, {f64})), 25)); }},
      {"`to((-1.5, 300, nan, inf), u8)`",
       [] { return text_of(to(Tensor::from<float>({-1.5, 300, NAN, INFINITY}, {4}), u8)); }},
      {"`to((nan, inf, -inf), i32)`",
       [] { return text_of(to(Tensor::from<float>({NAN, INFINITY, -INFINITY}, {3}), i32)); }},
      {"gradient of `norm(x, 3)` at (1, nan, 0)",
       [] {
         const Tensor x = Tensor::from<double>({1, NAN, 0}, {3}).requires_grad_();
         return text_of(grad(norm(x, 3), std::span(&x, 1))[0]);
       }},
      {"gradient of `bce_loss` in the target, of (0, 1) for (0, 1)",
       [] {
         const Tensor x = Tensor::from<double>({0, 1}, {2}),
                      t = Tensor::from<double>({0, 1}, {2}).requires_grad_();
         return text_of(grad(bce_loss(x, t, {.reduction = Reduction::sum}), std::span(&t, 1))[0]);
       }},
      {"gradient of `kl_div` in a target of 0, of -1",
       [] {
         const Tensor t = zeros({1}).requires_grad_();
         return text_of(grad(kl_div(full({1}, -1.0), t, Reduction::sum), std::span(&t, 1))[0]);
       }},
      {"gradient of `max_pool2d` of (1, nan, 2, nan)",
       [] {
         const Tensor x = Tensor::from<float>({1, NAN, 2, NAN}, {1, 1, 2, 2}).requires_grad_();
         return text_of(grad(sum(max_pool2d(x, 2)), std::span(&x, 1))[0]);
       }},
      {"second derivative of `norm(x, 0.5)` at (1, 0), second element",
       [] {
         const Tensor x = Tensor::from<double>({1, 0}, {2}).requires_grad_();
         const Tensor first = grad(norm(x, 0.5), std::span(&x, 1), {}, {.create_graph = true})[0];
         return text_of(select(grad(sum(first), std::span(&x, 1))[0], 0, 1));
       }},
      {"second derivative of `elu` at 0",
       [] { return second_at_zero([](const Tensor& x) { return elu(x); }); }},
      {"second derivative of `selu` at 0, f64",
       [] { return second_at_zero([](const Tensor& x) { return selu(x); }); }},
      {"gradient of `norm(x, inf)` at (1, nan, 0)",
       [] {
         const Tensor x = Tensor::from<double>({1, NAN, 0}, {3}).requires_grad_();
         return text_of(grad(norm(x, inf), std::span(&x, 1))[0]);
       }},
      {"gradient of `prod` at (inf, 2)",
       [] {
         const Tensor x = Tensor::from<double>({inf, 2}, {2}).requires_grad_();
         return text_of(grad(prod(x, {0}), std::span(&x, 1))[0]);
       }},
      {"gradient of `sum(cumprod(x, 0))` at (inf, 2)",
       [] {
         const Tensor x = Tensor::from<double>({inf, 2}, {2}).requires_grad_();
         return text_of(grad(sum(cumprod(x, 0)), std::span(&x, 1))[0]);
       }},
      {"second derivative of `pow(0, 2)` in the exponent", [] { return second_of_pow(0, 2, 1); }},
      {"mixed second derivative of `pow(-0, -1)`", [] { return second_of_pow(-0.0, -1, 0); }}};
  return list;
}

}  // namespace

TEST_CASE("edges: the table of the docs is what this build gives") {
  std::ifstream file(std::string(source_root) + "/docs/edges.md");
  REQUIRE(file.good());
  std::size_t seen = 0;
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("| ") || line.starts_with("| call")) continue;
    std::vector<std::string> cells;
    std::istringstream in(line.substr(1));
    for (std::string cell; std::getline(in, cell, '|');) cells.push_back(cell.substr(1, cell.size() - 2));
    INFO(line);
    REQUIRE(cells.size() == 4);
    REQUIRE(rows().contains(cells[0]));
    CHECK(rows().at(cells[0])() == cells[1]);
    CHECK(cells[1] != cells[2]);
    ++seen;
  }
  CHECK(seen == rows().size());
}

TEST_CASE("edges: cross entropy of a row whose largest value is infinite is NaN, its gradient too") {
  for (DType dtype : {f32, f64, f16, bf16})
    for (const std::vector<double>& row :
         {std::vector{inf, 0.0, 1.0}, std::vector{inf, inf, 0.0}, std::vector{-inf, -inf, -inf}})
      for (std::int64_t target : {0, 1}) {
        const Tensor x = to(Tensor::from(row, {1, 3}), dtype).requires_grad_();
        const Tensor loss = cross_entropy(x, Tensor::from({target}, {1}));
        loss.backward();
        CHECK(std::isnan(loss.item()));
        for (double g : doubles(x.grad())) CHECK(std::isnan(g));
      }
}

TEST_CASE("edges: an element that is 0 changes no derivative of a norm by the others") {
  const auto derivatives = [](const std::vector<double>& values, double p) {
    const Tensor x = Tensor::from(values).requires_grad_();
    const Tensor first = grad(norm(x, p), std::span(&x, 1), {}, {.create_graph = true})[0];
    const Tensor second = grad(sum(first * first), std::span(&x, 1))[0];
    return std::pair{doubles(first.detach()), doubles(second)};
  };
  for (const double p : {0.5, 1.5, 2.0, 3.0}) {
    INFO(p);
    const auto [first, second] = derivatives({1, -2, 2}, p);
    const auto [first_beside, second_beside] = derivatives({1, -2, 2, 0}, p);
    for (std::size_t i = 0; i < 3; ++i) {
      CHECK(first[i] == first_beside[i]);
      CHECK_THAT(second[i], Catch::Matchers::WithinRel(second_beside[i], 1e-12) ||
                                Catch::Matchers::WithinAbs(second_beside[i], 1e-12));
    }
    CHECK(first_beside[3] == 0);
    CHECK(second_beside[3] == 0);
  }
  const Tensor x = Tensor::from({1.0, 0.0}).requires_grad_();
  CHECK(doubles(grad(norm(x, 0), std::span(&x, 1))[0]) == std::vector{0.0, 0.0});
  CHECK(std::isnan(kl_div(zeros({1}), full({1}, -0.5)).item()));
  const Tensor e = full({1}, 2.0).requires_grad_(), w = full({1}, 3.0).requires_grad_();
  const Tensor slope = grad(sum(pow(0, e) * w), std::span(&e, 1), {}, {.create_graph = true})[0];
  const std::vector<Tensor> both{e, w};
  for (const Tensor& second : grad(sum(slope), both)) CHECK(second.item() == 0);
}

TEST_CASE("edges: a limit that is NaN makes every value NaN") {
  const Tensor x = Tensor::from<float>({-INFINITY, -1, 0, 5, NAN}, {5});
  for (const DType dtype : {f32, f64, f16, bf16})
    for (const auto& [low, high] : {std::pair{NAN, 3.f}, {-3.f, NAN}, {NAN, NAN}})
      for (const double value : to(clamp(to(x, dtype), low, high), f64).to_vector<double>())
        CHECK(std::isnan(value));
}

TEST_CASE("edges: a deviation and a norm that a dtype holds are found whatever the size of their squares") {
  for (const DType dtype : {f64, f32, bf16})
    for (int exponent = dtype == f64 ? -140 : -36; exponent <= (dtype == f64 ? 140 : 36); exponent += 4)
      for (const std::int64_t pairs : {1, 35})
        for (const int axis : {0, 1}) {
          const double size = std::pow(10, exponent);
          INFO(fmt::format("{} 1e{}, {} pairs along {}", name_of(dtype), exponent, pairs, axis));
          const Tensor one = Tensor::from<double>({size, 3 * size}, {1, 2});
          const Tensor rows =
              to(expand(reshape(expand(one, {pairs, 2}), {1, 2 * pairs}), {3, 2 * pairs}), dtype);
          const Tensor x = contiguous(axis == 1 ? rows : transpose(rows, 0, 1)).requires_grad_();
          const Tensor scaled = div(to(x.detach(), f64), size);
          const double near = dtype == f64 ? 1e-12 : dtype == f32 ? 1e-5 : 2e-2;
          const Tensor deviation = stddev(x, {axis}, Keep::drop, 0), length = norm(x, 2, {axis});
          CHECK(distance(div(to(deviation.detach(), f64), size), ones({3}, {f64})) < near);
          const double root = std::sqrt(10.0 * double(pairs));
          CHECK(distance(div(to(length.detach(), f64), size * root), ones({3}, {f64})) < near);
          const Tensor slopes = to(grad(sum(deviation), std::span(&x, 1))[0], f64);
          CHECK(distance(mul(slopes, 2.0 * double(pairs)), sub(scaled, 2)) < near);
          const Tensor directions = to(grad(sum(length), std::span(&x, 1))[0], f64);
          CHECK(distance(directions, div(scaled, root)) < near);
        }
  for (const DType dtype : {f64, f32, bf16, f16}) {
    CHECK(stddev(full({5}, 3, {dtype})).item() == 0);
    CHECK(norm(zeros({5}, {dtype})).item() == 0);
    CHECK(std::isnan(stddev(Tensor::from<double>({1, HUGE_VAL}, {2})).item()));
    CHECK(norm(to(Tensor::from<double>({1, HUGE_VAL}, {2}), dtype)).item() == HUGE_VAL);
    CHECK(std::isnan(norm(to(Tensor::from<double>({1, std::nan("")}, {2}), dtype)).item()));
  }
}

TEST_CASE("edges: the gradient of logsumexp is softmax, however far from 0 the values lie") {
  for (const DType dtype : {f64, f32, f16, bf16})
    for (const double offset : {0.0, 1e3, -1e3, 3e4, 1e6, -1e6, 1e8})
      for (const int axis : {0, 1})
        for (const bool recorded : {false, true}) {
          if (dtype == f16 && std::abs(offset) > 6e4) continue;
          INFO(fmt::format("{} {} along {}", name_of(dtype), offset, axis));
          const Tensor x = to(add(numbers({6, 7}, f64, 3), offset), dtype).requires_grad_();
          const Tensor weight = numbers({axis == 0 ? 7 : 6}, dtype, 4);
          const Tensor slopes =
              grad(logsumexp(x, {axis}), std::span(&x, 1), weight, {.create_graph = recorded})[0];
          const Tensor shares = softmax(to(x.detach(), f64), axis);
          const Tensor expected = mul(shares, unsqueeze(to(weight, f64), axis));
          const double near = dtype == f64 ? 1e-12 : dtype == f32 ? 1e-6 : dtype == f16 ? 1e-3 : 1e-2;
          CHECK(distance(to(slopes.detach(), f64), expected) < near);
        }
}

TEST_CASE("edges: variances are right however far from 0 the values lie, along any axes") {
  const Shape shape{3, 700, 5};
  for (const DType dtype : {f64, f32, bf16, f16})
    for (const double centre : {0.0, 50.0, 1e4, 1e8, 3e38}) {
      if (dtype == f16 && centre > 6e4) continue;
      const double spread = std::max(1.0, centre * (is_floating(dtype) && size_of(dtype) == 2 ? 0.1 : 1e-6));
      const Tensor x = to(centre - spread * rand(shape, {f64}), dtype);
      for (const Shape& axes :
           {Shape{0}, Shape{1}, Shape{2}, Shape{0, 1}, Shape{1, 2}, Shape{0, 2}, Shape{0, 1, 2}})
        for (const double correction : {0.0, 1.0}) {
          INFO(name_of(dtype) << " around " << centre << " over " << to_string(axes));
          // The same by hand, in f64 and of what lies apart from one of the values.
          const Tensor apart = sub(to(x, f64), to(select(select(select(x, 0, 0), 0, 0), 0, 0), f64));
          const Tensor rest = sub(apart, mean(apart, axes, Keep::dims));
          const auto count = static_cast<double>(x.numel() / mean(rest, axes).numel());
          const Tensor expected = div(sum(mul(rest, rest), axes), count - correction);
          const double ulp = dtype == f64 ? 1e-9 : dtype == f32 ? 2e-7 : dtype == f16 ? 1e-3 : 8e-3;
          const Tensor found = to(var(x, axes, Keep::drop, correction), f64);
          const Tensor finite = to(to(expected, dtype), f64);  // a variance may be beyond its dtype
          CHECK(
              all(logical_or(equal(found, finite), less_equal(abs(sub(found, expected)), mul(expected, ulp))))
                  .item<bool>());
        }
    }
}

TEST_CASE("edges: what is all equal has no deviation, and its gradient is 0") {
  for (const DType dtype : {f64, f32, bf16, f16})
    for (const double value : {0.1, -0.3, 50.0, 333333.0, 3e38, 0x1p-140})
      for (const std::int64_t n : {2, 7, 1000, 70000})
        for (const bool columns : {false, true}) {
          if (dtype == f16 && std::abs(value) > 6e4) continue;
          INFO(name_of(dtype) << " " << n << " times " << value << (columns ? " in columns" : ""));
          Tensor x = full(columns ? Shape{n, 3} : Shape{3, n}, value, {dtype}).requires_grad_();
          const Shape axes{columns ? 0 : 1};
          const Tensor deviation = stddev(x, axes);
          CHECK(amax(abs(deviation.detach())).item() == 0);
          CHECK(amax(abs(grad(sum(deviation), std::span(&x, 1))[0])).item() == 0);
          CHECK(amax(abs(var(x.detach(), axes))).item() == 0);
        }
}

TEST_CASE("edges: the gradient of var is the same wherever in a fold an infinite element stands") {
  for (const DType dtype : {f64, f32, bf16, f16})
    for (const double infinite : {inf, -inf})
      for (const bool columns : {false, true})
        for (const std::int64_t n : {3, 40, 20000})
          for (const std::int64_t at : {std::int64_t{0}, n / 2, n - 1}) {
            INFO(name_of(dtype) << " " << infinite << " at " << at << " of " << n
                                << (columns ? " rows" : ""));
            Tensor x = numbers(columns ? Shape{n, 2} : Shape{2, n}, dtype, 3);
            fill_(select(select(x, columns ? 1 : 0, 1), 0, at), infinite);
            x.requires_grad_();
            const Tensor y = var(x, {columns ? 0 : 1});
            CHECK(std::isfinite(y[0].item()));
            CHECK(std::isnan(y[1].item()));
            const Tensor slopes = select(grad(sum(y), std::span(&x, 1))[0], columns ? 1 : 0, 1);
            const std::vector<double> found = doubles(slopes);
            for (std::int64_t i = 0; i < n; ++i)
              CHECK((i == at ? std::isnan(found[std::size_t(i)])
                             : found[std::size_t(i)] == (infinite > 0 ? -inf : inf)));
          }
}

TEST_CASE("edges: second derivatives of bce_loss are 0 where its logarithms are bounded") {
  for (const DType dtype : {f64, f32})
    for (const double p : {0.0, 1e-320, 1.0})
      for (const double t : {0.0, 0.25, 1.0}) {
        if (dtype == f32 && p > 0 && p < 1) continue;
        INFO(name_of(dtype) << " " << p << " " << t);
        const std::vector<Tensor> in{full({1}, p, {dtype}).requires_grad_(),
                                     full({1}, t, {dtype}).requires_grad_()};
        const Tensor loss = bce_loss(in[0], in[1], {.reduction = Reduction::none});
        const Tensor of_target = grad(sum(loss), in, {}, {.create_graph = true})[1];
        CHECK(std::isfinite(of_target.item()));
        CHECK(std::isfinite(grad(sum(of_target), std::span(in.data(), 1))[0].item()));
      }
}

TEST_CASE("edges: a key that a mask hides bears on nothing, though its scores are no numbers") {
  for (const DType dtype : {f64, f32, f16, bf16})
    for (const bool by_adding : {false, true}) {
      INFO(name_of(dtype) << ", by adding " << by_adding);
      const Tensor q = to(randn({2, 3, 5, 8}), dtype), k = to(randn({2, 3, 7, 8}), dtype),
                   v = to(randn({2, 3, 7, 8}), dtype);
      const Tensor seen = less(arange(0, 7), 5),
                   spoilt = masked_fill(k, reshape(logical_not(seen), {7, 1}), std::nan(""));
      const Tensor added =
          to(masked_fill(zeros({7}), logical_not(seen), -std::numeric_limits<double>::infinity()), dtype);
      const Tensor fewer = attention(q, narrow(k, 2, 0, 5), narrow(v, 2, 0, 5));
      CHECK(allclose(attention(q, spoilt, v, {.mask = by_adding ? added : seen}), fewer,
                     dtype == f64          ? 1e-12
                     : size_of(dtype) == 4 ? 1e-5
                                           : 2e-2,
                     1e-2 * (size_of(dtype) == 2)));
    }
}
