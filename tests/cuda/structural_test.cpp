// Copies, creation, random numbers, sums and products, CPU against CUDA.
#include "autograd/autograd.h"
#include "runtime/apply.h"
#include "runtime/context.h"
#include "runtime/ops/copy.h"
#include "runtime/ops/linear.h"
#include "runtime/ops/matmul.h"
#include "tests/cuda/compare.h"

using namespace sherd;
using namespace sherd::test;

TEST_CASE("cuda: casts equal the CPU's between all dtypes") {
  if (no_gpu()) return;
  for (DType from : all_dtypes) {
    for (DType into : all_dtypes) {
      for (std::int64_t n : {0, 1, 1027}) {
        const Tensor x = Values(1)({n, 2}, from, 0, 99);
        INFO(name_of(from) << " to " << name_of(into) << " " << n);
        CHECK(distance_in_ulps(to(on_gpu(x), into), to(x, into)) == 0);
        CHECK(distance_in_ulps(to(transpose(on_gpu(x), 0, 1), into), to(transpose(x, 0, 1), into)) == 0);
      }
    }
  }
  const Tensor special = Values(2).with_specials({500}, f32);
  for (DType into : {f64, f16, bf16, boolean})
    CHECK(distance_in_ulps(to(on_gpu(special), into), to(special, into)) == 0);
}

TEST_CASE("cuda: draws with probabilities are the CPU's, wherever those lie") {
  if (no_gpu()) return;
  for (DType dtype : {f64, f32, f16, bf16})
    for (std::int64_t n : {0, 1, 3, 4, 1027, 100003}) {
      INFO(name_of(dtype) << " " << n);
      const Tensor p = Values(5)({n + 1, 2}, dtype, 0, 1);
      for (const auto& [here, there] : {std::pair{p, on_gpu(p)},
                                        {narrow(p, 0, 1, n), narrow(on_gpu(p), 0, 1, n)},
                                        {transpose(p, 0, 1), transpose(on_gpu(p), 0, 1)}}) {
        manual_seed(6);
        const Tensor expected = bernoulli(here);
        manual_seed(6);
        CHECK(distance_in_ulps(bernoulli(there), expected) == 0);
      }
    }
}

TEST_CASE("cuda: copies keep values through layouts, views and devices") {
  if (no_gpu()) return;
  for (DType dtype : all_dtypes) {
    INFO(name_of(dtype));
    const Tensor x = Values(3)({14, 3, 10}, dtype, -50, 50), view = slice(permute(x, {2, 0, 1}), 0, 1, 10, 3);
    CHECK(distance_in_ulps(to(to(x, gpu), Device::cpu()), x) == 0);
    CHECK(distance_in_ulps(to(to(view, gpu), Device::cpu()), view) == 0);
    CHECK(distance_in_ulps(clone(on_gpu(view)), view) == 0);
    CHECK(distance_in_ulps(contiguous(transpose(on_gpu(x), 0, 2)), transpose(x, 0, 2)) == 0);

    const Tensor host = full({6, 10, 3}, 1, {dtype}), moved = to(host, gpu);
    copy_(slice(host, 0, 0, 6, 2), transpose(select(x, 0, 1), 0, 1));  // broadcast into every second
    copy_(slice(moved, 0, 0, 6, 2), transpose(select(on_gpu(x), 0, 1), 0, 1));
    CHECK(distance_in_ulps(moved, host) == 0);
    const Tensor strided = slice(transpose(x, 1, 2), 0, 2, 8);
    copy_(moved, strided);  // from the host
    CHECK(distance_in_ulps(moved, strided) == 0);

    const auto joined = [](const Tensor& t) { return cat(std::vector{t, slice(t, 1, 0, 2), t}, 1); };
    CHECK(distance_in_ulps(joined(on_gpu(x)), joined(x)) == 0);
  }
  Tensor x = Values(4)({8, 6}, f32), y = on_gpu(x);
  for (Tensor* t : {&x, &y}) t->requires_grad_();
  const auto gradient = [](const Tensor& t) {
    const Tensor part = slice(t, 1, 1, 6, 2);
    return grad(sum(part * part), std::vector{t})[0];
  };
  CHECK(distance_in_ulps(gradient(y), gradient(x)) == 0);
  CHECK(distance_in_ulps(grad(sum(to(y * 2.0, Device::cpu())), std::vector{y})[0], full({8, 6}, 2)) == 0);
}

