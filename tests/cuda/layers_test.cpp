// Fused layers, CPU against CUDA: normalisations, softmax, cross entropy, embedding, convolution.
#include <future>
#include <limits>

#include "tests/cuda/agree.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr DType floats[] = {f64, f32, f16, bf16};
constexpr std::int64_t sizes[] = {1, 3, 31, 32, 33, 768, 1000, 1600, 4097};
constexpr double infinity = std::numeric_limits<double>::infinity();

}  // namespace

TEST_CASE("cuda: layer_norm agrees with the CPU's, gradients included") {
  if (no_gpu()) return;
  for (DType dtype : floats) {
    for (std::int64_t columns : sizes) {
      for (std::int64_t rows : {1, 5, 67}) {
        for (bool affine : {false, true}) {
          if (columns == 1 && !affine) continue;  // every result is zero
          INFO(name_of(dtype) << " " << rows << " x " << columns << (affine ? " affine" : ""));
          Values values(1);
          const Tensor x = values({rows, columns}, dtype, -1, 3);
          std::vector<Tensor> in{x};
          if (affine) in.insert(in.end(), {values({columns}, dtype), values({columns}, dtype)});
          if (affine)
            agree(in, row_tolerance(dtype),
                  [&](std::span<const Tensor> t) { return add(t[0], layer_norm(t[0], t[1], t[2])); });
          if (affine && columns >= 31)  // with the bias's gradient from the same kernel
            agree({values({rows, 8}, dtype), values({columns, 8}, dtype), values({columns}, dtype)},
                  3 * row_tolerance(dtype), [&](std::span<const Tensor> t) {
                    const Tensor y = linear(t[0], t[1], t[2]);
                    return add(y, layer_norm(y, {}, {}));
                  });
          agree(in, row_tolerance(dtype), [&](std::span<const Tensor> t) {
            return affine ? layer_norm(t[0], t[1], t[2]) : layer_norm(t[0], {}, {});
          });
        }
      }
    }
    INFO(name_of(dtype));
    Values values(2);
    const Tensor weight = values({24}, dtype), bias = values({24}, dtype);
    const auto norm = [](std::span<const Tensor> t) { return layer_norm(t[0], t[1], t[2]); };
    agree({transpose(values({24, 50}, dtype), 0, 1), weight, bias}, row_tolerance(dtype), norm);
    agree({slice(values({50, 25}, dtype), 1, 1, 25), weight, bias}, row_tolerance(dtype), norm);
    agree({values({40, 7, 24}, dtype), slice(values({25}, dtype), 0, 1, 25), bias}, row_tolerance(dtype),
          norm);
    agree({values({0, 24}, dtype), weight, bias}, 0, norm);
    agree({values({3000, 24}, dtype), weight, bias}, 2 * row_tolerance(dtype), norm);
  }
}

TEST_CASE("cuda: norms of long rows agree with the CPU's, gradients and a residual stream included") {
  if (no_gpu()) return;
  for (DType dtype : floats)
    for (const auto& [rows, columns] : {std::pair<std::int64_t, std::int64_t>{1, 4224},
                                        {40, 8192},
                                        {300, 5120},
                                        {7, 16384},
                                        {3, 20480},
                                        {2, 32768}}) {
      INFO(name_of(dtype) << " " << rows << " x " << columns);
      Values values(4);
      const Tensor x = values({rows, columns}, dtype, -1, 3), w = values({columns}, dtype),
                   b = values({columns}, dtype);
      const double tolerance = 2 * row_tolerance(dtype);
      agree({x, w, b}, tolerance, [](std::span<const Tensor> t) { return layer_norm(t[0], t[1], t[2]); });
      agree({x, w}, tolerance, [](std::span<const Tensor> t) { return add(t[0], rms_norm(t[0], t[1])); });
    }
}

