// Every op that is not elementwise, by the table of cases.
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <numeric>
#include <random>
#include <regex>

#include "autograd/autograd.h"
#include "runtime/apply.h"
#include "runtime/exact_squares.h"
#include "runtime/ops/list.h"
#include "runtime/ops/listing.h"
#include "runtime/ops/pool2d.h"
#include "tests/runtime/op_cases.h"
#include "tests/source_root.h"

using namespace sherd;
using namespace sherd::test;

namespace {

/// i64 values that have the bits of another integer dtype, sign or none, at their low end.
Tensor bits_of(const Tensor& x, DType dtype) {
  if (dtype == i64) return x;
  const std::int64_t size = std::int64_t{1} << (8 * size_of(dtype)), low = dtype == u8 ? 0 : -size / 2;
  return add(remainder(sub(x, low), size), low);
}

Bits layout_bits(const Case& c, DType dtype) {
  return dtype == f64 && c.f64_by_reference ? Bits::rounded : c.layouts;
}

}  // namespace

TEST_CASE("ops: a layout changes nothing, in every dtype and shape", "[one thread]") {
  for_each_case_and_dtype([](const Case& c, DType dtype) {
    std::vector<std::vector<Shape>> shapes = c.more;
    shapes.push_back(small_shapes(c));
    for (const auto& s : shapes) {
      const std::vector<Tensor> in = draw(c, dtype, s);
      const std::vector<Tensor> expected = run(c, in);
      for (Lay lay : all_lays) {
        INFO(to_string(lay) << " " << fmt::format("{}", fmt::join(s, " ")));
        check_agree(run(c, laid(in, lay)), expected, layout_bits(c, dtype));
      }
    }
  });
}

TEST_CASE("ops: without elements along any axis an op gives a result or one line, and so do its gradients",
          "[one thread]") {
  const auto swept = [](const Case& c, DType dtype, const std::vector<Shape>& shapes) {
    INFO(fmt::format("{}", fmt::join(shapes, " ")));
    const std::vector<Tensor> in = draw(c, dtype, shapes);
    try {
      for (const Tensor& y : run(c, in)) CHECK(doubles(y).size() == std::size_t(y.numel()));
      if (!c.gradients || !is_floating(dtype)) return;
      const std::vector<Tensor> all = gradients(c, in, Lay::dense);
      std::size_t at = 0;
      for (const Tensor& x : in)
        if (is_floating(x.dtype())) {
          const Tensor& g = all.at(at++);
          CHECK((!g.defined() || g.shape() == x.shape()));
        }
    } catch (const InternalError& error) {
      FAIL_CHECK(error.what());
    } catch (const Error& error) {
      CHECK(std::string(error.what()).find('\n') == std::string::npos);
    }
  };
  for_each_case_and_dtype([&](const Case& c, DType dtype) {
    std::vector<std::vector<Shape>> all = c.more;
    all.push_back(small_shapes(c));
    for (const std::vector<Shape>& shapes : all) {
      std::set<std::int64_t> sizes;
      for (std::size_t i = 0; i < shapes.size(); ++i)
        for (int axis = 0; axis < shapes[i].rank(); ++axis) {  // this axis alone
          std::vector<Shape> emptied = shapes;
          emptied[i][axis] = 0;
          sizes.insert(shapes[i][axis]);
          swept(c, dtype, emptied);
        }
      for (const std::int64_t size : sizes) {  // each axis of a size, so that inputs go on fitting together
        std::vector<Shape> emptied = shapes;
        for (Shape& shape : emptied)
          for (std::int64_t& n : shape)
            if (n == size) n = 0;
        swept(c, dtype, emptied);
      }
    }
  });
}

TEST_CASE("ops: 16-bit floats are computed in f32 and rounded once") {
  for_each_case_and_dtype([](const Case& c, DType dtype) {
    if (dtype != f16 && dtype != bf16) return;
    const std::vector<Tensor> in = draw(c, dtype, small_shapes(c));
    std::vector<Tensor> got = run(c, in), wide = run(c, as(in, f32));
    for (std::size_t i = 0; i < wide.size(); ++i) wide[i] = to(wide[i], got[i].dtype());
    check_agree(got, wide, c.sixteen);
  });
}

TEST_CASE("ops: the number of threads changes no bit, of values and gradients") {
  for_each_case([](const Case& c) {
    const std::vector<Tensor> in = draw(c, f32, large_shapes(c));
    std::vector<Tensor> values, grads;
    for (int threads : {1, 2, 3}) {
      const Threads scope(threads);
      const std::vector<Tensor> y = run(c, in),
                                g = c.gradients ? gradients(c, in, Lay::dense) : std::vector<Tensor>{};
      if (threads == 1) {
        values = y;
        grads = g;
      }
      check_agree(y, values, Bits::exact);
      check_agree(g, grads, Bits::exact);
    }
  });
}

TEST_CASE("ops: a gradient that is to be differentiated again is the gradient, whichever inputs want one",
          "[one thread]") {
  for_each_case([](const Case& c) {
    if (!c.gradients || !c.second_derivative) return;
    const std::vector<Tensor> in = draw(c, f64, small_shapes(c));
    for (std::size_t wanting = 0; wanting <= in.size(); ++wanting) {  // each alone, and all
      std::vector<Tensor> given, wanted;
      for (std::size_t i = 0; i < in.size(); ++i) {
        given.push_back(in[i].defined() ? in[i].detach() : in[i]);
        const bool wants = wanting == in.size() || i == wanting;
        if (!wants || !in[i].defined() || !is_floating(in[i].dtype())) continue;
        given.back().requires_grad_();
        wanted.push_back(given.back());
      }
      if (wanted.empty()) continue;
      const Tensor y = run(c, given)[0];
      if (!y.requires_grad()) continue;
      const Tensor up = numbers(y.shape(), f64, 77, 0.5, 1.5);
      const std::vector<Tensor> once = grad(run(c, given)[0], wanted, up),
                                again = grad(y, wanted, up, {.create_graph = true});
      INFO("input " << wanting << " of " << in.size());
      for (std::size_t i = 0; i < once.size(); ++i) {
        REQUIRE(once[i].defined() == again[i].defined());
        if (once[i].defined()) CHECK(amax(abs(sub(once[i], again[i]))).item() <= 1e-9);
      }
    }
  });
}

TEST_CASE("ops: gradients are those of finite differences, the second time too", "[one thread]") {
  for_each_case([](const Case& c) {
    if (!c.gradients) return;
    const auto fn = [&](std::span<const Tensor> in) { return run(c, in)[0]; };
    const std::vector<Tensor> in = draw(c, f64, small_shapes(c));
    CHECK(gradient_error(fn, in) < 1e-6);
    if (c.second_derivative) CHECK(second_gradient_error(fn, in) < 1e-5);
    for (const auto& shapes : c.more) {
      INFO(fmt::format("{}", fmt::join(shapes, " ")));
      CHECK(gradient_error(fn, draw(c, f64, shapes)) < 1e-6);
    }
  });
}

TEST_CASE("ops: gradients do not depend on layouts, and 16-bit ones are near those of f32", "[one thread]") {
  for_each_case_and_dtype([](const Case& c, DType dtype) {
    if (!c.gradients || !is_floating(dtype)) return;
    const std::vector<Tensor> in = draw(c, dtype, small_shapes(c));
    const std::vector<Tensor> expected = gradients(c, in, Lay::dense);
    for (Lay lay : all_lays) {
      INFO(to_string(lay));
      check_agree(gradients(c, laid(in, lay), lay), expected, layout_bits(c, dtype));
    }
    if (dtype == f64) return;
    const std::vector<Tensor> wide = gradients(c, as(in, f64), Lay::dense);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      CHECK(expected[i].dtype() == dtype);
      CHECK(distance(expected[i], wide[i]) < (dtype == f32 ? 1e-5 : dtype == f16 ? 1e-2 : 1e-1));
    }
  });
}

TEST_CASE("ops: fused forms equal their references, and so do their gradients") {
  for_each_case_and_dtype([](const Case& c, DType dtype) {
    if (!c.reference || !is_floating(dtype)) return;
    const std::vector<Tensor> in = draw(c, dtype, small_shapes(c));
    const double rounding = dtype == f64 ? 1e-12 : dtype == f32 ? 1e-5 : dtype == f16 ? 1e-2 : 8e-2;
    CHECK(distance(run(c, in)[0], c.reference(in)[0]) < rounding);
    Case slow = c;
    slow.call = c.reference;
    const std::vector<Tensor> fast_grads = gradients(c, in, Lay::dense),
                              slow_grads = gradients(slow, in, Lay::dense);
    for (std::size_t i = 0; i < fast_grads.size(); ++i)
      CHECK(distance(fast_grads[i], slow_grads[i]) < rounding);
  });
}