TEST_CASE("cuda: many copies at once equal the CPU's, more than a launch takes, aligned or not") {
  if (no_gpu()) return;
  std::vector<Tensor> into, from, expected;
  const std::vector<Tensor> memory = {full({200000}, 7, {f32}), on_gpu(full({200000}, 7, {f32}))};
  for (const DType to : all_dtypes)
    for (const DType of : all_dtypes)
      for (const std::int64_t n : {0, 5, 40000}) {
        const Tensor x = Values(5).with_specials({n + 1}, is_floating(of) ? of : f32);
        const Tensor values = slice(is_floating(of) ? x : Values(6)({n + 1}, of, 0, 99), 0, n % 2, n + n % 2);
        if (is_floating(of) && !is_floating(to)) continue;  // infinities are no integers
        expected.push_back(sherd::to(values, to));
        into.push_back(slice(on_gpu(zeros({n + 1}, {to})), 0, n % 2, n + n % 2));
        from.push_back(on_gpu(values));
      }
  for (const std::int64_t at : {0, 64, 1001}) {  // parts of one memory, beside one another
    into.push_back(slice(memory[1], 0, at, at + 64));
    from.push_back(on_gpu(Values(8)({64}, bf16)));
    expected.push_back(to(from.back(), f32));
  }
  copy_each_(into, from);
  for (std::size_t i = 0; i < into.size(); ++i) {
    INFO(name_of(from[i].dtype()) << " to " << name_of(into[i].dtype()) << ", " << into[i].numel());
    CHECK(distance_in_ulps(into[i], expected[i]) == 0);
  }
  CHECK(distance_in_ulps(slice(memory[1], 0, 128, 1001), slice(memory[0], 0, 128, 1001)) == 0);
}

TEST_CASE("cuda: creation equals the CPU's") {
  if (no_gpu()) return;
  for (DType dtype : all_dtypes) {
    INFO(name_of(dtype));
    const Number value = is_floating(dtype) ? Number(3.7) : Number(1);
    CHECK(distance_in_ulps(full({1001}, value, {dtype, gpu}), full({1001}, value, {dtype})) == 0);
    CHECK(distance_in_ulps(zeros({0, 3}, {dtype, gpu}), zeros({0, 3}, {dtype})) == 0);
    const Number start = is_integral(dtype) && dtype != u8 ? -2 : 0, end = dtype == boolean ? 2 : 100;
    const Number step = is_floating(dtype) ? Number(0.7) : Number(1);
    CHECK(distance_in_ulps(arange(start, end, step, {dtype, gpu}), arange(start, end, step, {dtype})) == 0);
    if (dtype == i64) {
      constexpr std::int64_t beyond_f64 = (std::int64_t{1} << 53) + 1;
      CHECK(distance_in_ulps(arange(beyond_f64, beyond_f64 + 40, 3, {i64, gpu}),
                             arange(beyond_f64, beyond_f64 + 40, 3, {i64})) == 0);
    }
    const Tensor host = ones({7, 8}, {dtype}), moved = ones({7, 8}, {dtype, gpu});
    fill_(slice(host, 1, 1, 8, 3), 0);
    fill_(slice(moved, 1, 1, 8, 3), 0);
    CHECK(distance_in_ulps(moved, host) == 0);
  }
}