TEST_CASE("cuda: logsumexp agrees with the CPU's over any axes, infinities and NaN included") {
  if (no_gpu()) return;
  for (DType dtype : floats) {
    INFO(name_of(dtype));
    Values values(5);
    for (const std::int64_t columns : sizes)
      agree({values({5, columns}, dtype, -30, 30)}, row_tolerance(dtype),
            [](std::span<const Tensor> t) { return logsumexp(t[0], {1}); });
    agree({values({6, 40, 9}, dtype)}, row_tolerance(dtype),
          [](std::span<const Tensor> t) { return logsumexp(t[0], {1}); });
    agree({values({6, 4, 9}, dtype)}, row_tolerance(dtype),
          [](std::span<const Tensor> t) { return logsumexp(t[0], {0, 2}); });
    const Tensor x = values({6, 2000}, dtype);
    fill_(select(select(x, 0, 1), 0, 700), infinity);
    fill_(select(select(x, 0, 2), 0, 1900), std::nan(""));
    fill_(select(x, 0, 3), -infinity);
    fill_(select(x, 0, 4), infinity);
    fill_(select(select(x, 0, 4), 0, 3), std::nan(""));
    for (const std::int64_t columns : {2000, 801, 33}) {
      const auto of = [&](const Tensor& t) { return logsumexp(slice(t, 1, 0, columns), {1}); };
      const Tensor host = of(x), moved = of(on_gpu(x));
      CHECK(distance_in_ulps(where(isfinite(host), 0, host),
                             to(where(isfinite(moved), 0, moved), Device::cpu())) == 0);
    }
    CHECK(distance_in_ulps(logsumexp(empty({3, 0}, {dtype, gpu}), {1}),
                           logsumexp(empty({3, 0}, {dtype}), {1})) == 0);
  }
}

TEST_CASE("cuda: rms_norm agrees with the CPU's, gradients and a residual stream included") {
  if (no_gpu()) return;
  for (DType dtype : floats)
    for (std::int64_t columns : sizes)
      for (std::int64_t rows : {1, 5, 67, 3000}) {
        if (columns == 1) continue;                   // its gradient is what rounding leaves of a difference
        if (rows == 3000 && columns > 768) continue;  // the host's side would take long
        INFO(name_of(dtype) << " " << rows << " x " << columns);
        Values values(3);
        const std::vector<Tensor> in{values({rows, columns}, dtype, -1, 3), values({columns}, dtype)};
        const double tolerance = (rows == 3000 ? 2 : 1) * row_tolerance(dtype);
        agree(in, tolerance, [](std::span<const Tensor> t) { return rms_norm(t[0], t[1]); });
        agree(in, tolerance, [](std::span<const Tensor> t) { return add(t[0], rms_norm(t[0], t[1])); });
        agree({in[0]}, tolerance, [](std::span<const Tensor> t) { return rms_norm(t[0]); });
      }
}

TEST_CASE("cuda: rotary agrees with the CPU's to the bit, wherever heads lie") {
  if (no_gpu()) return;
  for (DType dtype : floats)
    for (const std::int64_t width : {2, 6, 16, 64, 128})
      for (const RotaryPairs pairs : {RotaryPairs::halves, RotaryPairs::neighbours}) {
        INFO(name_of(dtype) << " " << width);
        Values values(3);
        const RotaryOptions options{.first = 5, .pairs = pairs, .scaling = {.factor = 8, .original = 512}};
        const auto turned = [&](std::span<const Tensor> t) { return rotary(t[0], options); };
        if (width > 2)
          for (const RotaryKind kind : {RotaryKind::linear, RotaryKind::dynamic, RotaryKind::yarn}) {
            const RotaryOptions scaled{.first = 500, .pairs = pairs, .scaling = {8, 1, 32, 512, kind, 1.25}};
            agree({values({2, 3, 70, width}, dtype)}, 0,
                  [&](std::span<const Tensor> t) { return rotary(t[0], scaled); });
          }
        agree({values({2, 3, 70, width}, dtype)}, 0, turned);
        agree({transpose(values({2, 70, 3, width}, dtype), 1, 2)}, 0, turned);
        agree({slice(values({2, 3, 70, width + 1}, dtype), 3, 1, width + 1)}, 0, turned);
        agree({values({0, 3, width}, dtype)}, 0, turned);
      }
}

TEST_CASE("cuda: linear_fp8 agrees with its form in other ops, and repeats to the bit") {
  if (no_gpu()) return;
  for (DType dtype : floats)
    for (const Shape& shape :
         {Shape{16, 16, 16}, Shape{48, 80, 112}, Shape{256, 1600, 64}, Shape{128, 768, 3072},
          Shape{33, 20, 17}})  // rows, in, out; the last by other ops
      for (double size : {1.0, 1e-3})
        for (std::int64_t from : {0, 1}) {
          INFO(name_of(dtype) << " " << to_string(shape) << " size " << size << " from " << from);
          Values values(17);
          const auto matrix = [&](std::int64_t m, std::int64_t n, double bound) {
            return view(slice(values({m * n + from}, dtype, -bound, bound), 0, from, m * n + from), {m, n});
          };
          // Sums of the result are cut to what the tensor cores keep.
          for (const EightScales scales : {EightScales::of_tensors, EightScales::of_rows})
            agree(
                {matrix(shape[0], shape[1], size), matrix(shape[2], shape[1], 1), values({shape[2]}, dtype)},
                std::max(row_tolerance(dtype), 2e-3),
                [&](std::span<const Tensor> t) { return linear_fp8(t[0], t[1], t[2], scales); });
        }
}

