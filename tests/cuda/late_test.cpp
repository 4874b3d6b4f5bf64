// What the host reads and measures of a GPU without stopping it, and what is said when its memory is short.
#include <limits>
#include "nn/grad_scaler.h"
#include "nn/layers.h"
#include "runtime/context.h"
#include "runtime/late_value.h"
#include "tests/cuda/compare.h"
#include "tests/runtime/harness.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;

TEST_CASE("cuda: late values are what tensors held when they were made, whatever came later") {
  if (no_gpu()) return;
  Tensor x = full({}, 0, {f32, gpu});
  const Tensor weights = full({1024, 1024}, 1e-3, {f32, gpu});
  std::vector<LateValue> late;
  for (int i = 0; i < 20; ++i) {
    add_(x, 1);
    late.emplace_back(x);
    const Tensor busy = matmul(weights, weights);
  }
  for (int i = 0; i < 20; ++i) CHECK(late[static_cast<std::size_t>(i)].read() == i + 1);
}

TEST_CASE("cuda: marks are reached in order, and have times") {
  if (no_gpu()) return;
  Backend& cuda = backend(DeviceType::cuda);
  const Tensor weights = full({1024, 1024}, 1e-3, {f32, gpu});
  std::vector<std::unique_ptr<DeviceMark>> marks;
  for (int i = 0; i < 5; ++i) {
    marks.push_back(cuda.mark(gpu));
    const Tensor busy = matmul(weights, weights);
  }
  marks.back()->wait();
  for (std::size_t i = 0; i < marks.size(); ++i) {
    CHECK(marks[i]->reached());
    if (i > 0) CHECK(marks[i]->seconds_since(*marks[i - 1]) > 0);
  }
  CHECK(!cuda.product(gpu).empty());
}

TEST_CASE("cuda: too little memory is said with what is held, and the rank goes on") {
  if (no_gpu()) return;
  const Tensor weights = full({1 << 20}, 1, {f32, gpu});
  weights.storage().set_use(MemoryUse::parameters);
  const std::string message =
      message_of<OutOfMemoryError>([] { empty({std::int64_t{1} << 44}, {f32, gpu}); });
  CHECK_THAT(message, ContainsSubstring("cuda:0: no memory for 70368744177664 bytes") &&
                          ContainsSubstring("tensors of this rank hold") &&
                          ContainsSubstring("parameters 4.2 MB") && ContainsSubstring("pool keeps"));
  CHECK(sum(weights).item() == 1 << 20);
}

TEST_CASE("cuda: GradScaler skips the steps that it skips on the CPU, and scales as there") {
  if (no_gpu()) return;
  const auto trained = [](Device device) {
    manual_seed(1);
    nn::Linear net(6, 4);
    net.to(device);
    nn::Sgd sgd(net.parameters(), {.lr = 0.1, .momentum = 0.9});
    nn::GradScaler scaler({.init_scale = 64, .growth_interval = 2});
    std::vector<double> seen;
    for (unsigned step = 0; step < 12; ++step) {
      scaler.scale(mean(square(net(to(numbers({5, 6}, f32, step), device))))).backward();
      if (step % 4 == 3) fill_(narrow(net.bias.grad(), 0, 2, 1), std::numeric_limits<double>::infinity());
      seen.push_back(scaler.step(sgd).item());
      scaler.update();
      sgd.zero_grad();
      seen.push_back(scaler.scale_tensor().item());
    }
    CHECK(scaler.scale_tensor().device() == device);
    return std::pair(seen, to(net.weight.data(), Device::cpu()));
  };
  const auto [here, weight] = trained(Device::cpu());
  const auto [there, other] = trained(gpu);
  CHECK(here == there);
  CHECK(distance(other, weight) < 1e-5);
}