TEST_CASE("cuda: random numbers, masks included, have the bits of the CPU's") {
  if (no_gpu()) return;
  const auto same = [](auto&& make) {
    manual_seed(17);
    const Tensor skipped = rand({5});
    const Tensor host = make(Device::cpu());
    manual_seed(17);
    const Tensor skipped_again = rand({5}, {f32, gpu});
    CHECK(distance_in_ulps(skipped_again, skipped) == 0);
    CHECK(distance_in_ulps(make(gpu), host) == 0);
  };
  for (std::int64_t n : {0, 1, 2, 3, 4, 5, 7, 130, 1025, 300000}) {
    INFO(n);
    for (DType dtype : {f64, f32, f16, bf16}) {
      same([&](Device d) { return rand({n}, {dtype, d}, -1, 3); });
      same([&](Device d) { return randn({n}, {dtype, d}, 0.5, 2); });
      same([&](Device d) { return dropout(full({n}, 1.5, {dtype, d}), 0.3); });
      same([&](Device d) {
        Tensor x = full({n}, 1.5, {dtype, d});
        x.requires_grad_();
        return grad(dropout(x, 0.4), std::vector{x}, full({n}, 2, {dtype, d}))[0];
      });
    }
    same([&](Device d) { return randint(-5, 1000, {n}, {i64, d}); });
    same([&](Device d) { return randint(0, 200, {n}, {u8, d}); });
  }
  for (std::int64_t n : {0, 1, 2, 3, 4, 5, 33, 257, 1025, 300001})
    same([&](Device d) { return randperm(n, {i64, d}); });
  for (DType dtype : {f64, f32, f16, bf16, i32}) same([&](Device d) { return randperm(255, {dtype, d}); });
  same([](Device d) { return uniform_(transpose(zeros({30, 4}, {f32, d}), 0, 1), 0, 1); });
}

TEST_CASE("cuda: sums and means over any axes agree with the CPU's") {
  if (no_gpu()) return;
  for (DType dtype : all_dtypes) {
    const Tensor x = Values(5)({7, 33, 5, 6}, dtype, 0, is_floating(dtype) ? 2 : 20), y = on_gpu(x);
    for (unsigned axes = 0; axes < 16; ++axes) {
      Shape list;
      for (int i = 0; i < 4; ++i)
        if ((axes >> i) & 1) list.push_back(i);
      for (Keep keep : {Keep::drop, Keep::dims}) {
        INFO(name_of(dtype) << " axes " << axes);
        CHECK(relative_distance(sum(y, list, keep), sum(x, list, keep)) <= 4 * rounding(dtype));
        CHECK(relative_distance(sum(transpose(y, 1, 3), list, keep), sum(transpose(x, 1, 3), list, keep)) <=
              4 * rounding(dtype));
        if (is_floating(dtype))
          CHECK(relative_distance(mean(y, list, keep), mean(x, list, keep)) <= 4 * rounding(dtype));
      }
    }
  }
  for (const Shape& shape : {Shape{1000003}, Shape{3, 200001}, Shape{50000, 7}, Shape{9000, 300}}) {
    const Tensor x = Values(6)(shape, f32, 0, 1), y = on_gpu(x);
    INFO(to_string(shape));
    CHECK(relative_distance(sum(y), sum(x)) <= 1e-6);
    CHECK(relative_distance(sum(y, {0}), sum(x, {0})) <= 1e-6);
    CHECK(relative_distance(sum(y, {-1}), sum(x, {-1})) <= 1e-6);
    CHECK(distance_in_ulps(sum(y, {0}), sum(y, {0})) == 0);  // run to run
  }
  for (DType dtype : all_dtypes) {  // in pieces that are joined
    const Tensor x = Values(7)({3000, 40}, dtype, 0, is_floating(dtype) ? 2 : 20);
    INFO(name_of(dtype));
    CHECK(relative_distance(sum(on_gpu(x), {0}), sum(x, {0})) <= 4 * rounding(dtype));
  }
  const std::int64_t many = std::int64_t{1} << 24;
  for (const Shape& shape : {Shape{8 * many}, Shape{many, 2}, Shape{2, many, 3}, Shape{many / 16, 64}}) {
    const int axis = shape.rank() == 3 ? 1 : 0;  // a sum of f32 alone loses 1e-5 and more on the way
    const Tensor x = full(shape, 0.1, {f32, gpu}), total = sum(x, {axis});
    const double value = 0.1f * static_cast<double>(shape[axis]);
    INFO(to_string(shape));
    CHECK(amax(abs(sub(to(total, f64), value))).item() <= 1e-6 * value);
    CHECK(amax(abs(sub(to(mean(x, {axis}), f64), static_cast<double>(0.1f)))).item() <= 1e-7);
    CHECK(distance_in_ulps(sum(x, {axis}), total) == 0);
  }
  for (const Tensor& x : {zeros({0, 4}), zeros({4, 0}), zeros({})}) {
    CHECK(distance_in_ulps(sum(on_gpu(x)), sum(x)) == 0);
    CHECK(distance_in_ulps(mean(on_gpu(x)), mean(x)) == 0);
    if (x.rank() == 2) CHECK(distance_in_ulps(sum(on_gpu(x), {0}), sum(x, {0})) == 0);
  }
}