TEST_CASE("cuda: linear_fp8 keeps zeros among the tiniest numbers, in its gradient too") {
  if (no_gpu()) return;
  for (const EightScales scales : {EightScales::of_tensors, EightScales::of_rows})
    for (double size : {1e-35, 1e-37, 1e-40}) {
      INFO("size " << size);
      const auto sides = [&](Device device) {
        const auto matrix = [&](unsigned seed, std::int64_t m, double bound) {
          Tensor t = Values(seed)({m, 32}, bf16, -bound, bound);
          fill_(slice(t, 1, 0, 32, 3), 0);
          fill_(select(t, 0, 1), 0);
          return to(t, device);
        };
        const Tensor x = matrix(1, 64, size).requires_grad_(), w = matrix(2, 32, 1).requires_grad_();
        const Tensor y = linear_fp8(x, w, {}, scales), in[] = {x, w};
        std::vector<Tensor> all = grad(y, in, matrix(3, 64, size));
        all.push_back(y.detach());
        return all;
      };
      const std::vector<Tensor> host = sides(Device::cpu()), moved = sides(gpu);
      for (std::size_t i = 0; i < host.size(); ++i) {
        CHECK(all(isfinite(host[i])).item() == 1);
        CHECK(all(isfinite(moved[i])).item() == 1);
        CHECK(amax(abs(select(host[i], 0, 1))).item() == 0);
        CHECK(amax(abs(select(moved[i], 0, 1))).item() == 0);
      }
    }
}

TEST_CASE("cuda: more rows or columns than a grid's second axis has blocks") {
  if (no_gpu()) return;
  const std::int64_t width = 32 * 65535 + 65, rows = 64 * 65536 + 16;
  const Tensor table = zeros({3, width}, {f32, gpu}).requires_grad_();
  const Tensor picked = embedding(table, Tensor::from<std::int64_t>({1, 1}, {2}, gpu));
  const Tensor by_column = grad(sum(picked), std::span(&table, 1))[0];
  CHECK(amin(select(by_column, 0, 1)).item() == 2);
  CHECK(amax(by_column).item() == 2);
  const Tensor weight = ones({16, 16}, {bf16, gpu}).requires_grad_();
  for (const EightScales scales : {EightScales::of_tensors, EightScales::of_rows}) {
    const Tensor x = ones({rows, 16}, {bf16, gpu}).requires_grad_(), y = linear_fp8(x, weight, {}, scales);
    CHECK(amin(y.detach()).item() == 16);
    CHECK(amax(y.detach()).item() == 16);
    CHECK(amin(grad(sum(y), std::span(&x, 1))[0]).item() == 16);
  }
  const std::int64_t more = 256 * 65535 + 300;
  const Tensor thin = ones({8, 8}, {bf16, gpu}), bias = zeros({8}, {bf16, gpu}).requires_grad_();
  const Tensor z = linear_gelu(zeros({more, 8}, {bf16, gpu}).requires_grad_(), thin, bias);
  const Tensor of_bias = to(grad(sum(z), std::span(&bias, 1))[0], f64);
  CHECK(std::abs(amin(of_bias).item() / (0.5 * static_cast<double>(more)) - 1) <= 4e-3);
  CHECK(std::abs(amax(of_bias).item() / (0.5 * static_cast<double>(more)) - 1) <= 4e-3);
}

