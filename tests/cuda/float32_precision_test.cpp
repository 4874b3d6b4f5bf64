// Products and convolutions of f32 in TF32: how far from f64's, and who follows the setting.
#include "runtime/float32_precision.h"

#include <cuda_runtime_api.h>

#include "autograd/autograd.h"
#include "autograd/capture/capture.h"
#include "autograd/recompute.h"
#include "nn/recurrent.h"
#include "runtime/context.h"
#include "runtime/cuda/conv_cudnn.h"
#include "runtime/cuda/rank.h"
#include "tests/cuda/agree.h"

using namespace sherd;
using namespace sherd::test;

namespace {

constexpr auto highest = Float32MatmulPrecision::highest, high = Float32MatmulPrecision::high;

/// A function that is linear in each of two tensors.
struct Bilinear {
  std::string name;
  Shape a, b;
  Function of;

  std::vector<Tensor> operator()(Float32MatmulPrecision precision, const std::vector<Tensor>& in) const {
    const Float32MatmulPrecisionScope scope(precision);
    return values_and_gradients(in, of);
  }
};

/// Each with more work than kernels of ours take, so that a library makes them.
std::vector<Bilinear> products() {
  const auto conv = [](Conv2dOptions options) {
    return [=](std::span<const Tensor> t) { return conv2d(t[0], t[1], {}, options); };
  };
  const auto plain = [](std::span<const Tensor> t) { return matmul(t[0], t[1]); };
  return {{"matmul", {192, 256}, {256, 320}, plain},
          {"matmul of odd sizes", {129, 257}, {257, 131}, plain},
          {"matmul, transposed",
           {256, 192},
           {256, 320},
           [](std::span<const Tensor> t) { return matmul(transpose(t[0], 0, 1), t[1]); }},
          {"matmul, batched", {6, 128, 96}, {6, 96, 64}, plain},
          {"linear", {4, 64, 256}, {192, 256}, [](std::span<const Tensor> t) { return linear(t[0], t[1]); }},
          {"conv2d 3x3", {2, 64, 28, 28}, {64, 64, 3, 3}, conv({.padding = 1})},
          {"conv2d 3x3 with strides", {3, 64, 33, 31}, {72, 64, 3, 3}, conv({.stride = 2, .padding = 1})},
          {"conv2d 1x1", {2, 64, 28, 28}, {128, 64, 1, 1}, conv({})},
          {"conv2d in groups", {2, 64, 28, 28}, {64, 16, 3, 3}, conv({.padding = 1, .groups = 4})},
          {"conv_transpose2d", {2, 64, 14, 14}, {64, 32, 4, 4}, [](std::span<const Tensor> t) {
             return conv_transpose2d(t[0], t[1], {}, {.stride = 2, .padding = 1});
           }}};
}

std::vector<Tensor> inputs_of(const Bilinear& f) {
  Values values(21);
  return {values(f.a, f32), values(f.b, f32)};
}
std::vector<Tensor> on_gpu(const std::vector<Tensor>& in) {
  std::vector<Tensor> moved;
  for (const Tensor& t : in) moved.push_back(sherd::test::on_gpu(t));
  return moved;
}
std::vector<Tensor> in_f64(const std::vector<Tensor>& in) {
  std::vector<Tensor> wide;
  for (const Tensor& t : in) wide.push_back(to(t, f64));
  return wide;
}

/// Of a result on the GPU from the exact one: the largest distance of an element and that of all, both as
/// parts of what the same sums of magnitudes give.
struct Errors {
  double largest = 0, norm = 0;
};
Errors errors(const Tensor& got, const Tensor& exact, const Tensor& magnitudes) {
  const Tensor off = abs(sub(to(to(got, Device::cpu()), f64), exact));
  return {amax(div(off, magnitudes)).item(), norm(off).item() / norm(magnitudes).item()};
}

/// The value and both gradients of `f`, whose upstream gradient `values_and_gradients` draws: of each the
/// exact one and the sums of magnitudes.
struct Exact {
  std::vector<Tensor> values, magnitudes;
};
Exact exact(const Bilinear& f, const std::vector<Tensor>& in) {
  std::vector<Tensor> leaves;
  for (const Tensor& t : in_f64(in)) leaves.push_back(t.detach().requires_grad_());
  const Tensor y = f.of(leaves), upstream = to(Values(77)(y.shape(), f32), f64);
  Exact made{{y.detach()}, {}};
  for (const Tensor& g : grad(y, leaves, upstream)) made.values.push_back(g);
  std::vector<Tensor> sizes;
  for (const Tensor& t : leaves) sizes.push_back(abs(t.detach()).requires_grad_());
  const Tensor size = f.of(sizes);
  made.magnitudes.push_back(size.detach());
  for (const Tensor& g : grad(size, sizes, abs(upstream))) made.magnitudes.push_back(g);
  return made;
}

bool same(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  bool all = a.size() == b.size();
  for (std::size_t i = 0; all && i < a.size(); ++i) all = distance_in_ulps(a[i], b[i]) == 0;
  return all;
}

bool has_tf32() {
  int major = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, gpu.index);
  return major >= 8;
}

}  // namespace