TEST_CASE("ops: meta gives shapes only, and cpu:1 is a device of its own") {
  for_each_case([](const Case& c) {
    const std::vector<Tensor> in = draw(c, f32, small_shapes(c));
    std::vector<Tensor> second, shapes;
    for (const Tensor& x : in) {
      second.push_back(to(x, Device::cpu(1)));
      shapes.push_back(empty({x.shape(), x.dtype(), Device::meta()}));
    }
    const std::vector<Tensor> y = run(c, in), z = run(c, second);
    check_agree(z, y, Bits::exact);
    for (const Tensor& t : z) CHECK(t.device() == Device::cpu(1));
    if (c.name.starts_with("to another device")) return;  // a tensor on meta has no values to move
    const std::vector<Tensor> m = run(c, shapes);
    REQUIRE(m.size() == y.size());
    for (std::size_t i = 0; i < y.size(); ++i)
      CHECK(m[i].spec() == Spec{y[i].shape(), y[i].dtype(), Device::meta()});
    if (in.size() < 2 || c.name == "copy_") return;
    std::vector<Tensor> mixed = in;
    mixed.back() = second.back();
    const std::string text = message_of<DeviceError>([&] { run(c, mixed); });
    INFO(text);
    CHECK(text.find("cpu:1") != std::string::npos);
    CHECK(text.find(':') != std::string::npos);
  });
}

TEST_CASE("ops: a dtype that an op does not take is refused") {
  for_each_case([](const Case& c) {
    for (DType dtype : all_dtypes) {
      if (c.dtypes.contains(dtype) || c.on_cpu.contains(dtype)) continue;
      // Embeddings of integers are rows like others; only their gradient needs floats.
      if (c.name == "embedding" || c.name == "index_select") continue;
      INFO(name_of(dtype));
      const std::string text = message_of<DTypeError>([&] { run(c, draw(c, dtype, small_shapes(c))); });
      INFO(text);
      CHECK(one_line_about(text, name_of(dtype)));
    }
  });
}

TEST_CASE("ops: creation gives what was asked for, on every device") {
  for (DType dtype : all_dtypes)
    for (Device device : {Device::cpu(), Device::cpu(1), Device::meta()}) {
      const TensorOptions o{dtype, device};
      const Spec spec{{2, 3}, dtype, device};
      CHECK(full({2, 3}, 1, o).spec() == spec);
      CHECK(zeros({2, 3}, o).spec() == spec);
      CHECK(ones_like(zeros({2, 3}, o)).spec() == spec);
      CHECK(arange(0, 1, 1, o).spec() == Spec{{1}, dtype, device});
      if (is_floating(dtype))
        CHECK(rand({2, 3}, o).spec() == spec);
      else
        CHECK_THROWS_AS(rand({2, 3}, o), DTypeError);
      if (is_floating(dtype))
        CHECK(randn({2, 3}, o).spec() == spec);
      else
        CHECK_THROWS_AS(randn({2, 3}, o), DTypeError);
      CHECK(randint(0, 2, {2, 3}, o).spec() == spec);
      if (device.type == DeviceType::meta) continue;
      for (double v : doubles(full({2, 3}, 1, o))) CHECK(v == 1);
      for (double v : doubles(zeros({2, 3}, o))) CHECK(v == 0);
    }
  CHECK(arange(2, 11, 3).to_vector<std::int64_t>() == std::vector<std::int64_t>{2, 5, 8});
  CHECK(arange(5, 0, -2).to_vector<std::int64_t>() == std::vector<std::int64_t>{5, 3, 1});
  CHECK(arange(5, 0).numel() == 0);
}

TEST_CASE("ops: random numbers come from the seed alone") {
  const auto draw_all = [](int threads) {
    const Threads scope(threads);
    manual_seed(3);
    return std::vector<Tensor>{rand({70001}), randn({70001}), randint(-5, 9, {70001}),
                               dropout(ones({70001}), 0.5), rand({3}, {f64})};
  };
  const std::vector<Tensor> first = draw_all(1);
  check_agree(draw_all(2), first, Bits::exact);
  check_agree(draw_all(3), first, Bits::exact);
  for (double v : doubles(first[0])) REQUIRE((v >= 0 && v < 1));
  for (double v : doubles(first[2])) REQUIRE((v >= -5 && v < 9));
  CHECK(std::abs(mean(first[0]).item() - 0.5) < 0.01);
  CHECK(std::abs(mean(first[1]).item()) < 0.02);
  CHECK(std::abs(mean(square(first[1])).item() - 1) < 0.03);
  CHECK_FALSE(same_bits(rand({5}), rand({5})));
  manual_seed(4);
  CHECK_FALSE(same_bits(rand({70001}), first[0]));
}

TEST_CASE(
    "ops: -inf added to a score hides the key as a bool mask does, and a query without keys gives zeros") {
  for (DType dtype : {f32, f64, bf16}) {
    for (bool causal : {false, true}) {
      for (double dropout : {0.0, 0.4}) {
        for (std::int64_t keys : {8, 7}) {
          INFO(name_of(dtype) << (causal ? " causal" : "") << " dropout " << dropout << ", " << keys
                              << " keys");
          const Tensor seen = logical_and(numbers({5, keys}, boolean), unsqueeze(arange(0, 5) != 3, 1));
          const Tensor added = where(seen, zeros({}, {dtype}), full({}, -HUGE_VAL, {dtype}));
          const auto results = [&](const Tensor& mask, bool by_op) {
            std::vector<Tensor> in{numbers({2, 4, 5, 6}, dtype, 1), numbers({2, 2, keys, 6}, dtype, 2),
                                   numbers({2, 2, keys, 6}, dtype, 3)};
            for (Tensor& x : in) x = x.detach().requires_grad_();
            manual_seed(5);
            const AttentionOptions options{.causal = causal, .dropout = dropout, .scale = 0.6, .mask = mask};
            if (!by_op) {
              std::vector<Tensor> all{attention(in[0], in[1], in[2], options)};
              for (const Tensor& g : grad(sum(square(all[0])), in)) all.push_back(g);
              return all;
            }
            const RandomKey key = Context::current().generator().reserve(2 * 4 * 5 * 8);
            const Tensor given[] = {in[0], in[1], in[2], mask};
            std::vector<Tensor> all{apply_many(ops::MaskedAttention{{0.6, causal, dropout, key}}, given)[0]};
            for (const Tensor& g : grad(sum(square(all[0])), in)) all.push_back(g);
            return all;
          };
          const std::vector<Tensor> want = results(seen, false);
          CHECK(amax(abs(select(want[0], 2, 3))).item() == 0);
          CHECK(amax(abs(select(want[1], 2, 3))).item() == 0);
          const double rounding = dtype == bf16 ? 0.05 : 1e-5;
          for (const std::vector<Tensor>& got :
               {results(added, false), results(seen, true), results(added, true)})
            for (std::size_t i = 0; i < 4; ++i) CHECK(distance(got[i], want[i]) <= rounding);
        }
      }
    }
  }
}

TEST_CASE("ops: dropout keeps the mean, drops all or nothing at its ends, and its gradient has its mask") {
  manual_seed(1);
  Tensor x = ones({50000}).requires_grad_();
  const Tensor y = dropout(x, 0.25);
  CHECK(std::abs(mean(y).item() - 1) < 0.02);
  CHECK(same_bits(grad(y, std::span(&x, 1), ones({50000}))[0], y));
  CHECK(same_bits(dropout(x, 0), x));
  CHECK(same_bits(dropout(x, 1), zeros({50000})));
  CHECK_THROWS_AS(dropout(x, 1.5), ValueError);
}

TEST_CASE("ops: the precisions that batch_norm mixes, and the mix that its backward refuses") {
  const auto text_of = [](const Shape& shape, DType input, DType weight, DType running, bool training) {
    Tensor x = numbers(shape, input).requires_grad_();
    const Tensor w = numbers({shape[1]}, weight, 2).requires_grad_();
    const Tensor mean = zeros({shape[1]}, {running}), var = ones({shape[1]}, {running});
    const Tensor y = batch_norm(x, mean, var, w, numbers({shape[1]}, weight, 3), {.training = training});
    CHECK(y.dtype() == input);
    CHECK(same_bits(y.detach(), to(batch_norm(to(x, f32).detach(), zeros({shape[1]}), ones({shape[1]}),
                                              to(w, f32).detach(), to(numbers({shape[1]}, weight, 3), f32),
                                              {.training = training}),
                                   input)));
    CHECK(mean.dtype() == running);
    try {
      sum(y).backward();
      CHECK((x.grad().dtype() == input && w.grad().dtype() == weight));
      return std::string();
    } catch (const DTypeError& error) {
      return std::string(error.what());
    }
  };
  for (DType low : {f16, bf16})
    for (const Shape& shape : {Shape{4, 3}, Shape{4, 3, 2}, Shape{2, 3, 2, 2}})
      for (DType weight : {low, f32})
        for (DType running : {low, f32})
          for (bool training : {false, true}) {
            INFO(name_of(low) << " " << fmt::format("{}", shape) << " weight " << name_of(weight)
                              << " running " << name_of(running) << " training " << training);
            const std::string text = text_of(shape, low, weight, running, training);
            if (!training || shape.rank() == 2 || weight == running) {
              CHECK(text == "");
              continue;
            }
            const auto word = [](DType d) { return d == f16 ? "Half" : d == bf16 ? "BFloat16" : "Float"; };
            CHECK(one_line_about(text, fmt::format("Expected running_mean to have type {} but got {}",
                                                   word(weight), word(running))));
            CHECK(one_line_about(text, "batch_norm"));
          }
  CHECK(text_of({3, 4, 2}, f32, f32, f32, true) == "");
}

