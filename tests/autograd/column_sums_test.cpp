// Sums of columns as members of fused regions: to the bit what `Sum` gives over all axes but the last.
#include "tests/autograd/column_sum_steps.h"

#include "tests/catch.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;

namespace {

bool cpu_sums(const Shape& shape, DType dtype) {
  return ops::sums_columns(shape.numel() / shape.back(), shape.back(), dtype, DeviceType::cpu);
}

}  // namespace

TEST_CASE("column sums: what a region makes is summed in it, with the bits of sum, in any dtype and shape") {
  const Shape shapes[] = {{1, 2},     {1, 33},    {3, 5},       {5, 64},       {64, 33},       {65, 200},
                          {67, 2000}, {600, 70},  {700, 300},   {1030, 3},     {523, 1000},    {70000, 2},
                          {2, 3, 40}, {9, 7, 65}, {5, 131, 96}, {2, 3, 4, 17}, {3, 5, 37, 128}};
  for (const DType dtype : {f64, f32, bf16, f16})
    for (const DType other : {f64, f32, bf16, f16})
      for (const Shape& shape : shapes) {
        if (other == f64 && dtype != f64 && shape.numel() > 30000) continue;
        INFO(name_of(dtype) << " by " << name_of(other) << ", " << shape);
        const Step step = sums_of_columns(other);
        const std::vector<Tensor> in{numbers(shape, dtype, 1), numbers(shape, dtype, 2)};
        Program::Impl program = fused(step, in);
        CHECK(column_sums(program) == (cpu_sums(shape, other) ? 3 : 0));
        check_bits(step, in, program);
      }
}

TEST_CASE("column sums: a region's bits are the same on any number of threads") {
  const Step step = sums_of_columns(f32);
  for (const Shape& shape : {Shape{600, 70}, Shape{3000, 33}, Shape{700, 1000}, Shape{9, 130, 200}}) {
    INFO(shape);
    const std::vector<Tensor> in{numbers(shape, f32, 1), numbers(shape, f32, 2)};
    CHECK(cpu_sums(shape, f32));
    for (int threads = 1; threads <= 4; ++threads) {
      const Threads scope(threads);
      check_bits(step, in);
    }
  }
}

TEST_CASE("column sums: of infinities, NaN, zeros of both signs and subnormals") {
  for (const DType dtype : {f64, f32, bf16, f16})
    for (const Shape& shape : {Shape{7, 9}, Shape{700, 300}}) {
      const Step step = [](std::span<const Tensor> in) {
        const Tensor x = mul(in[0], in[1]);
        return std::vector<Tensor>{sum(neg(x), {0}), mean(x, {0}), x};
      };
      check_bits(step, {with_specials(shape, dtype, 1), numbers({shape.back()}, dtype, 2)});
      check_bits(step, {full(shape, -0.0, {dtype}), ones({shape.back()}, {dtype})});
    }
}

TEST_CASE("column sums: few rows of a long run, which few threads could make, are no members") {
  CHECK(cpu_sums({512, 1024}, f32));
  CHECK(cpu_sums({8, 2048}, f32));
  CHECK_FALSE(cpu_sums({64, 1024}, f32));
  CHECK_FALSE(ops::sums_columns(512, 1024, f32, DeviceType::meta));
}

TEST_CASE("column sums: what reads one is outside its region, and what is of an input alone is no member") {
  const Step reads = [](std::span<const Tensor> in) {
    const Tensor x = mul(in[0], 2.0), s = sum(x, {0});
    return std::vector<Tensor>{add(mul(x, s), 1.0), s};
  };
  const std::vector<Tensor> in{numbers({33, 8}, f32, 1)};
  Program::Impl program = fused(reads, in);
  INFO(program.text());
  CHECK(column_sums_by_region(program) == std::vector<std::size_t>{1, 0});
  check_bits(reads, in, program);

  const Step of_one_row = [](std::span<const Tensor> given) {
    const Tensor x = mul(given[0], 2.0);
    return std::vector<Tensor>{add(x, sum(x, {0}, Keep::dims))};
  };
  check_bits(of_one_row, {numbers({1, 8}, f32, 1)});

  const Step writes = [](std::span<const Tensor> given) {
    const Tensor x = mul(given[0], 2.0), s = sum(x, {0});
    add_(s, 1.0);
    mul_(x, 3.0);
    return std::vector<Tensor>{s, x, sum(x, {0}, Keep::dims)};
  };
  check_bits(writes, in);

  const Step of_input = [](std::span<const Tensor> given) {
    return std::vector<Tensor>{mul(given[0], 2.0), sum(given[0], {0}),
                               sum(transpose(mul(given[0], 3.0), 0, 1), {0})};
  };
  CHECK(column_sums(fused(of_input, in)) == 0);
  check_bits(of_input, in);
}

