// Every kernel of ours on little data: what tools/gpu_check runs once more under compute-sanitizer, where
// each launch takes many times as long. Values are other tests' matter; these repeat to the bit.
#include <span>

#include "nn/gpt.h"
#include "nn/optimizer.h"
#include "runtime/apply.h"
#include "runtime/ops/linear_gelu.h"
#include "tests/cuda/agree.h"
#include "tests/runtime/op_cases.h"

using namespace sherd;
using namespace sherd::test;

namespace {

void check_repeats(const std::function<std::vector<Tensor>()>& fn) {
  const std::vector<Tensor> first = fn(), second = fn();
  REQUIRE(first.size() == second.size());
  for (std::size_t i = 0; i < first.size(); ++i)
    if (first[i].defined()) CHECK(distance_in_ulps(first[i].detach(), second[i].detach()) == 0);
}

constexpr DType list_dtypes[] = {f32, bf16, i64};

void check_list_repeats(std::vector<Shape> (*shapes)(const Case&), std::span<const DType> dtypes) {
  for_each_case([&](const Case& c) {
    for (DType dtype : dtypes) {
      if (!c.dtypes.contains(dtype)) continue;
      INFO(name_of(dtype));
      std::vector<Tensor> in;
      for (const Tensor& x : draw(c, dtype, shapes(c))) in.push_back(on_gpu(x));
      check_repeats([&] { return run(c, in); });
      if (c.gradients && is_floating(dtype)) check_repeats([&] { return gradients(c, in, Lay::dense); });
    }
  });
}

}  // namespace

// racecheck takes a minute and a half for the list of large shapes, memcheck and synccheck five seconds.
TEST_CASE("cuda: every op of the list repeats to the bit, gradients too", "[sanitized]") {
  if (no_gpu()) return;
  check_list_repeats(large_shapes, list_dtypes);
}
// Apart, so that searches for races run beside each other.
TEST_CASE("cuda: every op of the list repeats to the bit on few elements, f32", "[sanitized][racechecked]") {
  if (no_gpu()) return;
  check_list_repeats(small_shapes, std::span(list_dtypes).subspan(0, 1));
}
TEST_CASE("cuda: every op of the list repeats to the bit on few elements, bf16", "[sanitized][racechecked]") {
  if (no_gpu()) return;
  check_list_repeats(small_shapes, std::span(list_dtypes).subspan(1, 1));
}
TEST_CASE("cuda: every op of the list repeats to the bit on few elements, i64", "[sanitized][racechecked]") {
  if (no_gpu()) return;
  check_list_repeats(small_shapes, std::span(list_dtypes).subspan(2, 1));
}

TEST_CASE("cuda: kernels of wide rows repeat to the bit, gradients too", "[sanitized][racechecked]") {
  if (no_gpu()) return;
  for (DType dtype : {f32, bf16}) {
    for (std::int64_t columns : {64, 1024, 1600}) {
      INFO(name_of(dtype) << " " << columns);
      Values values(21);
      const Tensor x = on_gpu(values({70, columns}, dtype)), w = on_gpu(values({columns}, dtype)),
                   index = on_gpu(values({300}, i64, 0, 69.9)), target = on_gpu(values({70}, i64, 0, 63.9));
      const auto repeats = [](std::vector<Tensor> in, const Function& fn) {
        check_repeats([&] { return values_and_gradients(in, fn); });
      };
      repeats({x}, [](auto t) { return softmax(t[0]); });
      repeats({x}, [](auto t) { return log_softmax(t[0]); });
      repeats({x, w, w}, [](auto t) { return layer_norm(t[0], t[1], t[2]); });
      repeats({x, w, w}, [](auto t) { return add(t[0], layer_norm(t[0], t[1], t[2])); });
      repeats({x, w}, [](auto t) { return rms_norm(t[0], t[1]); });
      repeats({x}, [&](auto t) { return cross_entropy(t[0], target); });
      repeats({x}, [&](auto t) { return cross_entropy_(clone(t[0]), target); });
      repeats({x}, [&](auto t) { return embedding(t[0], index); });
      repeats({x, w}, [](auto t) { return mul(t[0], t[1]); });
      check_repeats([&] {
        const Tensor both[] = {x, x};
        const Tensors sums = apply_many(ops::GeluGradSums{}, both);
        return std::vector<Tensor>{sums[0], sums[1], sum(x, {0}), order_free_norm(std::span(&x, 1))};
      });
    }
  }
}

namespace {

/// Steps of a Gpt with dropout: masks are ours then, so attention is too, and not cuDNN's.
void check_steps(DType dtype, nn::GptOptions config, std::int64_t batch) {
  INFO(name_of(dtype) << " " << config.width);
  config.dropout = 0.1;
  config.tensor = {dtype};
  const std::int64_t rows = batch * config.context;
  check_repeats([&] {
    manual_seed(11);
    nn::Gpt model(config);
    model.to(gpu);
    const nn::Masters masters = dtype == f32 ? nn::Masters::none : nn::Masters::in_f32;
    nn::AdamW optimizer(model.parameters(), {.lr = 1e-3, .masters = masters});
    const auto last = static_cast<double>(config.vocab) - 0.1;
    const Tensor tokens = on_gpu(Values(1)({batch, config.context}, i64, 0, last)),
                 wanted = on_gpu(Values(2)({rows}, i64, 0, last));
    std::vector<Tensor> losses;
    for (int step = 0; step < 2; ++step) {
      losses.push_back(cross_entropy(reshape(model(tokens), {rows, config.vocab}), wanted));
      losses.back().backward();
      nn::clip_grad_norm_(model.parameters(), 1.0);
      optimizer.step();
      optimizer.zero_grad();
    }
    return losses;
  });
}

}  // namespace

TEST_CASE("cuda: steps of a tiny Gpt with dropout repeat to the bit", "[sanitized]") {
  if (no_gpu()) return;
  for (DType dtype : {f32, bf16, f16})
    for (std::int64_t width : {64, 256})  // heads of 32 and of 128
      if (dtype == bf16 || width == 64)
        check_steps(dtype, {.layers = 1, .heads = 2, .width = width, .context = 72, .vocab = 64}, 2);
}

// racecheck ends in a fault of its own at a 16-bit product of cuBLASLt, instrumented or not.
TEST_CASE("cuda: steps of a Gpt so small that its products are kernels of ours repeat to the bit",
          "[racechecked]") {
  if (no_gpu()) return;
  for (DType dtype : {f32, bf16, f16})
    check_steps(dtype, {.layers = 2, .heads = 1, .width = 32, .context = 8, .vocab = 64}, 1);
}