TEST_CASE("ops: batch_norm's statistics are those of f64, wherever the channels lie") {
  for (const Shape& shape : {Shape{4001, 3}, Shape{33, 70}, Shape{500, 3, 7}, Shape{2, 5, 3000}}) {
    const Tensor x = numbers(shape, f32, 1, 9, 11);
    const std::vector<Tensor> in = {x, {}, {}, {}, {}, {}}, wide = {to(x, f64), {}, {}, {}, {}, {}};
    const Tensors got = apply_many(ops::BatchNorm{}, in), expected = apply_many(ops::BatchNorm{}, wide);
    for (std::size_t i : {1, 2}) CHECK(distance(got[i], expected[i]) < 1e-6);
    CHECK(distance(got[0], expected[0]) < 1e-5);
    const Tensors slow = ops::BatchNorm{}.reference(wide);
    for (std::size_t i : {0, 1, 2}) CHECK(distance(expected[i], slow[i]) < 1e-12);
  }
}

TEST_CASE("ops: running statistics follow training batches, and an empty one changes nothing") {
  const Tensor x = numbers({5, 2, 3}, f32);
  for (DType running : {f32, f16, bf16}) {
    const Tensor mean = full({2}, 0.5, {running}), var = full({2}, 2, {running});
    batch_norm(x, mean, var);
    CHECK(same_bits(mean, full({2}, 0.5, {running})));
    const Tensor centred = sub(x, sherd::mean(x, {0, 2}, Keep::dims));
    const Tensor unbiased = div(sum(square(centred), {0, 2}), 14);
    batch_norm(x, mean, var, {}, {}, {.training = true, .momentum = 0.25});
    const double rounding = running == f32 ? 1e-6 : running == f16 ? 1e-3 : 8e-3;
    CHECK(distance(mean, add(mul(sherd::mean(x, {0, 2}), 0.25), 0.375)) < rounding);
    CHECK(distance(var, add(mul(unbiased, 0.25), 1.5)) < rounding);
    const Tensor before = clone(mean);
    batch_norm(numbers({0, 2, 3}, f32), mean, var, {}, {}, {.training = true});
    CHECK(same_bits(mean, before));
  }
}

TEST_CASE("ops: the norm is the same however tensors are ordered and cut") {
  for (DType dtype : {f64, f32, f16, bf16}) {
    const Tensor x = numbers({5003}, dtype, 1, -30, 30);
    const double whole = order_free_norm(std::span(&x, 1)).item();
    for (std::int64_t cut : {1, 17, 2500}) {
      const Tensor parts[] = {narrow(x, 0, cut, 5003 - cut), narrow(x, 0, 0, cut)};
      CHECK(order_free_norm(parts).item() == whole);
    }
    double squares = 0;
    for (double v : doubles(x)) squares += v * v;
    CHECK(std::abs(whole - std::sqrt(squares)) < 1e-9 * whole);
  }
  CHECK(order_free_norm({}).item() == 0);
  const Tensor mixed[] = {numbers({301}, f32, 1, -30, 30), numbers({77}, bf16, 2, -30, 30)};
  const Tensor cast[] = {mixed[0], to(mixed[1], f32)};
  CHECK(order_free_norm(mixed).item() == order_free_norm(cast).item());
}

TEST_CASE("ops: squares are summed without rounding, whatever their magnitudes") {
  std::mt19937 random(3);
  const auto sums_of = [](const Tensor& x) {
    return apply_many(ops::SquareSums{}, std::span(&x, 1))[0].to_vector<std::int64_t>();
  };
  // Each element by itself, in limbs that are added up here, is a sum without pieces and their grids.
  for (DType dtype : {f64, f32, f16, bf16})
    for (int exponents : {0, 2, 14, 23, 24, 40, 120, 1000})
      for (std::int64_t n : {1, 2, 16, 1023, 1025, 3000}) {
        INFO(name_of(dtype) << ", " << n << " of 2^" << exponents);
        std::vector<double> values(static_cast<std::size_t>(n));
        for (double& v : values)
          v = std::ldexp(static_cast<double>(random()) / 0x1p31 - 1,
                         static_cast<int>(random() % (2 * static_cast<unsigned>(exponents) + 1)) - exponents);
        const Tensor x = to(Tensor::from(values, {n}), dtype);
        std::vector<std::int64_t> one_by_one(ExactSquares::limbs);
        for (double v : doubles(x))
          add_square(v, [&](int limb, std::uint64_t value) {
            one_by_one[static_cast<std::size_t>(limb)] += static_cast<std::int64_t>(value);
          });
        CHECK(SquareDigits(sums_of(x).data()) == SquareDigits(one_by_one.data()));
      }
}

TEST_CASE("ops: the norm is the root of the rounded sum") {
  const auto norm = [](const std::vector<double>& values) {
    const Tensor x = Tensor::from(values, {static_cast<std::int64_t>(values.size())});
    return order_free_norm(std::span(&x, 1)).item();
  };
  for (int exponent = -1074; exponent < 1024; ++exponent) {
    const double x = std::ldexp(1, exponent);
    INFO(exponent);
    CHECK(norm({x}) == x);
    if (exponent > -1070 && exponent < 1020) CHECK(norm({3 * x, -4 * x}) == 5 * x);
  }
  std::mt19937_64 random(4);
  for (int i = 0; i < 1000; ++i) {  // integers, whose squares and their sum an integer of 128 bits holds
    std::vector<double> values;
    unsigned __int128 sum = 0;
    for (int k = 0; k < 9; ++k) {
      const std::uint64_t value = random() >> (11 + random() % 40);
      values.push_back(static_cast<double>(value));
      sum += static_cast<unsigned __int128>(value) * value;
    }
    CHECK(norm(values) == std::sqrt(static_cast<double>(sum)));
  }
  CHECK(norm({1, 0x1p-500}) == 1);
  CHECK(norm({0x1p1023, 0x1p1023, 0x1p1023, 0x1p1023}) == std::numeric_limits<double>::infinity());
  CHECK(norm({0, -0.0}) == 0);
}

TEST_CASE("ops: draws follow the weights") {
  manual_seed(5);
  const Tensor weights = expand(Tensor::from<float>({1, 0, 3}, {3}), {20000, 3});
  const std::vector<std::int64_t> drawn = multinomial(weights).to_vector<std::int64_t>();
  CHECK(std::count(drawn.begin(), drawn.end(), 1) == 0);
  CHECK(std::abs(static_cast<double>(std::count(drawn.begin(), drawn.end(), 2)) / 20000 - 0.75) < 0.02);
  CHECK_THROWS_AS(multinomial(zeros({3})), ValueError);
  CHECK_THROWS_AS(multinomial(full({3}, -1)), ValueError);
}

TEST_CASE("ops: many draws of one row follow its weights, and without replacement none is drawn twice") {
  const Tensor weights = Tensor::from<float>({1, 0, 3, 0}, {4});
  for (const int threads : {1, 2}) {
    const Threads some(threads);
    manual_seed(5);
    const std::vector<std::int64_t> drawn = multinomial(weights, 20000).to_vector<std::int64_t>();
    CHECK(std::count(drawn.begin(), drawn.end(), 1) + std::count(drawn.begin(), drawn.end(), 3) == 0);
    CHECK(std::abs(static_cast<double>(std::count(drawn.begin(), drawn.end(), 2)) / 20000 - 0.75) < 0.02);
  }
  // Each is what one draw of a repeated row is.
  const Tensor rows = numbers({3, 7}, f64, 1, 0.1, 2);
  manual_seed(6);
  const Tensor many = multinomial(rows, 5);
  manual_seed(6);
  const Tensor each = multinomial(expand(unsqueeze(rows, 1), {3, 5, 7}));
  CHECK(same_bits(many, each));
  // The first of those without replacement follows the weights, and all are there in the end.
  const Tensor same = expand(weights, {20000, 4});
  const Tensor pairs = multinomial(same, 2, Replacement::without);
  const double first = sum(equal(select(pairs, 1, 0), 2)).item();
  CHECK(std::abs(first / 20000 - 0.75) < 0.02);
  CHECK(all(equal(sum(pairs, {1}), 2)).item<bool>());
  CHECK(multinomial(rows, 0).shape() == Shape{3, 0});
  CHECK(multinomial(zeros({0, 4}), 3).shape() == Shape{0, 3});
  for (const Replacement how : {Replacement::with, Replacement::without}) {
    CHECK_THROWS_AS(multinomial(zeros({3}), 2, how), ValueError);
    CHECK_THROWS_AS(multinomial(full({3}, -1), 2, how), ValueError);
    CHECK_THROWS_AS(multinomial(full({3}, NAN), 2, how), ValueError);
    CHECK_THROWS_AS(multinomial(rows, -1, how), ValueError);
    CHECK_THROWS_AS(multinomial(ones({3}, {i32}), 2, how), DTypeError);
    CHECK_THROWS_AS(multinomial(Tensor::scalar(1, {f32}), 2, how), ShapeError);
  }
  CHECK(one_line_about(message_of<ValueError>([&] { multinomial(weights, 3, Replacement::without); }),
                       "multinomial"));
  CHECK(one_line_about(message_of<ValueError>([&] { multinomial(weights, 5, Replacement::without); }),
                       "multinomial"));
}

