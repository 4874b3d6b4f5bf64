// Captured steps as CUDA graphs: the same bits as the step itself, wherever the inputs lie.
#include <cuda_runtime_api.h>

#include <cstring>
#include <limits>
#include <optional>
#include <thread>

#include "autograd/autograd.h"
#include "autograd/capture/capture.h"
#include "autograd/recompute.h"
#include "nn/gpt.h"
#include "nn/grad_scaler.h"
#include "nn/optimizer.h"
#include "runtime/context.h"
#include "runtime/cuda/graph_memory.h"
#include "runtime/cuda/rank.h"
#include "tests/cuda/compare.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;

namespace {

bool same_bits(const Tensor& a, const Tensor& b) {
  const Tensor x = contiguous(to(a.detach(), Device::cpu())), y = contiguous(to(b.detach(), Device::cpu()));
  return x.shape() == y.shape() && x.dtype() == y.dtype() &&
         std::memcmp(x.raw(), y.raw(), static_cast<std::size_t>(x.numel() * size_of(x.dtype()))) == 0;
}

enum class How { eager, graph };

struct Setting {
  DType dtype = f32;
  double dropout = 0;
};

/// Losses of `steps` steps on batches of their own, then the parameters.
std::vector<Tensor> train(const Setting& s, How how) {
  manual_seed(11);
  nn::Gpt model({.layers = 2, .heads = 2, .width = 64, .context = 40, .vocab = 65, .dropout = s.dropout});
  model.to(s.dtype);
  model.to(gpu);
  nn::AdamW optimizer(model.parameters(), {.lr = 3e-3, .eps = 1e-4});
  const Step step = [&](std::span<const Tensor> batch) {
    const Tensor loss = cross_entropy(reshape(model(batch[0]), {120, 65}), batch[1]);
    loss.backward();
    const Tensor norm = nn::clip_grad_norm_(model.parameters(), 1.0);
    optimizer.step();
    optimizer.zero_grad();
    return std::vector{loss, norm};
  };
  std::vector<Tensor> results;
  std::optional<Program> program;
  for (unsigned i = 0; i < 8; ++i) {
    const std::vector<Tensor> batch{to(Values(i)({3, 40}, i64, 0, 64.9), gpu),
                                    to(Values(100 + i)({120}, i64, 0, 64.9), gpu)};
    optimizer.set_lr(3e-3 / (1 + i));
    if (how == How::eager || i == 0)
      results.push_back(step(batch)[0]);
    else if (!program)
      results.push_back((program = capture(step, batch))->outputs()[0]);
    else
      results.push_back(program->replay(batch)[0]);
  }
  if (how == How::graph) CHECK(program->is_device_graph());
  for (const nn::Parameter& p : model.parameters()) results.push_back(p.local());
  return results;
}

}  // namespace

TEST_CASE("cuda: a captured training step is one graph and gives the step's bits") {
  if (no_gpu()) return;
  for (const Setting& s :
       {Setting{}, Setting{.dropout = 0.1}, Setting{.dtype = bf16, .dropout = 0.1}, Setting{.dtype = f16}}) {
    INFO(name_of(s.dtype) << " dropout " << s.dropout);
    const std::vector<Tensor> eager = train(s, How::eager), graph = train(s, How::graph);
    for (std::size_t i = 0; i < eager.size(); ++i) {
      INFO("result " << i);
      CHECK(same_bits(eager[i], graph[i]));
    }
    CHECK_FALSE(same_bits(eager[0], eager[7]));
  }
}