namespace {

/// Relative error of a product: f32 in full precision (TF32 would give 3e-4), halves rounded once.
double product_error(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return 1e-14;
    case DType::f32:
      return 2e-6;
    case DType::f16:
      return 1e-3;
    default:
      return 6e-3;
  }
}

}  // namespace

TEST_CASE("cuda: products of matrices agree with the CPU's, transposed, strided and batched") {
  if (no_gpu()) return;
  struct Sizes {
    std::int64_t m, n, k;
  };
  for (DType dtype : {f64, f32, f16, bf16}) {
    for (const Sizes& s : {Sizes{1, 1, 1},
                           {3, 5, 7},
                           {64, 48, 128},
                           {129, 257, 65},
                           {5, 33, 150},  // small, but in more than one part along k
                           {17, 9, 256},
                           {1, 400, 300},
                           {1, 40, 30},
                           {40, 1, 30},
                           {5, 6, 0},
                           {0, 6, 5}}) {
      for (bool ta : {false, true}) {
        for (bool tb : {false, true}) {
          for (bool offset : {false, true}) {
            Values values(9);
            const auto operand = [&](std::int64_t rows, std::int64_t cols, bool transposed) {
              const Tensor x =
                  transposed ? values({cols, rows + offset}, dtype) : values({rows, cols + offset}, dtype);
              const Tensor part = slice(x, 1, offset, x.size(1));  // rows apart in memory, and odd addresses
              return transposed ? transpose(part, 0, 1) : part;
            };
            const Tensor a = operand(s.m, s.k, ta), b = operand(s.k, s.n, tb);
            INFO(name_of(dtype) << " " << s.m << " " << s.n << " " << s.k << " " << ta << tb << offset);
            CHECK(relative_distance(matmul(on_gpu(a), on_gpu(b)), matmul(a, b)) <= product_error(dtype));
          }
        }
      }
    }
    Values values(10);
    const Tensor a = values({6, 2, 9, 33}, dtype), b = values({2, 33, 17}, dtype), v = values({33}, dtype);
    INFO(name_of(dtype));
    CHECK(relative_distance(matmul(on_gpu(a), on_gpu(b)), matmul(a, b)) <= product_error(dtype));
    CHECK(relative_distance(matmul(on_gpu(a), on_gpu(v)), matmul(a, v)) <= product_error(dtype));
    CHECK(relative_distance(matmul(transpose(on_gpu(a), 2, 3), slice(on_gpu(a), 2, 0, 9)),
                            matmul(transpose(a, 2, 3), a)) <= product_error(dtype));
    const Tensor y = matmul(on_gpu(a), on_gpu(b));
    CHECK(distance_in_ulps(matmul(on_gpu(a), on_gpu(b)), y) == 0);  // run to run
  }
}