TEST_CASE("ops: draws have more digits than f32, so that no small weight is passed over") {
  // Behind a first weight of nearly everything there are 2^15 of 2^-27 each: numbers of 24 bits would meet
  // every eighth of them.
  const std::int64_t rare = 1 << 15, draws = 1 << 22;
  const Tensor weights = cat({full({1}, 1 - 0x1p-12, {f64}), full({rare}, 0x1p-27, {f64})});
  const auto count_by_rest = [&](const Tensor& drawn) {
    std::array<std::int64_t, 8> counts{};
    for (const std::int64_t i : masked_select(drawn, greater(drawn, 0)).to_vector<std::int64_t>())
      ++counts[static_cast<std::size_t>(i % 8)];
    return counts;
  };
  manual_seed(7);
  // 1024 in all are expected, 128 of each: 40 are eight deviations away.
  for (const std::int64_t n : count_by_rest(multinomial(weights, draws))) CHECK((n > 40 && n < 216));
}

TEST_CASE("ops: running sums and products of rows are those of each row alone, and so are their gradients") {
  for (const DType dtype : {f64, f32, bf16, f16}) {
    const Tensor x = numbers({7, 130}, dtype, 3, 0.5, 1.5).requires_grad_();
    const Tensor up = numbers(x.shape(), dtype, 4);
    for (const auto running : {&cumsum, &cumprod}) {
      const Tensor y = running(x, 1), gx = grad(y, {x}, up)[0];
      for (std::int64_t r = 0; r < x.size(0); ++r) {
        const Tensor row = clone(select(x.detach(), 0, r)).requires_grad_(), z = running(row, 0);
        CHECK(same_bits(select(y.detach(), 0, r), z.detach()));
        CHECK(same_bits(select(gx, 0, r), grad(z, {row}, clone(select(up, 0, r)))[0]));
      }
    }
  }
}

TEST_CASE("ops: topk has the first of what sort gives, for any number of them") {
  for (const DType dtype : {f64, f32, bf16, f16, i64, i32, u8, boolean})
    for (const std::int64_t columns : {5, 64, 200, 1000}) {
      const Tensor x = is_floating(dtype) ? with_specials({3, columns}, dtype) : numbers({3, columns}, dtype);
      const auto [values, places] = sort(x, 1, Order::descending);
      for (const std::int64_t k : {std::int64_t{1}, columns / 9, columns / 8, columns / 8 + 1, columns}) {
        if (k == 0) continue;
        INFO(name_of(dtype) << ", " << k << " of " << columns);
        const auto first = topk(x, k);
        CHECK(same_bits(first.values, narrow(values, 1, 0, k)));
        CHECK(same_bits(first.indices, narrow(places, 1, 0, k)));
      }
    }
}

TEST_CASE("ops: logcumsumexp keeps what is far below what comes, and its gradient sums to the upstream's") {
  const double infinite = std::numeric_limits<double>::infinity();
  for (const DType dtype : {f64, f32, f16, bf16})
    for (const std::int64_t n : {1, 2, 3, 8, 21}) {
      INFO(name_of(dtype) << " " << n);
      const Tensor x = mul(numbers({3, n, 2}, dtype, 4), 4);
      const Tensor y = logcumsumexp(x, 1);
      CHECK(same_bits(y, logcumsumexp(x, -2)));
      for (std::int64_t i = 0; i < n; ++i) {
        const Tensor expected = logsumexp(narrow(to(x, f64), 1, 0, i + 1), {1});
        CHECK(distance(select(to(y, f64), 1, i), expected) < (dtype == f64   ? 1e-13
                                                              : dtype == f32 ? 1e-5
                                                              : dtype == f16 ? 2e-2
                                                                             : 0.1));
      }
    }
  // 800 below what comes, and nothing at all: each is what a sum of its own elements gives.
  const Tensor steep = Tensor::from<double>({-800, -800, 0, 800, -infinite, 5}, {6});
  Tensor x = clone(steep).requires_grad_();
  const Tensor y = logcumsumexp(x, 0);
  const auto values = y.detach().to_vector<double>();
  CHECK((values[0] == -800 && std::abs(values[1] - (std::log(2.0) - 800)) < 1e-12 && values[2] == 0));
  CHECK((values[3] == 800 && values[5] == 800));
  sum(y).backward();
  const auto slopes = x.grad().to_vector<double>();
  // Each output hands on 1 in all, to the largest of what it sums.
  CHECK(std::abs(std::accumulate(slopes.begin(), slopes.end(), 0.0) - 6) < 1e-12);
  CHECK((std::abs(slopes[0] - 1.5) < 1e-12 && std::abs(slopes[2] - 1) < 1e-12 && slopes[3] == 3));
  CHECK(logcumsumexp(Tensor::from<double>({-infinite, -infinite, 1}), 0).to_vector<double>() ==
        std::vector<double>{-infinite, -infinite, 1});
  const Tensor smooth = numbers({2, 7}, f64, 9);
  CHECK(gradient_error([](std::span<const Tensor> in) { return logcumsumexp(in[0], 1); },
                       std::span(&smooth, 1)) < 1e-6);
  CHECK(logcumsumexp(Tensor::scalar(3, {f32}), 0).item() == 3);
  CHECK(logcumsumexp(zeros({2, 0}), 1).shape() == Shape{2, 0});
  CHECK_THROWS_AS(logcumsumexp(ones({3}, {i32}), 0), DTypeError);
  CHECK_THROWS_AS(logcumsumexp(ones({3}), 1), ShapeError);
}

TEST_CASE("ops: a long line has one largest element and one product, whatever pieces it is cut into") {
  const std::int64_t n = 100003;
  for (DType dtype : {f64, f32, f16, bf16, i32}) {
    INFO(name_of(dtype));
    Tensor x = full({n}, -1, {dtype});
    for (const std::int64_t at : {40000, 90000}) x[at] = 2;  // the first of equals
    CHECK(argmax(x, 0).item<std::int64_t>() == 40000);
    CHECK(amax(x).item() == 2);
    CHECK(argmin(x, 0).item<std::int64_t>() == 0);
    const Tensor rows = stack(std::vector{x, neg(x)});
    CHECK(argmax(rows, 1).to_vector<std::int64_t>() == std::vector<std::int64_t>{40000, 0});
    CHECK(doubles(amin(rows, {1})) == std::vector<double>{-1, -2});
    if (!is_floating(dtype)) continue;
    x[70000] = NAN, x[80000] = NAN;  // the first NaN
    CHECK(argmax(x, 0).item<std::int64_t>() == 70000);
    CHECK(argmin(x, 0).item<std::int64_t>() == 70000);
    CHECK(std::isnan(amax(x).item()));
    Tensor zero = zeros({n}, {dtype});  // of zeros the first one's sign
    zero[0] = -0.0;
    CHECK(std::signbit(amax(zero).item()));
    CHECK(!std::signbit(amin(flip(zero, {0})).item()));
  }
  for (DType dtype : {f64, f32}) {
    for (const double middle : {1.0, 0.0}) {
      Tensor x = add(mul(numbers({n}, f64, 3), 1e-4), 1);
      x[50000] = middle;
      x = to(x, dtype).requires_grad_();
      const Tensor y = prod(x), slope = grad(y, std::span(&x, 1))[0], wide = to(x.detach(), f64);
      // Where one is 0 all gradients but its own are.
      Tensor others = clone(wide);
      others[50000] = 1;
      const Tensor rest = prod(others);
      Tensor expected = middle == 0 ? zeros({n}, {f64}) : div(rest, wide);
      expected[50000] = rest;
      // One rounding a factor.
      CHECK(distance(to(slope, f64), expected) < static_cast<double>(n) * (dtype == f64 ? 0x1p-53 : 0x1p-24));
    }
  }
}

TEST_CASE("ops: the edges of reductions are those of NumPy and PyTorch") {
  CHECK(sum(zeros({0})).item() == 0);
  CHECK(std::isnan(mean(zeros({0})).item()));
  CHECK_THROWS_AS(amax(zeros({0})), ShapeError);
  CHECK_THROWS_AS(argmax(zeros({2, 0}), 1), ShapeError);
  const Tensor x = Tensor::from<float>({1, std::nanf(""), 3, 3}, {4});
  CHECK(std::isnan(amax(x).item()));
  CHECK(std::isnan(amin(x).item()));
  CHECK(argmax(x, 0).item<std::int64_t>() == 1);
  CHECK(argmax(Tensor::from<float>({1, 3, 3}, {3}), 0).item<std::int64_t>() == 1);
  CHECK(topk(x, 2).indices.to_vector<std::int64_t>() == std::vector<std::int64_t>{1, 2});
  CHECK(sum(full({300}, 1, {u8})).item() == 300);
  CHECK(sum(full({300}, 1, {boolean})).item() == 300);
  CHECK(std::isnan(cross_entropy(zeros({2, 3}), full({2}, -100, {i64})).item()));
  CHECK(cross_entropy(zeros({2, 3}), full({2}, -100, {i64}), {Reduction::sum}).item() == 0);
  const Tensor two[] = {x, x};
  CHECK(grad(sum(amax(Tensor::from<float>({2, 2}, {2}).requires_grad_())), {}).empty());
}

