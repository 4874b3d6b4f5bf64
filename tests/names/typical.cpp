// What programs write, beside all of the standard library's names and with every warning. It is compiled, by
// each compiler that is here, and not run: tests/nn/newcomer_test.cpp runs the like.
#include <sherd.h>

#include <algorithm>
#include <any>
#include <array>
#include <bitset>
#include <chrono>
#include <cmath>
#include <complex>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <ranges>
#include <span>
#include <stack>
#include <string>
#include <thread>
#include <valarray>
#include <variant>
#include <vector>

using namespace std;
using namespace sherd;

namespace {

struct Classifier final : nn::Layer<Classifier> {
  nn::Linear in{2, 8}, out{8, 4};
  nn::Dropout dropout{0.1};
  nn::Param scale{ones({4})};
  Tensor forward(const Tensor& x) const { return out(dropout(relu(in(x)))) * scale.tensor(); }
  void visit(auto&& on) {
    on("in", in);
    on("out", out);
    on("dropout", dropout);
    on("scale", scale);
  }
};

struct Softsign {
  static constexpr string_view name = "softsign";
  static constexpr int arity = 1;
  static constexpr DTypeSet dtypes = floating_dtypes;
  static constexpr Reads reads_a{.inputs = 1};
  template <class T>
  static constexpr T denominator(T x) {
    using math::where;
    return T(1) + where(x < T(0), T(-x), x);
  }
  template <class T>
  constexpr T operator()(T x) const {
    return x / denominator(x);
  }
  template <class T>
  constexpr T grad_a(T gy, T x, T) const {
    return gy / (denominator(x) * denominator(x));
  }
  bool operator==(const Softsign&) const = default;
};

Tensor computed(const Tensor& x, const Tensor& index) {
  const DefaultOptions scope({.dtype = f64});
  Tensor y = x * 2 + 1 - x / 3.0f;
  y += 1;
  y[0] = 3;
  y[{Slice{1, 3}, 0}] = 2;
  y[(y > 2) & ~(y == 3)] = 1.5;
  y = where(y < 1, 0,
            exp(log(abs(y) + 1)) + sqrt(square(y)) + pow(y, 2) + sin(x) + clamp(x, 0, 1) + floor(x));
  y = cat({y, flip(y, {0}), tril(y)}) + sum(y, {0, -1}, Keep::dims) + mean(y) + norm(y) + max(y, 0).values;
  const auto [values, positions] = sort(y, 1, Order::descending);
  vector<float> host = values.to_vector<float>();
  host.push_back(amax(y).item<float>());
  transform(host.begin(), host.end(), host.begin(), [](float v) { return v * 2; });
  const Tensor back = Tensor::from(host, {static_cast<int64_t>(host.size())});
  return einsum("i,j->ij", {back, back}) + gather(y, 1, index) + to(positions, f32) + randn({1}) +
         apply(Softsign{}, back) + full({1}, 2, {.dtype = f32}) + div(x, 2) + isfinite(x);
}

void train(World& world) {
  manual_seed(1);
  Classifier model;
  nn::Sequential list(nn::Linear(2, 2), nn::Gelu(), [](const Tensor& x) { return x * 2; });
  shard::fully_shard(model, {.mesh = world.mesh(), .mixed_precision = {.param_dtype = bf16}});
  nn::AdamW optimizer(model.parameters(), {.lr = 1e-3});
  const nn::CosineSchedule schedule{.lr = 1e-3};
  for (int step = 0; step < 2; ++step) {
    optimizer.set_lr(schedule(step));
    const Tensor loss = cross_entropy(model(randn({8, 2})), randint(0, 4, {8}), {.label_smoothing = 0.1});
    loss.backward();
    shard::clip_grad_norm_(model.parameters(), 1.0);
    optimizer.step();
    optimizer.zero_grad();
    cout << "step " << step << ": " << loss.item() << "\n" << loss;
  }
  Tensor total = ones({2});
  world.group().all_reduce(total, ReduceOp::average(), {.label = "total"});
  shard::save_checkpoint(model, optimizer, filesystem::path("runs") / "1", world.group());
  const Tensor again = recompute([&] { return list(total); });
  Program program = capture([&](span<const Tensor> in) { return vector{list(in[0])}; }, {total});
  program.replay({again});
}

}  // namespace

int main() try {
  cpu::add_elementwise<Softsign>();
  cout << computed(randn({3, 4}), zeros({1, 4}, {i64}));
  run_ranks(2, train);
} catch (const Error& error) {
  cerr << error.what() << "\n";
  return 1;
}