TEST_CASE("cuda: linear layers and gradients of products agree with the CPU's") {
  if (no_gpu()) return;
  for (DType dtype : {f64, f32, f16, bf16}) {
    for (bool biased : {false, true}) {
      for (bool strided : {false, true}) {
        Values values(11);
        Tensor x = values({4, 9, 24}, dtype), w = values({40, 24}, dtype), b = values({40}, dtype);
        if (strided)
          x = transpose(values({9, 4, 24}, dtype), 0, 1), w = transpose(values({24, 40}, dtype), 0, 1);
        const auto run = [&](const Tensor& px, const Tensor& pw, const Tensor& pb) {
          std::vector<Tensor> leaves{px, pw};
          if (biased) leaves.push_back(pb);
          for (Tensor& t : leaves) t.requires_grad_();
          const Tensor y = linear(leaves[0], leaves[1], biased ? leaves[2] : Tensor{});
          std::vector<Tensor> all = grad(sum(y * y), leaves);
          all.push_back(y.detach());
          return all;
        };
        const std::vector<Tensor> host = run(x, w, b), moved = run(on_gpu(x), on_gpu(w), on_gpu(b));
        for (std::size_t i = 0; i < host.size(); ++i) {
          INFO(name_of(dtype) << (biased ? " biased" : "") << (strided ? " strided" : "") << " result " << i);
          CHECK(relative_distance(moved[i], host[i]) <= 3 * product_error(dtype));
        }
      }
    }
  }
  for (const DType dtype : {f64, f32, f16, bf16})
    for (const std::int64_t rows : {1, 64, 129}) {
      INFO(name_of(dtype) << " residual of " << rows << " rows");
      Values values(13);
      const Tensor x = values({rows, 40}, dtype), w = values({24, 40}, dtype), b = values({24}, dtype);
      for (const Tensor& residual :
           {values({rows, 24}, dtype), slice(values({rows * 24 + 1}, dtype), 0, 1, rows * 24 + 1)}) {
        const auto run = [&](const Tensor& px, const Tensor& pw, const Tensor& pb, const Tensor& pr) {
          return linear(px, pw, pb, reshape(pr, {rows, 24}));
        };
        const Tensor host = run(x, w, b, residual),
                     moved = run(on_gpu(x), on_gpu(w), on_gpu(b), on_gpu(residual));
        CHECK(relative_distance(moved, host) <= 3 * product_error(dtype));
      }
    }
  Values values(12);
  for (bool ta : {false, true}) {
    for (bool tb : {false, true}) {
      const Tensor a = values(ta ? Shape{3, 8, 5} : Shape{3, 5, 8}, f64),
                   b = values(tb ? Shape{3, 7, 8} : Shape{3, 8, 7}, f64);
      const auto run = [&](Tensor p, Tensor q) {
        p.requires_grad_();
        q.requires_grad_();
        const Tensor y = apply(ops::MatMul{ta, tb}, p, q);
        return grad(sum(y * y), std::vector{p, q});
      };
      const std::vector<Tensor> host = run(a, b), moved = run(on_gpu(a), on_gpu(b));
      for (std::size_t i = 0; i < 2; ++i) CHECK(relative_distance(moved[i], host[i]) <= 1e-13);
    }
  }
}

TEST_CASE("cuda: a large product, whose algorithm is searched for, is right and repeats to the bit") {
  if (no_gpu()) return;
  for (const DType dtype : {bf16, f16, f32})
    for (const bool transposed : {false, true}) {
      INFO(name_of(dtype) << (transposed ? " transposed" : ""));
      manual_seed(5);
      const Tensor a = randn({1024, 2048}, {dtype, gpu}), b = randn({2048, 2050}, {dtype, gpu});
      const Tensor other = transposed ? contiguous(transpose(b, 0, 1)) : b;
      const auto product = [&] { return transposed ? linear(a, other) : matmul(a, other); };
      const Tensor first = product(), exact = matmul(to(a, f64), to(b, f64));
      CHECK(relative_distance(to(first, f64), exact) <= 4 * rounding(dtype));
      CHECK(distance_in_ulps(product(), first) == 0);
    }
}