namespace {

/// Every number that e4m3 (4 bits of exponent, 3 of mantissa) or e5m2 can hold.
std::vector<double> numbers_of_eight_bits(int exponents, int mantissas, double largest) {
  const int bias = (1 << (exponents - 1)) - 1;
  std::vector<double> all;
  for (int e = 0; e < 1 << exponents; ++e)
    for (int m = 0; m < 1 << mantissas; ++m) {
      const double fraction = std::ldexp(m, -mantissas);
      const double value = e == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, e - bias);
      if (value <= largest) all.push_back(value);
    }
  return all;
}

/// The nearest of `list` to each value, after scaling the largest magnitude to the list's, and back.
std::vector<double> nearest(const Tensor& x, const std::vector<double>& list) {
  std::vector<double> values = doubles(x);
  double largest = 0;
  for (const double v : values) largest = std::max(largest, std::abs(v));
  if (largest == 0) return values;
  const auto scale = static_cast<float>(list.back() / largest);
  for (double& v : values) {
    const double scaled = static_cast<float>(v) * scale;
    double best = 0;
    for (const double candidate : list)
      if (std::abs(std::abs(scaled) - candidate) < std::abs(std::abs(scaled) - best)) best = candidate;
    v = std::copysign(best, scaled) * largest / list.back();
  }
  return values;
}

}  // namespace

TEST_CASE("ops: linear_fp8 multiplies the nearest numbers of 8 bits, in its gradient too") {
  const std::vector<double> e4m3 = numbers_of_eight_bits(4, 3, 448),
                            e5m2 = numbers_of_eight_bits(5, 2, 57344);
  for (const DType dtype : {f32, bf16, f16, f64})
    for (const double size : {1.0, 1e-4, 300.0, 0.0}) {
      INFO(name_of(dtype) << " of size " << size);
      const Tensor x = mul(numbers({2, 5, 7}, dtype, 1), size).requires_grad_(),
                   w = numbers({3, 7}, dtype, 2).requires_grad_(),
                   b = numbers({3}, dtype, 3).requires_grad_();
      const Tensor y = linear_fp8(x, w, b), up = numbers({2, 5, 3}, dtype, 4);
      const Tensor in[] = {x, w, b};
      const std::vector<Tensor> g = grad(y, in, up);
      const auto rounded = [](const Tensor& t, const std::vector<double>& list) {
        return Tensor::from(nearest(t, list), t.shape());
      };
      const Tensor x8 = reshape(rounded(x, e4m3), {10, 7}), w8 = rounded(w, e4m3),
                   up8 = reshape(rounded(up, e5m2), {10, 3});
      const auto near = [&](const Tensor& got, const Tensor& expected) {
        const double rounding = dtype == bf16 ? 1e-2 : dtype == f16 ? 1e-3 : 1e-5;
        const double scale = std::max(1e-3, order_free_norm(std::span(&expected, 1)).item());
        CHECK(distance(to(reshape(got, expected.shape()), f64), expected) <= rounding * scale);
        CHECK(got.dtype() == dtype);
      };
      near(y, add(matmul(x8, transpose(w8, 0, 1)), to(b.detach(), f64)));
      near(g[0], matmul(up8, w8));
      near(g[1], matmul(transpose(up8, 0, 1), x8));
      CHECK(same_bits(g[2], sum(up, {0, 1})));
      CHECK(one_line_about(message_of<NotImplementedError>(
                               [&] { grad(sum(linear_fp8(x, w)), in, {}, {.create_graph = true}); }),
                           "linear_fp8"));
    }
}

TEST_CASE("ops: linear_fp8 keeps zeros among the tiniest numbers, in its gradient too") {
  for (const EightScales scales : {EightScales::of_tensors, EightScales::of_rows})
    for (const double size : {1e-30, 1e-35, 1e-37, 1e-40}) {
      INFO("size " << size);
      const auto matrix = [](Shape shape, std::uint64_t seed, double by) {
        const Tensor t = mul(numbers(shape, bf16, seed), by);
        fill_(slice(t, 1, 0, shape[1], 3), 0);
        fill_(select(t, 0, 1), 0);
        return t;
      };
      const Tensor x = matrix({6, 16}, 1, size).requires_grad_(), w = matrix({5, 16}, 2, 1).requires_grad_(),
                   in[] = {x, w};
      const Tensor y = linear_fp8(x, w, {}, scales), gy = matrix({6, 5}, 3, size);
      std::vector<Tensor> made = grad(y, in, gy);
      made.push_back(y.detach());
      for (const Tensor& t : made) {
        CHECK(all(isfinite(t)).item() == 1);
        CHECK(amax(abs(select(t, 0, 1))).item() == 0);
      }
      if (size < 1e-37) continue;  // below, bf16 itself has few digits
      const Tensor exact = linear(to(x.detach(), f64), to(w.detach(), f64));
      CHECK(amax(abs(sub(to(y.detach(), f64), exact))).item() <= 0.1 * amax(abs(exact)).item());
    }
}

TEST_CASE("ops: the sign of zero: abs, tanh, and the first zero that amax and amin meet") {
  for (const DType dtype : {f32, f64, bf16, f16}) {
    INFO(name_of(dtype));
    for (const std::int64_t n : {1, 5, 16, 31, 1025}) {
      const Tensor minus = full({n}, -0.0, {dtype}), plus = zeros({n}, {dtype});
      CHECK(same_bits(abs(minus), plus));
      CHECK(same_bits(tanh(minus), minus));
      CHECK(same_bits(tanh(plus), plus));
      CHECK(same_bits(abs(reciprocal(minus)), reciprocal(plus)));
      for (const bool first_is_minus : {false, true}) {
        const Tensor mixed = clone(first_is_minus ? plus : minus);
        fill_(slice(mixed, 0, 0, 1), first_is_minus ? -0.0 : 0.0);
        const Tensor first = select(mixed, 0, 0);
        CHECK(same_bits(amax(mixed), first));
        CHECK(same_bits(amin(mixed), first));
        const Tensor columns = contiguous(expand(unsqueeze(mixed, 1), {n, 20}));
        CHECK(same_bits(amax(columns, {0}), clone(expand(first, {20}))));
        CHECK(same_bits(amin(columns, {0}), clone(expand(first, {20}))));
      }
    }
  }
}

TEST_CASE("ops: what max, min and sort give of a 0-d tensor is memory of its own") {
  for (const DType dtype : all_dtypes) {
    const Tensor x = Tensor::scalar(1, {dtype}), before = clone(x);
    for (const Tensor& values : {max(x, 0).values, min(x, 0).values, sort(x).values}) {
      CHECK(same_bits(values, before));
      fill_(values, 0);
      CHECK(same_bits(x, before));
    }
  }
}

TEST_CASE("ops: linear_fp8 scales by rows what its products have as rows") {
  // All numbers of a row, or of a column, are of a size; its neighbours' are so far apart that one scale for
  // all would round the small ones to 0.
  const auto apart = [](Shape shape, DType dtype, std::uint64_t seed, int axis) {
    std::vector<double> sizes;
    for (std::int64_t i = 0; i < shape[axis]; ++i)
      sizes.push_back(std::ldexp(1, static_cast<int>(i % 3) * -9));
    const Shape down = axis == 0 ? Shape{shape[0], 1} : Shape{1, shape[1]};
    return mul(clamp(numbers(shape, dtype, seed), 0.5, 2), to(Tensor::from(sizes, down), dtype));
  };
  const auto near = [](const Tensor& got, const Tensor& expected) {
    const Tensor off = abs(sub(to(got, f64), to(expected, f64))), size = abs(to(expected, f64));
    CHECK(amax(sub(off, mul(size, 0.15))).item() <= 0);  // 4 bits of either factor
  };
  for (const DType dtype : {f32, bf16, f64}) {
    INFO(name_of(dtype));
    const Tensor up = apart({10, 3}, dtype, 1, 0), turned_up = apart({10, 3}, dtype, 2, 1);
    Tensor x = apart({10, 7}, dtype, 3, 0), w = apart({3, 7}, dtype, 4, 0);
    near(linear_fp8(x, w, {}, EightScales::of_rows), linear(x, w));
    x = apart({10, 7}, dtype, 5, 1).requires_grad_();
    w = apart({3, 7}, dtype, 6, 1).requires_grad_();
    const Tensor in[] = {x, w};
    const auto gradients = [&](const Tensor& gy) {
      return grad(linear_fp8(x, w, {}, EightScales::of_rows), in, gy);
    };
    near(gradients(up)[0], matmul(up, w.detach()));
    near(gradients(turned_up)[1], matmul(transpose(turned_up, 0, 1), x.detach()));
  }
}

TEST_CASE("ops: a causal query sees its past alone") {
  Tensor x = numbers({1, 6, 12}, f32);
  const Tensor before = self_attention(x, 2, {.causal = true});
  fill_(narrow(x, 1, 4, 2), 9);
  const Tensor after = self_attention(x, 2, {.causal = true});
  CHECK(same_bits(narrow(before, 1, 0, 4), narrow(after, 1, 0, 4)));
  CHECK_FALSE(same_bits(before, after));
}