TEST_CASE("cuda: cross_entropy is the same to the bit where all logits of a row are moved by one number") {
  if (no_gpu()) return;
  for (const DType dtype : {f64, f32, f16, bf16})
    for (const std::int64_t columns : {131, 8192, 50304}) {  // one row a warp, a block, a multiprocessor
      const double far = dtype == bf16 ? 128 : dtype == f16 ? 1024 : 1 << 20;  // the sums are exact
      const Tensor x = to(Values(9)({5, columns}, i64, -9, 9), dtype),
                   targets = on_gpu(Values(10)({5}, i64, 0, 130));
      for (const LossPrecision precision : {LossPrecision::of_logits, LossPrecision::wide})
        for (const bool over : {false, true}) {
          INFO(name_of(dtype) << " " << columns << (over ? " over the logits" : ""));
          const CrossEntropyOptions options{Reduction::mean, -100, precision};
          const auto results = [&](const Tensor& logits) {
            Tensor leaf = on_gpu(logits).requires_grad_();
            const Tensor loss =
                over ? cross_entropy_(clone(leaf), targets, options) : cross_entropy(leaf, targets, options);
            return std::pair{loss, grad(loss, std::span(&leaf, 1))[0]};
          };
          const auto here = results(x), there = results(add(x, far));
          CHECK(distance_in_ulps(here.first, there.first) == 0);
          CHECK(distance_in_ulps(here.second, there.second) == 0);
        }
    }
}

TEST_CASE("cuda: cross_entropy_ on two threads with rows of other lengths") {
  if (no_gpu()) return;
  struct Form {
    DType dtype;
    std::int64_t classes[2];
  };
  for (const Form& form : {Form{bf16, {50304, 16000}}, {f32, {25000, 8000}}, {bf16, {50303, 1001}}}) {
    const auto losses = [&](std::int64_t classes) {
      const NoGrad guard;
      const Tensor logits = zeros({4, classes}, {form.dtype, gpu}), targets = zeros({4}, {i64, gpu});
      Tensor loss;
      for (int i = 0; i < 3000; ++i) loss = cross_entropy_(clone(logits), targets);
      return std::abs(loss.item() / std::log(static_cast<double>(classes)) - 1);
    };
    INFO(name_of(form.dtype) << " " << form.classes[0] << " and " << form.classes[1]);
    std::future<double> other = std::async(std::launch::async, losses, form.classes[1]);
    CHECK(losses(form.classes[0]) <= 0.01);
    CHECK(other.get() <= 0.01);
  }
}

TEST_CASE("cuda: a row of an embedding's gradient that many positions share is summed in full") {
  if (no_gpu()) return;
  const std::int64_t positions = std::int64_t{1} << 22;
  const Tensor table = zeros({2, 4}, {f32, gpu}).requires_grad_();
  const Tensor y = embedding(table, ones({positions}, {i64, gpu}));
  const Tensor sums = grad(y, std::span(&table, 1), full({positions, 4}, 0.1, {f32, gpu}))[0];
  const double value = 0.1f * static_cast<double>(positions);
  CHECK(amax(abs(sub(to(select(sums, 0, 1), f64), value))).item() <= 1e-6 * value);
}

TEST_CASE("cuda: softmax and log_softmax agree with the CPU's, gradients included") {
  if (no_gpu()) return;
  for (DType dtype : floats) {
    for (bool log : {false, true}) {
      const auto fn = [&](std::span<const Tensor> t) { return log ? log_softmax(t[0]) : softmax(t[0]); };
      for (std::int64_t columns : sizes) {
        INFO(name_of(dtype) << " " << columns << (log ? " log" : ""));
        agree({Values(3)({19, columns}, dtype, -5, 5)}, row_tolerance(dtype), fn);
      }
      INFO(name_of(dtype) << (log ? " log" : ""));
      agree({Values(4)({}, dtype)}, 0, fn);
      agree({Values(4)({0, 5}, dtype)}, 0, fn);
      agree({Values(4)({5, 0}, dtype)}, 0, fn);
      agree({slice(Values(4)({6, 70}, dtype), 1, 1, 70, 2)}, row_tolerance(dtype), fn);
      agree({Values(4)({12, 9, 5}, dtype)}, row_tolerance(dtype),
            [&](std::span<const Tensor> t) { return log ? log_softmax(t[0], 1) : softmax(t[0], 1); });
    }
    // Masked elements have weight 0; a row with no others, with NaN or with +inf has no answer.
    Tensor x = Values(5)({5, 1100}, dtype);
    fill_(slice(x, 1, 0, 1100, 3), -infinity);
    fill_(select(x, 0, 1), -infinity);
    fill_(select(select(x, 0, 2), 0, 7), std::nan(""));
    fill_(select(select(x, 0, 3), 0, 7), infinity);
    INFO(name_of(dtype));
    CHECK(relative_distance(softmax(on_gpu(x)), softmax(x)) <= row_tolerance(dtype));
  }
}