TEST_CASE("column sums: what is written in place is summed before and after") {
  const Step step = [](std::span<const Tensor> in) {
    const Tensor x = mul(in[0], 0.5), before = sum(x, {0});
    add_(x, in[0]);
    const Tensor after = sum(x, {0});
    mul_(x, x);
    return std::vector<Tensor>{before, after, mean(x, {0}), exp(x)};
  };
  for (const DType dtype : {f32, bf16}) {
    const std::vector<Tensor> in{numbers({130, 9}, dtype, 1)};
    CHECK(column_sums(fused(step, in)) == 3);
    check_bits(step, in);
  }
}

TEST_CASE("column sums: those of a region are of one dtype and length, and few") {
  const Step unlike = [](std::span<const Tensor> in) {
    const Tensor x = mul(in[0], 0.5), wide = cat({x, x}, -1);
    return std::vector<Tensor>{sum(x, {0}), sum(to(x, bf16), {0}), sum(mul(wide, 2.0), {0}),
                               sum(exp(x), {0})};
  };
  const std::vector<Tensor> in{numbers({130, 9}, f32, 1)};
  CHECK(column_sums_by_region(fused(unlike, in)) == std::vector<std::size_t>{1, 1, 1});
  check_bits(unlike, in);
  const Step longer_first = [](std::span<const Tensor> given) {
    const Tensor x = mul(given[0], 0.5), wide = cat({x, exp(x)}, -1);
    return std::vector<Tensor>{sum(wide, {0}), mean(wide, {0}, Keep::dims), x};
  };
  CHECK(column_sums(fused(longer_first, in)) == 2);
  check_bits(longer_first, in);
  const Step many = [](std::span<const Tensor> given) {
    std::vector<Tensor> sums;
    for (int i = 0; i < 7; ++i) sums.push_back(sum(mul(given[0], i + 0.5), {0}));
    return sums;
  };
  CHECK(column_sums_by_region(fused(many, in))[0] == ops::most_column_sums);
  check_bits(many, in);
}

TEST_CASE("column sums: gradients of gains are made with those of a layer, and have eager's bits") {
  for (const DType dtype : {f32, bf16, f16})
    for (const Shape& shape : {Shape{600, 64}, Shape{3, 5, 33}, Shape{513, 1000}})
      for (const TrainedLayer& layer : trained_layers(shape, dtype, Device::cpu())) {
        INFO(layer.name << " of " << name_of(dtype) << ", " << shape);
        const std::vector<Tensor> expected = trained(layer, layer.step);
        const Compiled compiled = compile(layer.step, {.executor = Executor::fused});
        for (int call = 0; call < 3; ++call) {
          const std::vector<Tensor> got = trained(layer, compiled);
          REQUIRE(got.size() == expected.size());
          for (std::size_t i = 0; i < got.size(); ++i) CHECK(same_bits(got[i], expected[i]));
        }
        CHECK(compiled.stats().hits == 2);
        const std::string text = compiled.text(), backward = text.substr(text.find("backward"));
        INFO(text);
        const std::string axes = fmt::format("= sum[axes={}", shape.rank() == 2 ? 1 : 3);
        CHECK_THAT(backward, ContainsSubstring(axes));
        const std::size_t first = backward.find("fused[");
        CHECK(backward.find(axes, first) < backward.find(']', backward.find(axes, first)));
      }
}

TEST_CASE("column sums: random steps over many rows have their bits") {
  std::size_t sums = 0;
  for (unsigned seed = 0; seed < 80; ++seed) {
    INFO("step " << seed);
    const RandomRows step(seed, Device::cpu(), Rows::many);
    Program::Impl program = fused(step, step.inputs(0));
    INFO(program.text());
    sums += column_sums(program);
    check_bits(step, step.inputs(1), program);
  }
  CHECK(sums > 20);
}