TEST_CASE("ops: integers are multiplied exactly, modulo the size of their dtype, in every layout") {
  const std::vector<std::pair<Shape, Shape>> shapes = {
      {{3, 4}, {4, 5}},       {{1, 70}, {70, 1}},       {{65, 33}, {33, 130}},
      {{2, 0}, {0, 3}},       {{0, 2}, {2, 3}},         {{4}, {4}},
      {{4}, {4, 2}},          {{2, 3, 4}, {4}},         {{2, 3, 4}, {4, 2}},
      {{5, 2, 3}, {5, 3, 4}}, {{2, 1, 3, 4}, {5, 4, 2}}};
  for (const DType dtype : {i64, i32, u8})
    for (const auto& [left, right] : shapes) {
      INFO(name_of(dtype) << " " << to_string(left) << " times " << to_string(right));
      // Products beyond the range of i32 and u8; the expected sums of them are within i64.
      const double most = dtype == u8 ? 255 : 3e8;
      const Tensor a = numbers(left, dtype, 1, -most, most), b = numbers(right, dtype, 2, -most, most);
      const auto rows = [](const Tensor& x) { return x.rank() == 1 ? unsqueeze(x, 0) : x; };
      const auto columns = [](const Tensor& x) { return x.rank() == 1 ? unsqueeze(x, 1) : x; };
      const Tensor wide = mul(unsqueeze(to(rows(a), i64), -1), unsqueeze(to(columns(b), i64), -3));
      Tensor expected = to(bits_of(sum(wide, {-2}), dtype), dtype);
      if (a.rank() == 1) expected = squeeze(expected, -2);
      if (b.rank() == 1) expected = squeeze(expected, -1);
      for (const Lay one : all_lays)
        for (const Lay other : all_lays) CHECK(same_bits(matmul(laid(a, one), laid(b, other)), expected));
      if (a.rank() == 2 && b.rank() == 2) {
        const Tensor at = contiguous(transpose(a, 0, 1)), bt = contiguous(transpose(b, 0, 1));
        CHECK(same_bits(apply(ops::MatMul{true, true}, at, bt), expected));
        CHECK(same_bits(einsum("ik,kj->ij", {a, b}), expected));
      }
    }
  const Tensor x = numbers({3, 4}, i32), y = numbers({4, 5}, i32, 2);
  CHECK(same_bits(einsum("ik,kj->j", {x, y}), sum(matmul(to(x, i64), to(y, i64)), {0})));
  CHECK(one_line_about(message_of<DTypeError>([&] { einsum("ik,kj->ij", {x, to(y, i64)}); }), "einsum"));
  CHECK(one_line_about(message_of<DTypeError>([&] { einsum("ik,kj->ij", {to(x, i64), y}); }), "einsum"));
  for (const DType dtype : {u8, i32, i64, boolean}) {
    const Tensor many = full({2, 300}, 1, {dtype});
    CHECK(same_bits(einsum("ij->i", {many}), sum(many, {1})));
    CHECK(einsum("ij->ji", {many}).dtype() == dtype);
  }
  CHECK(one_line_about(message_of<DTypeError>([&] { matmul(x, to(y, i64)); }), "mat1 and mat2"));
  CHECK(one_line_about(message_of<DTypeError>([&] { matmul(to(x, boolean), to(y, boolean)); }), "matmul"));
  CHECK(one_line_about(message_of<DTypeError>([&] { linear(x, transpose(y, 0, 1)); }), "linear"));
}

TEST_CASE("ops: bad calls are refused in one line that names the op") {
  const Tensor x = numbers({3, 4}, f32), v = numbers({4}, f32), s = Tensor::scalar(1),
               index = numbers({2}, i64, 1, 0, 1), image = numbers({1, 2, 3, 3}, f32);
  const auto far = [](std::int64_t i) { return Tensor::from<std::int64_t>({i}, {1}); };
  struct Bad {
    const char* op;
    std::function<void()> call;
    enum { shape, value, dtype, state, device } kind;
  };
  const Bad list[] = {
      {"sum", [&] { sum(x, {2}); }, Bad::shape},
      {"mean", [&] { mean(x, {-3}); }, Bad::shape},
      {"mean", [&] { mean(index); }, Bad::dtype},
      {"argmax", [&] { argmax(x, 5); }, Bad::shape},
      {"softmax", [&] { softmax(x, 2); }, Bad::shape},
      {"matmul", [&] { matmul(x, x); }, Bad::shape},
      {"matmul", [&] { matmul(s, x); }, Bad::shape},
      {"matmul", [&] { matmul(numbers({2, 3, 4}, f32), numbers({3, 4, 2}, f32)); }, Bad::shape},
      {"linear", [&] { linear(x, numbers({5, 3}, f32)); }, Bad::shape},
      {"linear", [&] { linear(x, numbers({5, 4}, f32), v); }, Bad::shape},
      {"linear", [&] { linear(x, numbers({5, 4}, f32), s); }, Bad::shape},
      {"conv2d", [&] { conv2d(x, image); }, Bad::shape},
      {"conv2d", [&] { conv2d(image, x); }, Bad::shape},
      {"conv2d", [&] { conv2d(image, numbers({4, 3, 1, 1}, f32)); }, Bad::shape},
      {"conv2d", [&] { conv2d(image, numbers({4, 2, 4, 1}, f32)); }, Bad::shape},
      {"conv2d", [&] { conv2d(image, numbers({4, 2, 0, 1}, f32)); }, Bad::shape},
      {"conv2d", [&] { conv2d(image, image, v); }, Bad::shape},
      {"conv2d", [&] { conv2d(image, image, {}, {.stride = 0}); }, Bad::value},
      {"conv2d", [&] { conv2d(image, image, {}, {.padding = -1}); }, Bad::value},
      {"conv2d", [&] { conv2d(image, to(image, f16)); }, Bad::dtype},
      {"conv2d", [&] { conv2d(numbers({1, 1, 2, 2}, i64), numbers({1, 1, 2, 2}, i64)); }, Bad::dtype},
      {"conv2d", [&] { conv2d(image, image, numbers({1}, f64)); }, Bad::dtype},
      {"layer_norm", [&] { layer_norm(x, numbers({3}, f32), {}); }, Bad::shape},
      {"layer_norm", [&] { layer_norm(x, s, {}); }, Bad::shape},
      {"layer_norm", [&] { layer_norm(x, v, s); }, Bad::shape},
      {"layer_norm", [&] { layer_norm(s, {}, {}); }, Bad::shape},
      {"layer_norm", [&] { layer_norm(x, numbers({4}, f64), {}); }, Bad::dtype},
      {"rms_norm", [&] { rms_norm(x, numbers({3}, f32)); }, Bad::shape},
      {"rms_norm", [&] { rms_norm(s); }, Bad::shape},
      {"rms_norm", [&] { rms_norm(x, numbers({4}, f64)); }, Bad::dtype},
      {"rms_norm", [&] { rms_norm(numbers({4}, i32)); }, Bad::dtype},
      {"batch_norm", [&] { batch_norm(v, {}, {}, {}, {}, {.training = true}); }, Bad::shape},
      {"batch_norm", [&] { batch_norm(x, {}, {}, numbers({3}, f32), {}, {.training = true}); }, Bad::shape},
      {"batch_norm", [&] { batch_norm(x, {}, {}, v, s, {.training = true}); }, Bad::shape},
      {"batch_norm", [&] { batch_norm(x, s, s); }, Bad::shape},
      {"batch_norm", [&] { batch_norm(x, v, v, {}, {}, {.residual = v}); }, Bad::shape},
      {"batch_norm", [&] { batch_norm(x, v, v, {}, {}, {.residual = to(x, f64)}); }, Bad::dtype},
      {"batch_norm", [&] { batch_norm(x, v, numbers({3}, f32)); }, Bad::shape},
      {"batch_norm", [&] { batch_norm(x, {}, {}); }, Bad::value},
      {"batch_norm", [&] { batch_norm(x, v, {}); }, Bad::value},
      {"batch_norm", [&] { batch_norm(numbers({1, 4}, f32), v, v, {}, {}, {.training = true}); }, Bad::value},
      {"batch_norm", [&] { batch_norm(x, v, v, numbers({4}, f16)); }, Bad::dtype},
      {"batch_norm", [&] { batch_norm(x, v, v, v, numbers({4}, f64)); }, Bad::dtype},
      {"batch_norm", [&] { batch_norm(x, numbers({4}, i64), v); }, Bad::dtype},
      {"cross_entropy", [&] { cross_entropy(x, index); }, Bad::shape},
      {"cross_entropy", [&] { cross_entropy(x, numbers({3}, boolean)); }, Bad::dtype},
      {"cross_entropy", [&] { cross_entropy(numbers({1, 4}, f32), far(4)); }, Bad::value},
      {"cross_entropy", [&] { cross_entropy(numbers({1, 4}, f32), far(-1)); }, Bad::value},
      {"embedding", [&] { embedding(x, far(3)); }, Bad::value},
      {"embedding", [&] { embedding(x, far(-1)); }, Bad::value},
      {"embedding", [&] { embedding(x, v); }, Bad::dtype},
      {"embedding", [&] { embedding(s, index); }, Bad::shape},
      {"index_select", [&] { index_select(x, 0, numbers({1, 1}, i64)); }, Bad::shape},
      {"gather", [&] { gather(v, far(4)); }, Bad::value},
      {"gather", [&] { gather(x, index); }, Bad::shape},
      {"gather", [&] { gather(v, v); }, Bad::dtype},
      {"topk", [&] { topk(x, 5); }, Bad::shape},
      {"topk", [&] { topk(x, -1); }, Bad::shape},
      {"topk", [&] { topk(s, 1); }, Bad::shape},
      {"multinomial", [&] { multinomial(s); }, Bad::shape},
      {"cat", [&] { cat({}); }, Bad::value},
      {"cat", [&] { cat(std::vector{x, v}); }, Bad::shape},
      {"cat", [&] { cat(std::vector{x, numbers({3, 5}, f32)}); }, Bad::shape},
      {"cat", [&] { cat(std::vector{v, numbers({4}, f64)}); }, Bad::dtype},
      {"cat", [&] { cat(std::vector{x, x}, 2); }, Bad::shape},
      {"cat", [&] { cat(std::vector{s, s}); }, Bad::shape},
      {"where", [&] { where(x, x, x); }, Bad::dtype},
      {"where", [&] { where(greater(x, 0.0), x, numbers({3, 4}, f64)); }, Bad::dtype},
      {"copy_", [&] { copy_(v, x); }, Bad::shape},
      {"reshape", [&] { reshape(x, {5, -1}); }, Bad::shape},
      {"reshape", [&] { reshape(x, {-1, -1}); }, Bad::shape},
      {"reshape", [&] { reshape(x, {-2, -6}); }, Bad::shape},
      {"view", [&] { view(transpose(x, 0, 1), {12}); }, Bad::shape},
      {"flatten", [&] { flatten(x, 1, 0); }, Bad::shape},
      {"permute", [&] { permute(x, {0, 0}); }, Bad::shape},
      {"permute", [&] { permute(x, {0}); }, Bad::shape},
      {"squeeze", [&] { squeeze(x, 0); }, Bad::shape},
      {"expand", [&] { expand(x, {3, 5}); }, Bad::shape},
      {"expand", [&] { expand(x, {4}); }, Bad::shape},
      {"expand", [&] { expand(v, {-1, 4}); }, Bad::shape},
      {"slice", [&] { slice(x, 0, 0, 1, 0); }, Bad::value},
      {"slice", [&] { slice(s, 0, 0, 1); }, Bad::shape},
      {"narrow", [&] { narrow(x, 1, 2, 3); }, Bad::shape},
      {"narrow", [&] { narrow(x, 1, -1, 2); }, Bad::shape},
      {"select", [&] { select(x, 0, 3); }, Bad::shape},
      {"split", [&] { split(x, 0); }, Bad::value},
      {"split", [] { split(Tensor::scalar(1), 1); }, Bad::shape},
      {"size", [&] { (void)s.size(0); }, Bad::shape},
      {"size", [&] { (void)x.size(2); }, Bad::shape},
      {"attention", [&] { attention(x, x, x); }, Bad::shape},
      {"attention",
       [&] { attention(numbers({1, 1, 2, 4}, f32), numbers({1, 1, 2, 3}, f32), numbers({1, 1, 2, 3}, f32)); },
       Bad::shape},
      {"attention",
       [&] { attention(numbers({1, 1, 2, 4}, f32), numbers({1, 1, 2, 4}, f64), numbers({1, 1, 2, 4}, f32)); },
       Bad::dtype},
      {"self_attention", [&] { self_attention(numbers({1, 2, 8}, f32), 2); }, Bad::shape},
      {"self_attention", [&] { self_attention(numbers({1, 2, 6}, f32), 0); }, Bad::shape},
      {"dropout", [&] { dropout(index, 0.5); }, Bad::dtype},
      {"arange", [] { arange(0, 1, 0); }, Bad::value},
      {"arange", [] { arange(0, std::numeric_limits<double>::infinity()); }, Bad::value},
      {"randint", [] { randint(3, 3, {2}); }, Bad::value},
      {"uniform", [] { rand({2}, {i64}); }, Bad::dtype},
      {"uniform", [] { rand({2}, {}, 1, 0); }, Bad::value},
      {"normal", [] { randn({2}, {}, 0, -1); }, Bad::value},
      {"-1", [] { zeros({2, -1}); }, Bad::shape},
      {"square_sums", [&] { order_free_norm(std::vector{x, index}); }, Bad::dtype},
      {"largest_magnitude", [] { apply_many(ops::LargestMagnitude{}, {}); }, Bad::value},
      {"square_sums", [] { apply_many(ops::SquareSums{}, {}); }, Bad::value},
      {"norm_of_sums", [&] { apply(ops::NormOfSums{}, x); }, Bad::dtype},
      {"norm_of_sums", [&] { apply(ops::NormOfSums{}, zeros({3}, {i64})); }, Bad::shape},
      {"to", [] { to(empty({2}, {f32, Device::meta()}), Device::cpu()); }, Bad::device},
  };
  for (const Bad& bad : list) {
    std::string text = "(nothing was thrown)";
    int kind = -1;
    try {
      bad.call();
    } catch (const ShapeError& e) {
      kind = Bad::shape;
      text = e.what();
    } catch (const ValueError& e) {
      kind = Bad::value;
      text = e.what();
    } catch (const DTypeError& e) {
      kind = Bad::dtype;
      text = e.what();
    } catch (const DeviceError& e) {
      kind = Bad::device;
      text = e.what();
    }
    INFO(bad.op << " " << text);
    CHECK(kind == bad.kind);
    CHECK(one_line_about(text, bad.op));
  }
}