TEST_CASE("cuda: cross_entropy agrees with the CPU's, gradients included") {
  if (no_gpu()) return;
  for (DType dtype : floats) {
    for (std::int64_t columns : {2, 3, 31, 32, 33, 1000, 4097, 50304}) {
      for (Reduction reduction : {Reduction::mean, Reduction::sum, Reduction::none}) {
        INFO(name_of(dtype) << " " << columns << " reduction " << static_cast<int>(reduction));
        std::vector<std::int64_t> wanted(37);
        for (std::size_t i = 0; i < wanted.size(); ++i)
          wanted[i] = i % 5 == 3 ? -100 : static_cast<std::int64_t>(i * 7919) % columns;
        agree({Values(6)({37, columns}, dtype, -4, 4), Tensor::from(wanted, {37})}, row_tolerance(dtype),
              [&](std::span<const Tensor> t) { return cross_entropy(t[0], t[1], {reduction}); });
      }
    }
    INFO(name_of(dtype));
    const Tensor nothing = full({4}, -100, {i64});
    agree({Values(7)({4, 9}, dtype), nothing}, 0,
          [](std::span<const Tensor> t) { return cross_entropy(t[0], t[1], {Reduction::sum}); });
    CHECK(std::isnan(cross_entropy(on_gpu(Values(7)({4, 9}, dtype)), on_gpu(nothing)).item()));
    const Tensor infinite = Values(7)({3, 9}, dtype);
    fill_(select(infinite, 0, 1), -infinity);
    fill_(select(select(infinite, 0, 2), 0, 4), infinity);
    agree({infinite, Tensor::from<std::int64_t>({0, 8, 4}, {3})}, row_tolerance(dtype),
          [](std::span<const Tensor> t) { return cross_entropy(t[0], t[1], {Reduction::none}); });
    agree({transpose(Values(7)({9, 4}, dtype), 0, 1), Tensor::from<std::int64_t>({0, 8, 3, 3}, {4})},
          row_tolerance(dtype), [](std::span<const Tensor> t) { return cross_entropy(t[0], t[1]); });
  }
}

TEST_CASE("cuda: cross_entropy's gradient is the same over the logits and beside them") {
  if (no_gpu()) return;
  for (DType dtype : floats)
    for (std::int64_t columns : {2, 33, 4096, 50304}) {
      INFO(name_of(dtype) << " " << columns);
      const Tensor leaf = on_gpu(Values(8)({37, columns}, dtype, -4, 4)).requires_grad_(),
                   targets = randint(0, columns, {37}, {i64, gpu});
      const auto gradient = [&](bool held) {
        Tensor logits = mul(leaf, 2.0);
        const Tensor kept = held ? logits : Tensor{}, loss = cross_entropy(logits, targets);
        logits = {};
        return grad(loss, std::span(&leaf, 1))[0];
      };
      CHECK(distance_in_ulps(gradient(true), gradient(false)) == 0);
    }
}

TEST_CASE(
    "cuda: cross_entropy_ has cross_entropy's loss and gradient within rounding, and repeats to the bit") {
  if (no_gpu()) return;
  for (DType dtype : floats)
    for (const Shape& shape : {Shape{37, 2}, Shape{37, 3}, Shape{37, 33}, Shape{37, 1000}, Shape{37, 4097},
                               Shape{37, 50304}, Shape{37, 60001}, Shape{400, 12800}})
      for (Reduction reduction : {Reduction::mean, Reduction::sum})
        for (LossPrecision precision : {LossPrecision::of_logits, LossPrecision::wide}) {
          INFO(name_of(dtype) << " " << to_string(shape) << " reduction " << static_cast<int>(reduction));
          const Tensor leaf = on_gpu(Values(8)(shape, dtype, -9, 9)).requires_grad_(),
                       targets = randint(0, shape[1], {shape[0]}, {i64, gpu});
          const CrossEntropyOptions options{reduction, 1, precision};
          const auto all_of = [&](bool over, double scale) {
            const Tensor loss =
                over ? cross_entropy_(clone(leaf), targets, options) : cross_entropy(leaf, targets, options);
            return std::pair{loss.detach(),
                             grad(loss, std::span(&leaf, 1), full({}, scale, {loss.dtype(), gpu}))[0]};
          };
          const auto [loss, gradient] = all_of(false, 1);
          for (double scale : {1.0, 4.0}) {
            const auto [over, over_gradient] = all_of(true, scale);
            const auto again = all_of(true, scale);
            CHECK(relative_distance(over, loss) <= row_tolerance(over.dtype()));
            // Logsumexp is summed by more threads here.
            CHECK(relative_distance(over_gradient, mul(gradient, scale)) <= row_tolerance(dtype));
            CHECK(distance_in_ulps(again.first, over) == 0);
            CHECK(distance_in_ulps(again.second, over_gradient) == 0);
          }
        }
  const Tensor bad = Tensor::from<std::int64_t>({0, 7, 1}, {3}, gpu);
  const Tensor loss = cross_entropy_(ones({3, 4}, {f32, gpu}), bad);
  CHECK_THAT(message_of<ValueError>([&] { loss.item(); }),
             ContainsSubstring("cross_entropy: target 7 of row 1 is outside [0, 4)"));
}

