// Small products and what is computed of each element of theirs, on any device.
#pragma once

#include "autograd/capture/passes/epilogues.h"
#include "autograd/capture/passes/fuse.h"
#include "runtime/apply.h"
#include "runtime/fused_product.h"
#include "runtime/ops/matmul.h"
#include "tests/autograd/fused_steps.h"

namespace sherd::test {

struct ProductStep {
  std::string name;
  Step step;
  std::vector<Tensor> in;
};

/// Of all kinds of products, sizes, and ways to go on.
inline std::vector<ProductStep> product_steps(DType dtype) {
  const auto drawn = [&](const Shape& shape, unsigned seed) { return numbers(shape, dtype, seed); };
  std::vector<ProductStep> all;
  const auto add_one = [&](const std::string& name, std::vector<Tensor> in, const auto& f) {
    all.push_back({fmt::format("{} of {}", name, name_of(dtype)),
                   [f](std::span<const Tensor> x) { return std::vector<Tensor>(f(x)); }, std::move(in)});
  };
  struct Size {
    std::int64_t m, n, k;
  };
  for (const auto& [m, n, k] : {Size{16, 64, 16}, Size{1, 1, 1}, Size{17, 33, 65}, Size{3, 150, 130}})
    for (const bool transpose_a : {false, true})
      for (const bool transpose_b : {false, true})
        add_one(fmt::format("({}, {}, {}), {}{}", m, n, k, transpose_a, transpose_b),
                {drawn(transpose_a ? Shape{k, m} : Shape{m, k}, 1),
                 drawn(transpose_b ? Shape{n, k} : Shape{k, n}, 2), drawn({m, n}, 3), drawn({n}, 4),
                 drawn({m, 1}, 5)},
                [=](std::span<const Tensor> x) {
                  const Tensor y = apply(ops::MatMul{transpose_a, transpose_b}, x[0], x[1]);
                  return std::vector<Tensor>{mul(silu(add(mul(y, x[2]), x[3])), x[4])};
                });
  add_one("linear, bias and ReLU", {drawn({16, 16}, 1), drawn({64, 16}, 2), drawn({64}, 3)},
          [](std::span<const Tensor> x) { return std::vector<Tensor>{relu(linear(x[0], x[1], x[2]))}; });
  add_one("linear of three axes, residual, several results",
          {drawn({2, 9, 20}, 1), drawn({40, 20}, 2), drawn({40}, 3), drawn({2, 9, 40}, 4)},
          [](std::span<const Tensor> x) {
            const Tensor y = tanh(add(linear(x[0], x[1], x[2]), x[3]));
            return std::vector<Tensor>{to(y, f32), mul(y, y), sign(y)};
          });
  return all;
}

/// The program of a step with regions and products in them; all kinds of products, whatever the device.
inline Program::Impl with_epilogues(const Step& step, const std::vector<Tensor>& in) {
  std::vector<Tensor> outputs;
  const NoGrad guard;
  return Program::Impl(epilogues(fuse(record(step, in, outputs))), {});
}

inline std::size_t products_with_regions(const Program::Impl& program) {
  std::size_t count = 0;
  for (const Program::Impl::Step& step : program.steps) count += ops::product_region_of(*step.op) ? 1 : 0;
  return count;
}

/// As long as it is there a device takes regions behind all products of two matrices.
class TakesAll {
 public:
  explicit TakesAll(DeviceType device) : device_(device) {
    ops::set_takes_region(device, [](const AnyOp& product, SpecSpan in, const ops::Region&) {
      return (product.name() == "matmul" && in[0].shape.rank() == 2) || product.name() == "linear";
    });
  }
  ~TakesAll() { ops::set_takes_region(device_, nullptr); }
  TakesAll(const TakesAll&) = delete;
  TakesAll& operator=(const TakesAll&) = delete;

 private:
  DeviceType device_;
};

}  // namespace sherd::test