TEST_CASE("ops: copy_each_ writes what copies one by one write, and refuses other shapes and numbers") {
  std::vector<Tensor> into, from, alone;
  for (const DType to : all_dtypes)
    for (const DType of : all_dtypes)
      for (const Shape& shape : {Shape{0}, Shape{}, Shape{7, 33}}) {
        into.push_back(numbers(shape, to, 1));
        alone.push_back(clone(into.back()));
        from.push_back(shape.rank() == 2 ? transpose(numbers({33, 7}, of, 2), 0, 1) : numbers(shape, of, 2));
        copy_(alone.back(), from.back());
      }
  copy_each_(into, from);
  for (std::size_t i = 0; i < into.size(); ++i) CHECK(same_bits(into[i], alone[i]));
  copy_each_({}, {});
  const std::vector<Tensor> two = {zeros({2}), zeros({3})};
  CHECK(one_line_about(message_of<ValueError>([&] { copy_each_(two, std::span(two).first(1)); }),
                       "copy_each_"));
  CHECK(one_line_about(message_of<ShapeError>([&] { copy_each_(two, std::vector{ones({2}), ones({1})}); }),
                       "copy_each_"));
  const Tensor line = zeros({4}), parts[] = {slice(line, 0, 0, 3), slice(line, 0, 1, 4)};
  CHECK(one_line_about(
      message_of<StateError>([&] { copy_each_(std::span(parts).first(1), std::span(parts).last(1)); }),
      "copy_each_"));
}

TEST_CASE("ops: optimizer steps refuse what does not fit and write what they name") {
  const Tensor lr = Tensor::scalar(0.1, {f64}), step = zeros({}, {f64});
  const Tensor p = numbers({5}, f32), g = numbers({5}, f32, 2), m = zeros({5}), v = zeros({5});
  const std::vector<Tensor> adam = {lr, p, g, m, v, step}, sgd = {lr, p, g};
  const Tensor before = clone(p), g_before = clone(g);
  CHECK(apply_many(ops::AdamStep{}, adam).size() == 4);
  CHECK(step.item() == 1);
  CHECK_FALSE(same_bits(p, before));
  CHECK(same_bits(g, g_before));
  const Tensor again = clone(p);
  apply_many(ops::SgdStep{}, sgd);
  CHECK(distance(p, sub(again, mul(g, 0.1))) < 1e-6);
  CHECK(one_line_about(
      message_of<ShapeError>([&] { apply_many(ops::SgdStep{}, std::vector{lr, p, numbers({4}, f32)}); }),
      "sgd_step_"));
  CHECK(one_line_about(
      message_of<DTypeError>([&] { apply_many(ops::SgdStep{}, std::vector{lr, p, numbers({5}, f64)}); }),
      "sgd_step_"));
  CHECK(one_line_about(
      message_of<DTypeError>([&] { apply_many(ops::AdamStep{}, std::vector{g, p, g, m, v, step}); }),
      "adam_step_"));
  const ops::AdamStep skippable{.skippable = ops::Skippable::yes}, twins{.twins = ops::Twins::yes};
  const auto refused = [](const auto& op, const std::vector<Tensor>& in) {
    return one_line_about(message_of<Error>([&] { apply_many(op, in); }), op.name);
  };
  const Tensor flag = zeros({}), narrow = zeros({5}, {bf16});
  CHECK(refused(skippable, {lr}));
  CHECK(refused(ops::SgdStep{.skippable = ops::Skippable::yes}, {lr}));
  CHECK(refused(skippable, {lr, zeros({}, {f64}), p, g, m, v, step}));
  CHECK(refused(skippable, {lr, zeros({1}), p, g, m, v, step}));
  const ops::AdamStep clipped{.clipped = ops::Clipped::yes};
  CHECK(refused(clipped, {lr}));
  CHECK(refused(clipped, {lr, flag, p, g, m, v, step}));
  CHECK(refused(ops::SgdStep{.clipped = ops::Clipped::yes}, {lr, zeros({1}, {f64}), p, g}));
  CHECK(refused(ops::AdamStep{}, {lr, p, numbers({4}, bf16), m, v, step}));
  const ops::RmspropStep centered{.centered = true}, carries{.momentum = 0.5};
  CHECK(refused(ops::RmspropStep{}, {lr, p, g}));
  CHECK(refused(ops::RmspropStep{}, {lr, p, g, zeros({4})}));
  for (const ops::RmspropStep& op : {centered, carries}) {
    CHECK(refused(op, {lr, p, g, v}));
    CHECK(refused(op, {lr, p, g, v, zeros({4})}));
    CHECK(refused(op, {lr, p, g, v, zeros({5}, {bf16})}));
  }
  CHECK(refused(twins, {lr, p, g, m, v, step}));
  CHECK(refused(twins, {lr, p, g, m, v, step, zeros({5})}));
  CHECK(refused(twins, {lr, p, g, m, v, step, zeros({4}, {bf16})}));
  CHECK(apply_many(skippable, std::vector{lr, flag, p, g, m, v, step}).size() == 4);
  CHECK(apply_many(twins, std::vector{lr, p, to(g, f16), m, v, step, narrow}).size() == 5);
  CHECK(same_bits(narrow, to(p, bf16)));
  const std::vector<Tensor> clip = {order_free_norm(std::span(&g, 1)), g};
  apply_many(ops::ClipScale{1e-3}, clip);
  CHECK(std::abs(order_free_norm(std::span(&g, 1)).item() - 1e-3) < 1e-5);
}

