// A small Gpt learns on the GPU what it learns on the CPU.
#include <cmath>
#include <memory>

#include "nn/gpt.h"
#include "nn/optimizer.h"
#include "runtime/context.h"
#include "tests/cuda/compare.h"

using namespace sherd;
using namespace sherd::test;

namespace {

struct Setting {
  DType dtype = f32;
  double dropout = 0;
  std::int64_t width = 64, heads = 2;
};

/// f16 holds neither Adam's eps nor its squares, so it takes plain steps.
std::unique_ptr<nn::Optimizer> optimizer_for(const nn::Gpt& model, DType dtype) {
  if (dtype == f16)
    return std::make_unique<nn::Sgd>(model.parameters(), nn::SgdOptions{.lr = 0.5, .momentum = 0.5});
  return std::make_unique<nn::AdamW>(model.parameters(), nn::AdamWOptions{.lr = 3e-3, .weight_decay = 0.1});
}

/// Losses of 20 steps on one batch.
std::vector<double> train(Device device, const Setting& s) {
  manual_seed(11);
  nn::Gpt model(
      {.layers = 2, .heads = s.heads, .width = s.width, .context = 40, .vocab = 65, .dropout = s.dropout});
  model.to(s.dtype);
  model.to(device);
  const Tensor tokens = to(Values(1)({3, 40}, i64, 0, 64.9), device),
               wanted = to(Values(2)({120}, i64, 0, 64.9), device);
  const std::unique_ptr<nn::Optimizer> optimizer = optimizer_for(model, s.dtype);
  std::vector<double> losses;
  for (int step = 0; step < 20; ++step) {
    const Tensor loss = cross_entropy(reshape(model(tokens), {120, 65}), wanted);
    loss.backward();
    nn::clip_grad_norm_(model.parameters(), 1.0);
    optimizer->step();
    optimizer->zero_grad();
    losses.push_back(loss.item());
  }
  return losses;
}

}  // namespace

TEST_CASE("cuda: a small Gpt trains as on the CPU in f32, dropout included") {
  if (no_gpu()) return;
  for (const Setting& s : {Setting{}, Setting{.dropout = 0.1}, Setting{.width = 60, .heads = 3}}) {
    const std::vector<double> host = train(Device::cpu(), s), moved = train(gpu, s);
    INFO("dropout " << s.dropout << " width " << s.width);
    CHECK(host.back() < 0.8 * host.front());
    for (std::size_t i = 0; i < host.size(); ++i) {
      INFO("step " << i << ": " << host[i] << " and " << moved[i]);
      // Sums are taken in another order, and training magnifies what that rounds away.
      CHECK(std::abs(moved[i] - host[i]) <= 1e-4 * host[i]);
    }
    CHECK(train(gpu, s) == moved);
  }
}

TEST_CASE("cuda: a small Gpt trains in bf16 and f16, twice with the same bits") {
  if (no_gpu()) return;
  const std::vector<double> exact = train(Device::cpu(), {});
  for (DType dtype : {bf16, f16}) {
    for (double dropout : {0.0, 0.1}) {
      const Setting s{.dtype = dtype, .dropout = dropout};
      const std::vector<double> losses = train(gpu, s);
      INFO(name_of(dtype) << " dropout " << dropout << ": " << losses.front() << " to " << losses.back());
      CHECK(std::abs(losses.front() - exact.front()) <= 0.02 * exact.front());
      CHECK(losses.back() < 0.85 * losses.front());
      CHECK(train(gpu, s) == losses);
    }
  }
}
