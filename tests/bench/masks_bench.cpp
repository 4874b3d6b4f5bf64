// What a mask costs attention: milliseconds without one, with masks of padding, bands and documents, and with
// the same masks by the formula that stores all scores, forward and backward; the least of several rounds, in
// which all take turns.
//
//   masks_bench [--device cpu|cuda] [--dtype f32|bf16] [--shape B H T D]...
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "autograd/autograd.h"
#include "runtime/apply.h"
#include "runtime/backend.h"
#include "runtime/ops.h"
#include "runtime/ops/attention.h"

namespace {

using namespace sherd;

/// bool masks of T keys, true where a query sees a key; each shows a quarter of the keys, but for paddings,
/// which show three quarters or all.
std::map<std::string, Tensor> masks_of(std::int64_t b, std::int64_t t, Device device) {
  const TensorOptions index{DType::i64, device};
  const Tensor key = arange(0, t, 1, index), query = unsqueeze(key, 1);
  const Tensor lengths = full({b}, static_cast<double>(3 * t / 4), index);
  const Tensor apart = sub(query, key);
  return {
      {"no padding", ones({b, 1, 1, t}, {DType::boolean, device})},
      {"padding", reshape(less(key, unsqueeze(lengths, 1)), {b, 1, 1, t})},
      {"band", logical_and(greater_equal(apart, -(t / 8)), less(apart, t / 8))},
      {"documents", equal(floor_divide(query, t / 4), floor_divide(key, t / 4))},
  };
}

struct Way {
  std::string name;
  std::function<Tensor()> forward;
  double forward_ms = 1e9, both_ms = 1e9;
};

double ms_of(Device device, const std::function<void()>& call) {
  const auto now = std::chrono::steady_clock::now;
  backend(device.type).synchronize(device);
  const auto start = now();
  call();
  backend(device.type).synchronize(device);
  return std::chrono::duration<double, std::milli>(now() - start).count();
}

void measure(const Shape& s, DType dtype, Device device) {
  Tensor q = randn(s, {dtype, device}), k = randn(s, {dtype, device}), v = randn(s, {dtype, device});
  for (Tensor* t : {&q, &k, &v}) t->requires_grad_();
  const Tensor inputs[] = {q, k, v}, g = randn(s, {dtype, device});
  const ops::MaskedAttention rule{{1 / std::sqrt(static_cast<double>(s[3])), false, 0, {}}};
  std::vector<Way> ways{{"unmasked", [&] { return attention(q, k, v); }}};
  const auto masks = masks_of(s[0], s[2], device);
  for (const auto& [name, mask] : masks) {
    ways.push_back({name, [&, mask = mask] { return attention(q, k, v, {.mask = mask}); }});
    ways.push_back({name + ", all scores stored", [&, mask = mask] {
                      const Tensor in[] = {q, k, v, mask};
                      return rule.reference(in)[0];
                    }});
  }
  const auto start = std::chrono::steady_clock::now();
  const auto lasts = [&] { return std::chrono::steady_clock::now() - start < std::chrono::seconds(5); };
  for (int round = 0; round < 7 || lasts(); ++round)
    for (Way& way : ways) {
      {
        const NoGrad guard;
        way.forward_ms = std::min(way.forward_ms, ms_of(device, way.forward));
      }
      way.both_ms = std::min(way.both_ms, ms_of(device, [&] { grad(way.forward(), inputs, g); }));
    }
  for (const Way& way : ways)
    std::printf("%3lld %3lld %5lld %4lld  %-30s %9.2f ms forward (%.2f)  %9.2f ms both ways (%.2f)\n",
                static_cast<long long>(s[0]), static_cast<long long>(s[1]), static_cast<long long>(s[2]),
                static_cast<long long>(s[3]), way.name.c_str(), way.forward_ms,
                way.forward_ms / ways[0].forward_ms, way.both_ms, way.both_ms / ways[0].both_ms);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"times of attention with masks beside attention without"};
  std::string device = "cpu", dtype = "f32";
  std::vector<std::vector<std::int64_t>> shapes{{16, 4, 128, 32}, {8, 6, 256, 64}, {2, 12, 1024, 64}};
  app.add_option("--device", device)->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--dtype", dtype)->check(CLI::IsMember({"f32", "bf16"}));
  app.add_option("--shape", shapes, "batch, heads, positions and width; may come several times")->expected(4);
  CLI11_PARSE(app, argc, argv);
  manual_seed(1);
  for (const std::vector<std::int64_t>& s : shapes)
    measure({s[0], s[1], s[2], s[3]}, dtype == "f32" ? DType::f32 : DType::bf16,
            device == "cpu" ? Device::cpu() : Device::cuda(0));
}