TEST_CASE("ops: every op of the library is in a list, and every op of the lists met this harness") {
  std::set<std::string> listed{"where"};
  for (const ElementwiseListing& entry : elementwise_listing()) listed.emplace(entry.op->name());
  std::set<std::string> structural;
  ops::for_each_structural([&]<class O>() { structural.emplace(O::name); });
  listed.insert(structural.begin(), structural.end());

  const std::regex declared(R"re(static constexpr std::string_view name = "([a-z0-9_]+)")re");
  std::size_t files = 0;
  for (const auto& file : std::filesystem::directory_iterator(std::string(source_root) + "/runtime/ops")) {
    if (file.path().extension() != ".h") continue;
    ++files;
    std::ifstream in(file.path());
    for (std::string line; std::getline(in, line);) {
      std::smatch name;
      if (!std::regex_search(line, name, declared)) continue;
      INFO(file.path().filename().string() << ": " << name[1].str());
      CHECK(listed.contains(name[1].str()));
    }
  }
  CHECK(files > 50);

  Heard heard;
  {
    const Listening scope(heard);
    for (const Case& c : cases()) {
      const std::vector<Tensor> in = draw(c, f32, small_shapes(c));
      run(c, in);
      if (c.gradients) gradients(c, in, Lay::dense);
    }
    full({1}, 1), arange(0, 1), rand({1}), randn({1}), randint(0, 2, {1}), randperm(1);
    const Tensor lr = Tensor::scalar(0.1, {f64}), p = zeros({2}), norm = zeros({}, {f64});
    copy_each_(std::vector{p}, std::vector{ones({2})});
    sherd::apply(ops::Places{2}, Tensor::from(std::vector<bool>{true, false, true}, {3}));
    apply_many(ops::SgdStep{}, std::vector{lr, p, p});
    apply_many(ops::AdamStep{}, std::vector{lr, p, zeros({2}), zeros({2}), zeros({2}), norm});
    apply_many(ops::RmspropStep{}, std::vector{lr, p, zeros({2}), zeros({2})});
    apply_many(ops::LionStep{}, std::vector{lr, p, zeros({2}), zeros({2})});
    apply_many(ops::AdagradStep{}, std::vector{lr, p, zeros({2}), zeros({2}), norm});
    apply_many(ops::ClipScale{}, std::vector{norm, p});
    Tensor weight = zeros({3, 2});
    grad(sum(linear_fp8(ones({2}), weight.requires_grad_())), std::span(&weight, 1));
  }
  for (const std::string& name : structural) {
    INFO(name);
    CHECK(heard.names.contains(name));
  }
}

TEST_CASE("ops: the mean of equal numbers is that number, and normalised they are zeros") {
  for (const DType dtype : {f16, bf16, f32, f64})
    for (std::int64_t n = 1; n <= 400; n += n < 60 ? 1 : 17)
      for (const double value : {1.0, 1000.0, 123456.7}) {
        if (dtype == f16 && value > 65504) continue;
        INFO(name_of(dtype) << " " << n << " times " << value);
        const Tensor x = full({2, n}, value, {dtype});
        if (value != 123456.7)  // sums of the others are exact
          CHECK(same_bits(mean(x, {1}), full({2}, value, {dtype})));
        CHECK(same_bits(abs(layer_norm(x, {}, {})), zeros({2, n}, {dtype})));
      }
}

TEST_CASE("ops: the gradient of an extreme is shared by all that have it, by more than f16 can count too") {
  for (const DType dtype : {f16, bf16, f32}) {
    const Tensor x = zeros({70000}, {dtype}).requires_grad_();
    amax(x).backward();
    CHECK(std::abs(doubles(x.grad())[69999] * 70000 - 1) < 0.01);
  }
}

TEST_CASE("ops: integers drawn as floats stay below their bound") {
  for (const auto& [dtype, counted] : {std::pair{bf16, 256}, std::pair{f16, 2048}, std::pair{f32, 1 << 24}}) {
    INFO(name_of(dtype));
    CHECK(amax(to(randint(0, counted, {50000}, {dtype}), f64)).item() < counted);
    CHECK(one_line_about(message_of<DTypeError>([&] { randint(0, counted + 2, {1}, {dtype}); }), "counts"));
    CHECK_THROWS_AS(randint(-counted - 1, 0, {1}, {dtype}), DTypeError);
  }
}

TEST_CASE("ops: what moves or picks elements has its reference's bits, whatever the sizes and the values",
          "[one thread]") {
  const auto meets_reference = [](const auto& op, const Tensor& x) {
    const Tensors got = apply_many(op, std::span(&x, 1)), expected = op.reference(std::span(&x, 1));
    for (std::size_t i = 0; i < got.size(); ++i) CHECK(same_bits(got[i], expected[i]));
  };
  for (const DType dtype : all_dtypes)
    for (const std::int64_t n : {1, 5, 33, 70})
      for (const Lay lay : {Lay::dense, Lay::holes, Lay::permuted}) {
        INFO(name_of(dtype) << " " << n << " " << to_string(lay));
        const bool floats = is_floating(dtype);
        const auto drawn = [&](const Shape& shape) {
          return laid(floats ? with_specials(shape, dtype) : numbers(shape, dtype), lay);
        };
        for (Mask axes = 0; axes < 8; ++axes) meets_reference(ops::Flip{axes}, drawn({2, n, n + 2}));
        for (const std::int64_t offset : {-n - 1, std::int64_t{-1}, n / 2, n + 3})
          for (const bool lower : {false, true})
            meets_reference(ops::Triangle{offset, lower}, drawn({2, n, n + 2}));
        if (!floats) continue;
        for (const std::int64_t kernel : {1, 2, 3, 4})
          for (const std::int64_t stride : {1, 2, 5})
            for (std::int64_t padding = 0; padding <= kernel / 2 && kernel <= n + 2 * padding; ++padding)
              for (const std::int64_t width : {kernel, kernel + 2})
                meets_reference(ops::MaxPool2d{{{kernel, stride, padding}, {width, 6 - stride, width / 2}}},
                                drawn({1, 2, n, n + 2}));
      }
  // Ties: the first stays, and a pixel of -inf is before what pads it.
  for (const double value : {0.0, -std::numeric_limits<double>::infinity()})
    meets_reference(ops::MaxPool2d{{{3, 2, 1}, {3, 2, 1}}}, full({1, 2, 5, 4}, value));
}

TEST_CASE("ops: products of every length, along each axis, wrap as integers and are near as floats") {
  for (const DType dtype : {f32, f64, i32, i64, boolean})
    for (const Shape& shape :
         {Shape{1, 1, 3}, Shape{5, 3, 2}, Shape{2, 17, 33}, Shape{2, 4, 1500}, Shape{1, 33, 1100},
          Shape{2, 3, 1025}, Shape{2, 5, 2049}, Shape{2, 40001, 1}}) {
      const Tensor x = numbers(shape, dtype, 1, is_floating(dtype) ? 0.99 : 3, is_floating(dtype) ? 1.01 : 7);
      for (Mask axes = 1; axes < 8; ++axes) {
        INFO(name_of(dtype) << " " << to_string(shape) << " " << axes);
        const ops::Prod op{{axes}};
        const Tensor got = apply(op, x), expected = op.reference(std::span(&x, 1))[0];
        if (is_floating(dtype))
          CHECK(distance(got, expected) < (dtype == f32 ? 1e-5 : 1e-13));
        else
          CHECK(same_bits(got, expected));
      }
    }
}
