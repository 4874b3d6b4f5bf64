// Small products with regions behind them as kernels on a GPU: to the bit what the ops give there one after
// the other.
#include <deque>

#include "runtime/cuda/kernels.h"
#include "runtime/cuda/nvrtc.h"
#include "runtime/cuda/region_kernels.h"
#include "runtime/cuda/region_source.h"
#include "tests/autograd/product_steps.h"
#include "tests/cuda/compare.h"

using namespace sherd;
using namespace sherd::test;

TEST_CASE("kernels of regions: NVRTC takes those behind products, without a GPU") {
  if (skip_if(!cuda::has_nvrtc(), "NVRTC is not installed")) return;
  cuda::add_kernels();
  const TakesAll takes(DeviceType::cpu);
  for (const DType dtype : {f32, f64, bf16, f16})
    for (const ProductStep& one : product_steps(dtype)) {
      const Program::Impl program = with_epilogues(one.step, one.in);
      INFO(one.name << "\n" << program.text());
      const ops::ProductRegion* const product = ops::product_region_of(*program.steps[0].op);
      REQUIRE(product != nullptr);
      const auto source = cuda::product_region_source(*product);
      REQUIRE(source.has_value());
      CHECK_NOTHROW(cuda::compile_source(cuda::region_headers() + source->text, "sm_90a"));
    }
}

TEST_CASE("cuda: products with regions behind them have the bits of the ops, as one graph too") {
  if (no_gpu() || skip_if(!cuda::has_nvrtc(), "NVRTC is not installed")) return;
  const NoGrad guard;
  struct Made {
    ProductStep step;
    Program::Impl program;
  };
  std::deque<Made> all;
  for (const DType dtype : {f32, f64, bf16, f16})
    for (ProductStep& one : product_steps(dtype)) {
      for (Tensor& t : one.in) t = on_gpu(t);
      all.push_back({one, with_epilogues(one.step, one.in)});
      INFO(one.name << "\n" << all.back().program.text());
      CHECK(products_with_regions(all.back().program) == 1);
      all.back().program.replay(one.in);  // one after the other, while kernels are compiled
    }
  CHECK(cuda::finish_region_kernels().failed == 0);
  for (Made& made : all) {
    INFO(made.step.name << "\n" << made.program.text());
    const std::vector<Tensor> got = made.program.replay(made.step.in),
                              expected = made.step.step(made.step.in);
    REQUIRE(got.size() == expected.size());
    for (std::size_t i = 0; i < got.size(); ++i) CHECK(same_bits(got[i], expected[i]));
    Program graph = capture(made.step.step, made.step.in, Executor::fused);
    for (int times = 0; times < 3; ++times) {
      const std::vector<Tensor> again = graph.replay(made.step.in);
      for (std::size_t i = 0; i < again.size(); ++i) CHECK(same_bits(again[i], expected[i]));
    }
    CHECK(graph.is_device_graph());
  }
}

TEST_CASE("cuda: products that are no small ones, or of batches, stay the library's") {
  if (no_gpu()) return;
  const NoGrad guard;
  for (const auto& [a, b] : {std::pair<Shape, Shape>{{256, 256}, {256, 256}}, {{4, 8, 8}, {4, 8, 8}}}) {
    const std::vector<Tensor> in{on_gpu(numbers(a, f32, 1)), on_gpu(numbers(b, f32, 2))};
    const Step step = [](std::span<const Tensor> x) { return std::vector<Tensor>{tanh(matmul(x[0], x[1]))}; };
    CHECK(products_with_regions(with_epilogues(step, in)) == 0);
  }
}

TEST_CASE("cuda: large products go on with ReLU, with the bits of both ops, and train so") {
  if (no_gpu()) return;
  const auto drawn = [](const Shape& shape, DType dtype) { return to(randn(shape, {f32, gpu}), dtype); };
  manual_seed(3);
  for (const DType dtype : {f32, bf16, f16})
    for (const auto& [m, n, k] : {std::tuple{256, 256, 256},
                                  {1000, 384, 72},
                                  {2048, 2048, 1536},
                                  {333, 130, 250},
                                  {4096, 1024, 1024}}) {
      INFO(name_of(dtype) << " " << m << " " << n << " " << k);
      Tensor x = drawn({m, k}, dtype);
      if (k != 1024) {  // what ReLU leaves, and what it rounds to a zero of either sign
        fill_(narrow(x, 0, 3, 1), std::numeric_limits<double>::quiet_NaN());
        fill_(narrow(x, 0, 5, 1), std::numeric_limits<double>::infinity());
        copy_(narrow(x, 0, 7, 1), mul(narrow(x, 0, 7, 1), dtype == f16 ? 0x1p-24 : 0x1p-130));
      }
      const std::vector<Tensor> in{x, drawn({n, k}, dtype), drawn({n}, dtype), drawn({m, n}, dtype),
                                   drawn({k, n}, dtype)};
      const std::pair<const char*, Step> steps[] = {
          {"linear", [](auto t) { return std::vector<Tensor>{relu(linear(t[0], t[1]))}; }},
          {"bias", [](auto t) { return std::vector<Tensor>{relu(linear(t[0], t[1], t[2]))}; }},
          {"residual",
           [](auto t) { return std::vector<Tensor>{relu(linear(t[0], t[1], t[2], t[3]))}; }},
          {"matmul", [](auto t) { return std::vector<Tensor>{relu(matmul(t[0], t[4]))}; }}};
      for (const auto& [name, step] : steps) {
        INFO(name);
        const NoGrad guard;
        const std::vector<Tensor> expected = step(in);
        Program::Impl program = with_epilogues(step, in);
        CHECK(products_with_regions(program) == 1);
        CHECK(same_bits(program.replay(in)[0], expected[0]));
        Program graph = capture(step, in, Executor::fused);
        for (int times = 0; times < 3; ++times) CHECK(same_bits(graph.replay(in)[0], expected[0]));
      }
    }
}