TEST_CASE("cuda: f32 products in TF32 lie as near as its bits say, and further than without it") {
  if (no_gpu() || skip_if(!has_tf32(), "no TF32 here")) return;
  for (const Bilinear& f : products()) {
    const std::vector<Tensor> in = inputs_of(f), there = on_gpu(in), full = f(highest, there),
                              fast = f(high, there);
    const Exact of = exact(f, in);
    REQUIRE(of.values.size() == 3);
    REQUIRE(fast.size() == 3);
    for (std::size_t i = 0; i < 3; ++i) {
      INFO(f.name << (i == 0 ? " value" : i == 1 ? " first gradient" : " second gradient"));
      const Errors at_most = errors(full[i], of.values[i], of.magnitudes[i]),
                   got = errors(fast[i], of.values[i], of.magnitudes[i]);
      CHECK(at_most.norm <= 0x1p-18);
      CHECK(at_most.largest <= 0x1p-15);
      CHECK(got.largest <= 0x1p-9 + 0x1p-15);  // tensor cores may cut both factors after 10 bits
      CHECK(got.norm <= 0x1p-10);
      // Convolutions depend on which kernels cuDNN has; a product always takes them.
      if (f.name == "matmul" || f.name == "linear") CHECK(got.norm > 10 * at_most.norm);
    }
  }
}

TEST_CASE("cuda: some convolution of f32 is made in TF32 where cuDNN is installed") {
  if (no_gpu() || skip_if(!has_tf32(), "no TF32 here")) return;
  if (skip_if(!cuda::state_of(gpu).cudnn_conv().is_there(), "no cuDNN here")) return;
  int others = 0;
  for (const Bilinear& f : products()) {
    if (!f.name.starts_with("conv2d 3x3")) continue;
    const std::vector<Tensor> there = on_gpu(inputs_of(f));
    others += !same(f(highest, there), f(high, there));
  }
  CHECK(others > 0);
}

TEST_CASE("cuda: each precision of f32 products repeats to the bit, in whatever order they come") {
  if (no_gpu()) return;
  for (const Bilinear& f : products()) {
    INFO(f.name);
    const std::vector<Tensor> there = on_gpu(inputs_of(f));
    const std::vector<Tensor> fast = f(high, there), full = f(highest, there);
    CHECK(same(f(high, there), fast));
    CHECK(same(f(highest, there), full));
    CHECK(same(values_and_gradients(there, f.of), full));  // as it is when nothing is said
    CHECK(same(f(high, there), fast));
  }
}

TEST_CASE("cuda: products of other dtypes do not follow the precision of f32's") {
  if (no_gpu()) return;
  for (const Bilinear& f : products())
    for (DType dtype : {f64, f16, bf16}) {
      INFO(f.name << " " << name_of(dtype));
      std::vector<Tensor> there;
      for (const Tensor& t : on_gpu(inputs_of(f))) there.push_back(to(t, dtype));
      CHECK(same(f(high, there), f(highest, there)));
    }
}

TEST_CASE("cuda: the products of recurrent layers follow the precision of f32's") {
  if (no_gpu() || skip_if(!has_tf32(), "no TF32 here")) return;
  manual_seed(5);
  nn::Lstm layer(64, 512);
  Values values(22);
  const Tensor x = values({4, 256, 64}, f32);
  const auto run = [&](Float32MatmulPrecision precision, const Tensor& in) {
    const Float32MatmulPrecisionScope scope(precision);
    const NoGrad guard;
    return layer(in).y;
  };
  const Tensor host = run(high, x);
  CHECK(distance_in_ulps(run(highest, x), host) == 0);
  layer.to(gpu);
  const Tensor moved = sherd::test::on_gpu(x), full = run(highest, moved), fast = run(high, moved);
  CHECK(relative_distance(full, host) <= 1e-5);
  CHECK(relative_distance(fast, host) <= 0x1p-9);
  CHECK(relative_distance(fast, host) > 4 * relative_distance(full, host));
  CHECK(distance_in_ulps(run(high, moved), fast) == 0);
}

TEST_CASE("cuda: a captured step replays products of f32 as it made them, whatever is set then") {
  if (no_gpu()) return;
  Values values(23);
  const Tensor a = sherd::test::on_gpu(values({192, 256}, f32)),
               w = sherd::test::on_gpu(values({256, 256}, f32)).requires_grad_(),
               image = sherd::test::on_gpu(values({2, 64, 28, 28}, f32)),
               kernel = sherd::test::on_gpu(values({64, 64, 3, 3}, f32));
  const Step step = [&](std::span<const Tensor> in) {
    const Tensor as_set = matmul(in[0], w.detach()), convolved = conv2d(image, kernel, {}, {.padding = 1});
    const Tensor y = recompute([&] {
      const Float32MatmulPrecisionScope scope(high);
      return mul(matmul(in[0], w), matmul(in[0], w));
    });
    const Float32MatmulPrecisionScope scope(highest);
    return std::vector{as_set, convolved, y.detach(), grad(sum(y), {w})[0], matmul(in[0], w.detach())};
  };
  const auto eager = [&](Float32MatmulPrecision precision) {
    const Float32MatmulPrecisionScope scope(precision);
    return step(std::span(&a, 1));
  };
  const std::vector<Tensor> full = eager(highest), fast = eager(high);
  CHECK(same({fast.begin() + 2, fast.end()}, {full.begin() + 2, full.end()}));
  for (const auto captured : {highest, high}) {
    Program program = [&] {
      const Float32MatmulPrecisionScope scope(captured);
      return capture(step, {a});
    }();
    for (const auto now : {highest, high, highest, high}) {
      const Float32MatmulPrecisionScope scope(now);
      CHECK(same(program.replay({a}), captured == high ? fast : full));
      CHECK(float32_matmul_precision() == now);
    }
    CHECK(program.is_device_graph());
  }
}