TEST_CASE("cuda: a scaled step is one graph, skips included") {
  if (no_gpu()) return;
  const auto run = [](How how) {
    manual_seed(12);
    nn::Gpt model({.layers = 1, .heads = 2, .width = 32, .context = 40, .vocab = 65, .tensor = {bf16}});
    model.to(gpu);
    nn::AdamW optimizer(model.parameters(), {.lr = 3e-3, .masters = nn::Masters::in_f32});
    nn::GradScaler scaler({.init_scale = 256, .growth_interval = 2});
    const Tensor tokens = to(Values(1)({3, 40}, i64, 0, 64.9), gpu),
                 wanted = to(Values(2)({120}, i64, 0, 64.9), gpu);
    const Step step = [&](std::span<const Tensor> in) {
      const Tensor loss = mul(cross_entropy(reshape(model(tokens), {120, 65}), wanted), in[0]);
      scaler.scale(loss).backward();
      scaler.unscale_(optimizer);
      nn::clip_grad_norm_(model.parameters(), 1.0);
      const Tensor skipped = clone(scaler.step(optimizer));
      scaler.update();
      optimizer.zero_grad();
      return std::vector{skipped};
    };
    std::vector<Tensor> results;
    std::optional<Program> program;
    for (int i = 0; i < 8; ++i) {
      const Tensor factor = full({}, i % 3 == 2 ? std::numeric_limits<double>::infinity() : 1, {bf16, gpu});
      if (how == How::eager || i == 0)
        results.push_back(step(std::span(&factor, 1))[0]);
      else if (!program)
        results.push_back((program = capture(step, {factor}))->outputs()[0]);
      else
        results.push_back(program->replay({factor})[0]);
      CHECK((results.back().item() != 0) == (i % 3 == 2));
    }
    if (how == How::graph) CHECK(program->is_device_graph());
    results.push_back(scaler.scale_tensor());
    for (const nn::Parameter& p : model.parameters()) results.push_back(p.local());
    return results;
  };
  const std::vector<Tensor> eager = run(How::eager), graph = run(How::graph);
  for (std::size_t i = 0; i < eager.size(); ++i) {
    INFO("result " << i);
    CHECK(same_bits(eager[i], graph[i]));
  }
}

TEST_CASE("cuda: a graph takes inputs wherever they lie, and writes those that the step writes") {
  if (no_gpu()) return;
  const auto body = [](std::span<const Tensor> in) {
    add_(in[1], in[0]);
    return std::vector{mul(in[1], 2.0), sum(in[0])};
  };
  const auto inputs = [&](std::int64_t offset) {
    const Tensor whole = randn({40}, {f32, gpu});
    return std::vector{slice(whole, 0, offset, offset + 16), ones({16}, {f32, gpu})};
  };
  Program program = capture(body, inputs(0));
  for (const std::int64_t offset : {0, 16, 1, 3, 0, 8}) {
    INFO("offset " << offset);
    const std::vector<Tensor> given = inputs(offset), copy{clone(given[0]), clone(given[1])};
    const std::vector<Tensor> wanted = body(copy), got = program.replay(given);
    CHECK(program.is_device_graph());
    for (std::size_t i = 0; i < 2; ++i) CHECK(same_bits(wanted[i], got[i]));
    CHECK(same_bits(copy[1], given[1]));
    CHECK_FALSE(got[0].is(program.replay(inputs(0))[0]));
  }
}

TEST_CASE("cuda: random numbers of a graph are those that the step would draw now") {
  if (no_gpu()) return;
  const Tensor x = randn({2, 2, 70, 32}, {f32, gpu}).requires_grad_(), weights = ones({4, 6}, {f64, gpu});
  const std::function<Tensor()> bodies[] = {
      [] { return add(randn({500}, {f32, gpu}), rand({500}, {f32, gpu})); },
      [] { return randint(-9, 9, {17}, {i64, gpu}); },
      [] { return randperm(1000, {i64, gpu}); },
      [&] { return multinomial(weights); },
      [&] {
        return grad(sum(attention(dropout(x, 0.5), x, x, {.causal = true, .dropout = 0.3})),
                    std::span(&x, 1))[0];
      },
      [&] {
        const Tensor shared = narrow(x, 1, 0, 1), mask = rand({x.shape()[2]}, {f32, gpu}) > 0.3;
        return grad(sum(square(attention(x, shared, shared, {.dropout = 0.3, .mask = mask}))),
                    std::span(&x, 1))[0];
      },
      [&] { return grad(sum(recompute([&] { return square(dropout(x, 0.5)); })), std::span(&x, 1))[0]; },
  };
  for (const auto& body : bodies) {
    const auto run = [&](How how) {
      manual_seed(7);
      randn({3}, {f32, gpu});
      const Step step = [&](std::span<const Tensor>) { return std::vector{body().detach()}; };
      std::vector<Tensor> results;
      std::optional<Program> program;
      for (int i = 0; i < 4; ++i) {
        if (i == 2) manual_seed(8);
        if (how == How::eager)
          results.push_back(step({})[0]);
        else if (!program)
          results.push_back((program = capture(step, {}))->outputs()[0]);
        else
          results.push_back(program->replay({})[0]);
      }
      if (how == How::graph) CHECK(program->is_device_graph());
      results.push_back(randn({3}, {f32, gpu}));
      return results;
    };
    const std::vector<Tensor> eager = run(How::eager), graph = run(How::graph);
    for (std::size_t i = 0; i < eager.size(); ++i) CHECK(same_bits(eager[i], graph[i]));
    CHECK_FALSE(same_bits(eager[0], eager[1]));
  }
}