TEST_CASE("cuda: a wide loss has the bits of casting the logits first, gradients too") {
  if (no_gpu()) return;
  for (DType dtype : {f16, bf16})
    for (std::int64_t columns : {2, 3, 33, 1000, 1028, 4097, 50304})
      for (Reduction reduction : {Reduction::mean, Reduction::sum, Reduction::none})
        for (std::int64_t from : {0, 1}) {  // aligned, and by one element not
          INFO(name_of(dtype) << " " << columns << " reduction " << static_cast<int>(reduction) << " from "
                              << from);
          const Tensor room = on_gpu(Values(8)({37 * columns + from}, dtype, -9, 9)),
                       targets = randint(0, columns, {37}, {i64, gpu});
          Tensor leaf = view(slice(room, 0, from, 37 * columns + from), {37, columns}).detach();
          leaf.requires_grad_();
          const Tensor wide = cross_entropy(leaf, targets, {reduction, 1, LossPrecision::wide}),
                       cast = cross_entropy(to(leaf, f32), targets, {reduction, 1});
          CHECK(distance_in_ulps(wide, cast) == 0);
          const Tensor up = on_gpu(Values(9)(wide.shape(), f32));
          CHECK(distance_in_ulps(grad(wide, std::span(&leaf, 1), up)[0],
                                 grad(cast, std::span(&leaf, 1), up)[0]) == 0);
        }
}

TEST_CASE("cuda: embedding agrees with the CPU's, repeated and ordered alike") {
  if (no_gpu()) return;
  for (DType dtype : all_dtypes) {
    for (std::int64_t width : {1, 3, 32, 33, 768}) {
      INFO(name_of(dtype) << " width " << width);
      const Tensor table = Values(8)({11, width}, dtype, -50, 50);
      const Tensor index = Values(9)({4, 9}, i64, 0, 10.9);
      agree({table, index}, is_floating(dtype) ? row_tolerance(dtype) : 0,
            [](std::span<const Tensor> t) { return embedding(t[0], t[1]); });
    }
  }
  // Runs of one row that cross any number of pieces of the sorted positions.
  for (std::int64_t count : {1, 31, 32, 33, 64, 65, 1000, 4097}) {
    for (std::int64_t rows : {1, 2, 5, 1000}) {
      INFO(count << " of " << rows);
      agree({Values(10)({rows, 300}, f32), Values(11)({count}, i64, 0, static_cast<double>(rows) - 0.1)},
            16 * rounding(f32), [](std::span<const Tensor> t) { return embedding(t[0], t[1]); });
    }
  }
  agree({Values(12)({6, 4}, f32), zeros({0}, {i64})}, 0,
        [](std::span<const Tensor> t) { return embedding(t[0], t[1]); });
  agree({transpose(Values(12)({6, 40}, f32), 0, 1), transpose(Values(13)({5, 7}, i64, 0, 39), 0, 1)}, 1e-6,
        [](std::span<const Tensor> t) { return embedding(t[0], t[1]); });
}