TEST_CASE("cuda: a step that no graph can hold replays op by op") {
  if (no_gpu()) return;
  const auto body = [](std::span<const Tensor> in) {
    return std::vector{to(mul(in[0], 2.0), Device::cpu())};
  };
  const Tensor x = randn({7}, {f32, gpu});
  Program program = capture(body, {x});
  for (int i = 0; i < 3; ++i) CHECK(same_bits(program.replay({x})[0], body(std::span(&x, 1))[0]));
  CHECK_FALSE(program.is_device_graph());
}

TEST_CASE("cuda: what a step brings from the host comes anew before its graph runs") {
  if (no_gpu()) return;
  Tensor rate = Tensor::scalar(2.0, {f64});
  const Tensor constant = Tensor::scalar(3.0);
  const auto body = [&](std::span<const Tensor> in) {
    const Tensor x = to(in[0], gpu), scaled = mul(x, to(to(rate, gpu), f32));
    return std::vector{add(scaled, to(constant, gpu)), mul(scaled, to(in[1], gpu))};
  };
  Program program = capture(body, {ones({3}), ones({3})});
  for (int i = 0; i < 4; ++i) {
    *rate.mutable_data<double>() = i;
    const std::vector<Tensor> given{randn({3}), randn({3})};
    const std::vector<Tensor> wanted = body(given), got = program.replay(given);
    for (std::size_t j = 0; j < 2; ++j) CHECK(same_bits(wanted[j], got[j]));
    CHECK(program.is_device_graph());
  }
}

TEST_CASE("cuda: bad values that a graph meets are told at the next wait") {
  if (no_gpu()) return;
  const Tensor table = randn({5, 3}, {f32, gpu});
  const auto index = [](std::int64_t i) {
    return to(Tensor::from(std::vector<std::int64_t>{i, 1}, {2}), gpu);
  };
  Program program =
      capture([&](std::span<const Tensor> in) { return std::vector{embedding(table, in[0])}; }, {index(0)});
  CHECK_NOTHROW(program.replay({index(4)})[0].to_vector<float>());
  CHECK_THAT(message_of<ValueError>([&] { program.replay({index(5)})[0].to_vector<float>(); }),
             ContainsSubstring("index 5"));
  CHECK(same_bits(program.replay({index(2)})[0], embedding(table, index(2))));
  CHECK(program.is_device_graph());
}

TEST_CASE("cuda: bad values are told with all digits") {
  if (no_gpu()) return;
  const Tensor table = randn({5, 3}, {f32, gpu});
  for (const std::int64_t bad : {std::numeric_limits<std::int64_t>::max(),
                                 std::numeric_limits<std::int64_t>::min(), (std::int64_t{1} << 53) + 1}) {
    const Tensor index = to(Tensor::from(std::vector<std::int64_t>{1, bad}, {2}), gpu);
    CHECK_THAT(message_of<ValueError>([&] { embedding(table, index).to_vector<float>(); }),
               ContainsSubstring(fmt::format("index {} at position 1", bad)));
  }
}