TEST_CASE("cuda: a bad index or target is reported at the next wait, and the device stays usable") {
  if (no_gpu()) return;
  const Tensor table = ones({5, 3}, {f32, gpu}), bad = Tensor::from<std::int64_t>({0, 7, 1}, {3}, gpu);
  const Tensor y = embedding(table, bad);
  CHECK_THAT(message_of<ValueError>([&] { y.to_vector<float>(); }),
             ContainsSubstring("embedding: index 7 at position 1 is outside [0, 5)"));
  CHECK(std::isnan(y.to_vector<float>()[3]));  // reported once
  CHECK(y.to_vector<float>()[0] == 1);
  const Tensor loss = cross_entropy(ones({3, 4}, {f32, gpu}), bad);
  CHECK_THAT(message_of<ValueError>([&] { loss.item(); }),
             ContainsSubstring("cross_entropy: target 7 of row 1 is outside [0, 4)"));
  CHECK(std::isnan(loss.item()));
  for (const Reduction r : {Reduction::mean, Reduction::sum, Reduction::none}) {
    const Tensor likelihood = nll_loss(ones({3, 4}, {f32, gpu}), bad, {r});
    CHECK_THAT(message_of<ValueError>([&] { backend(DeviceType::cuda).synchronize(gpu); }),
               ContainsSubstring("nll_loss: target 7 of row 1 is outside [0, 4)"));
    CHECK(std::isnan(sum(likelihood).item()));
  }
  const Tensor picked = gather(ones({1, 4}, {f32, gpu}), Tensor::from<std::int64_t>({3, -1}, {1, 2}, gpu));
  CHECK_THAT(message_of<ValueError>([&] { backend(DeviceType::cuda).synchronize(gpu); }),
             ContainsSubstring("gather: index -1 at position 1 is outside [0, 4)"));
  const Tensor drawn = multinomial(Tensor::from<float>({1, -1}, {2}, gpu));
  CHECK_THAT(message_of<ValueError>([&] { drawn.item(); }), ContainsSubstring("multinomial: weight -1"));
  const Tensor nothing = multinomial(zeros({3}, {f32, gpu}));
  CHECK_THAT(message_of<ValueError>([&] { nothing.item(); }), ContainsSubstring("all zero"));
  CHECK(sum(embedding(table, Tensor::from<std::int64_t>({0, 4}, {2}, gpu))).item() == 6);
}

TEST_CASE("cuda: batch_norm agrees with the CPU's, running statistics and gradients included") {
  if (no_gpu()) return;
  for (DType dtype : floats) {
    const DType wide = dtype == f64 ? f64 : f32;
    for (const Shape& shape : {Shape{9, 5}, Shape{33, 70}, Shape{300, 64}, Shape{5000, 24}, Shape{4, 3, 31},
                               Shape{2, 65, 7, 9}, Shape{3, 1, 4097}}) {
      for (bool training : {false, true}) {
        for (bool affine : {false, true}) {
          INFO(name_of(dtype) << " " << to_string(shape) << (training ? " training" : "")
                              << (affine ? " affine" : ""));
          Values values(14);
          const std::int64_t channels = shape[1];
          std::vector<Tensor> in{values(shape, dtype, -1, 3)};
          if (affine) in.insert(in.end(), {values({channels}, wide), values({channels}, wide)});
          const DType kept = affine ? wide : dtype;
          const Tensor mean = values({channels}, kept), variance = values({channels}, kept, 0.5, 2);
          Tensor followed[2];
          agree(in, 2 * row_tolerance(dtype), [&](std::span<const Tensor> t) {
            const Device device = t[0].device();
            const Tensor m = clone(to(mean, device)), v = clone(to(variance, device));
            const Tensor y = batch_norm(t[0], m, v, affine ? t[1] : Tensor{}, affine ? t[2] : Tensor{},
                                        {.training = training});
            followed[device == gpu] = cat(std::vector{m, v});
            return y;
          });
          CHECK(relative_distance(followed[1], followed[0]) <= row_tolerance(kept));
        }
      }
    }
  }
}

TEST_CASE("cuda: conv2d agrees with the CPU's, gradients included") {
  if (no_gpu()) return;
  for (DType dtype : floats) {
    for (std::int64_t stride : {1, 2, 3}) {
      for (std::int64_t padding : {0, 1, 2}) {
        INFO(name_of(dtype) << " stride " << stride << " padding " << padding);
        Values values(15);
        agree({values({2, 3, 9, 11}, dtype), values({5, 3, 3, 2}, dtype), values({5}, dtype)},
              2 * row_tolerance(dtype), [&](std::span<const Tensor> t) {
                return conv2d(t[0], t[1], t[2], {.stride = stride, .padding = padding});
              });
      }
    }
  }
  agree({Values(15)({0, 3, 9, 9}, f32), Values(16)({5, 3, 3, 3}, f32)}, 0,
        [](std::span<const Tensor> t) { return conv2d(t[0], t[1]); });
}