TEST_CASE("cuda: a program replayed on another thread uses nothing of the one that recorded its graph") {
  if (no_gpu()) return;
  const NoGrad guard;
  const Tensor table = randn({5, 3}, {f32, gpu}), a = randn({48, 1 << 15}, {bf16, gpu}),
               b = randn({1 << 15, 40}, {bf16, gpu});
  const auto index = [](std::int64_t i) {
    return to(Tensor::from(std::vector<std::int64_t>{i, 1}, {2}), gpu);
  };
  const auto body = [&](std::span<const Tensor> in) {
    return std::vector{embedding(table, in[0]), matmul(a, b)};
  };
  const auto make = [&] {
    std::optional<Program> program = capture(body, {index(0)});
    for (int i = 0; i < 2; ++i) program->replay({index(1)});
    CHECK(program->is_device_graph());
    return program;
  };
  const std::vector<Tensor> wanted = body(std::vector{index(2)});
  synchronize(gpu);
  for (const bool ended : {false, true}) {
    INFO("the thread that recorded has ended: " << ended);
    std::optional<Program> program;
    if (ended)
      std::thread([&] {
        const NoGrad here;
        program = make();
      }).join();
    else
      program = make();
    synchronize(gpu);
    std::thread([&] {
      const NoGrad here;
      for (int i = 0; i < 3; ++i) {
        const std::vector<Tensor> got = program->replay({index(2)});
        for (std::size_t k = 0; k < 2; ++k) CHECK(same_bits(got[k], wanted[k]));
      }
      CHECK(program->is_device_graph());
      CHECK_THAT(message_of<ValueError>([&] { program->replay({index(99)})[0].to_vector<float>(); }),
                 ContainsSubstring("index 99"));
      synchronize(gpu);
    }).join();
    CHECK_NOTHROW(synchronize(gpu));
  }
}

TEST_CASE("cuda: graphs of a rank share what their ops make on their way, and the last one gives it back") {
  if (no_gpu()) return;
  const NoGrad guard;
  const auto held = [] {
    const auto memory = cuda::state_of(gpu).known_graph_memory();
    return memory ? memory->bytes() : 0;
  };
  // bf16 heads of 40 go through f32 copies, which are made on the way.
  const Tensor x = ones({2, 8, 512, 40}, {bf16, gpu});
  const auto graph = [&] {
    auto program = std::make_unique<Program>(
        capture([&](std::span<const Tensor> in) { return std::vector{mul(amax(attention(x, x, x)), in[0])}; },
                {ones({}, {bf16, gpu})}));
    for (int i = 0; i < 2; ++i) CHECK(program->replay({full({}, 2, {bf16, gpu})})[0].item() == 2);
    CHECK(program->is_device_graph());
    return program;
  };
  REQUIRE(held() == 0);
  auto first = graph();
  const std::size_t once = held();
  CHECK(once >= 2 * 8 * 512 * 40 * sizeof(float));
  auto second = graph();
  CHECK(held() == once);
  first.reset();
  CHECK(held() == once);
  CHECK(second->replay({full({}, 3, {bf16, gpu})})[0].item() == 3);
  second.reset();
  CHECK(held() == 0);
}

TEST_CASE("cuda: a graph without memory is an OutOfMemoryError, and what the pools keep is there for it") {
  if (no_gpu()) return;
  const NoGrad guard;
  std::size_t free = 0, total = 0;
  cudaDeviceSynchronize();
  cudaMemGetInfo(&free, &total);
  // x is a part in 32 of the memory, and some eight times as much is made on the way.
  const auto rows = static_cast<std::int64_t>(free / 32 / (64 * 16 * 40 * 2));
  const Tensor x = ones({rows, 64, 16, 40}, {bf16, gpu});
  Program program =
      capture([&](std::span<const Tensor> in) { return std::vector{mul(amax(attention(x, x, x)), in[0])}; },
              {ones({}, {bf16, gpu})});
  const auto replay = [&] { return program.replay({full({}, 2, {bf16, gpu})})[0].item(); };
  std::vector<Tensor> ballast;
  try {
    for (;;) ballast.push_back(empty({std::int64_t{1} << 30}, {u8, gpu}));
  } catch (const OutOfMemoryError&) {
  }
  CHECK_THAT(message_of<OutOfMemoryError>(replay), ContainsSubstring("cuda:0: no memory for"));
  CHECK(sum(ones({1000}, {f32, gpu})).item() == 1000);
  ballast.clear();  // into the driver's pool, which another pool gets nothing of before it is trimmed
  CHECK(replay() == 2);
  CHECK(sum(ones({1000}, {f32, gpu})).item() == 1000);
}
