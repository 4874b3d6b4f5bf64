// Training steps and kernels on the CPU, one JSON line each, medians of repeats; the shapes of torch_cpu.py
// beside it.
//
//   bench [--threads 2] [--only gpt,mlp,kernels]
//
// Times are comparable only within one run on one machine: start the two in turn.
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>

#include "sherd.h"
#include "tests/bench/mlp.h"

namespace {

using namespace sherd;
using nlohmann::json;

void emit(const json& line) {
  std::puts(line.dump().c_str());
  std::fflush(stdout);
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double median_seconds(const std::function<void()>& call, double budget = 1.0, std::size_t least = 5) {
  for (int i = 0; i < 3; ++i) call();
  std::vector<double> times;
  const double start = now();
  while (times.size() < least || now() - start < budget) {
    const double t = now();
    call();
    times.push_back(now() - t);
  }
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
  return times[times.size() / 2];
}

double peak_mb() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / 1024;
}

nn::AdamW adamw(nn::Gpt& model) {
  nn::ParamGroup decay{{}, {}, 0.1}, rest{{}, {}, 0.0};
  for (const nn::Parameter& p : model.parameters())
    (p.shape().rank() >= 2 ? decay : rest).params.push_back(p);
  return nn::AdamW({decay, rest}, {.lr = 1e-3, .beta2 = 0.99});
}

/// Forward, backward, clipping, step.
double train_step(nn::Gpt& model, nn::AdamW& optimizer, std::span<const nn::Parameter> params,
                  const Tensor& x, const Tensor& y) {
  const Tensor loss = cross_entropy(flatten(model(x), 0, 1), flatten(y));
  loss.backward();
  nn::clip_grad_norm_(params, 1.0);
  optimizer.step();
  optimizer.zero_grad();
  return loss.item();
}

void bench_gpt() {
  struct {
    std::int64_t width, heads, context, batch;
  } const shapes[] = {{128, 4, 64, 12}, {128, 4, 128, 16}, {384, 6, 256, 16}};
  for (const auto& s : shapes) {
    manual_seed(0);
    nn::Gpt model({.layers = 4, .heads = s.heads, .width = s.width, .context = s.context, .vocab = 256});
    nn::AdamW optimizer = adamw(model);
    const auto params = model.parameters();
    const Tensor x = randint(0, 256, {s.batch, s.context}), y = randint(0, 256, {s.batch, s.context});
    const double before_mb = peak_mb();
    const double seconds = median_seconds([&] { train_step(model, optimizer, params, x, y); }, 6.0);
    const auto allocations = Context::current().cpu_pool().system_allocations();
    train_step(model, optimizer, params, x, y);
    emit({{"what", "gpt_step"},
          {"layers", 4},
          {"width", s.width},
          {"heads", s.heads},
          {"context", s.context},
          {"batch", s.batch},
          {"ms", seconds * 1e3},
          {"tokens_per_s", static_cast<double>(s.batch * s.context) / seconds},
          {"peak_mb", peak_mb()},
          {"peak_mb_before", before_mb},
          {"allocations_a_step", Context::current().cpu_pool().system_allocations() - allocations}});
    Context::current().cpu_pool().trim();
  }
}

void bench_mlp() {
  manual_seed(0);
  nn::Sequential model(bench::Mlp{}, bench::Mlp{}, bench::Mlp{});
  nn::Adam optimizer(model.parameters(), {.lr = 1e-2});
  const Tensor x = rand({2, 16});
  const auto step = [&] {
    sum(model(x)).backward();
    optimizer.step();
    optimizer.zero_grad();
  };
  emit({{"what", "mlp_step"}, {"optimizer", "Adam"}, {"us", median_seconds(step) * 1e6}});
  const std::vector<Tensor> inputs{x};
  Program program = capture(
      [&](std::span<const Tensor> in) {
        const Tensor loss = sum(model(in[0]));
        loss.backward();
        optimizer.step();
        optimizer.zero_grad();
        return std::vector<Tensor>{loss.detach()};
      },
      inputs);
  emit({{"what", "mlp_step"}, {"optimizer", "Adam, captured"}, {"us", median_seconds([&] {
                                                                        program.replay(inputs);
                                                                      }) * 1e6}});
}

void bench_apply() {
  const Tensor a = rand({16}), b = rand({16});
  const auto thousand = [](const Tensor& x, const Tensor& y) {
    for (int i = 0; i < 1000; ++i) add(x, y);
  };
  {
    const NoGrad guard;
    emit({{"what", "add16"}, {"us", median_seconds([&] { thousand(a, b); }) * 1e3}});
  }
  Tensor leaf = clone(a);
  leaf.requires_grad_();
  emit({{"what", "add16_grad"}, {"us", median_seconds([&] { thousand(leaf, b); }) * 1e3}});
}

/// Forward, and backward of a fresh graph less the forward's time.
json both(const std::function<Tensor()>& forward, const Tensor& upstream, std::span<const Tensor> inputs) {
  const Tensor y = forward();
  const double f = median_seconds([&] { forward(); }, 0.5);
  const double b = median_seconds([&] { grad(y, inputs, upstream, {.retain_graph = true}); }, 0.5);
  return {{"forward_us", f * 1e6}, {"backward_us", b * 1e6}};
}

void bench_rows() {
  for (const std::int64_t d : {128, 384, 1536}) {
    const std::int64_t rows = 4096;
    Tensor x = rand({rows, d}), w = rand({d}), b = rand({d});
    const Tensor g = rand({rows, d});
    for (Tensor* t : {&x, &w, &b}) t->requires_grad_();
    const Tensor affine[] = {x, w, b}, only_x[] = {x};
    const auto line = [&](std::string_view what, json figures) {
      figures.update({{"what", what}, {"rows", rows}, {"d", d}});
      emit(figures);
    };
    line("layer_norm", both([&] { return layer_norm(x, w, b); }, g, affine));
    line("gelu", both([&] { return gelu(x); }, g, only_x));
    line("softmax", both([&] { return softmax(x); }, g, only_x));
  }
}

void bench_products() {
  const NoGrad guard;
  for (const std::int64_t n : {256, 512, 1024, 2048})
    for (const DType dtype : {f32, bf16}) {
      const Tensor a = rand({n, n}, {dtype}), b = rand({n, n}, {dtype});
      const double s = median_seconds([&] { matmul(a, b); });
      emit({{"what", "matmul"},
            {"n", n},
            {"dtype", name_of(dtype)},
            {"gflops", 2e-9 * static_cast<double>(n * n * n) / s}});
    }
  const Tensor a = rand({1 << 24});
  emit({{"what", "copy"}, {"gb_per_s", 8e-9 * (1 << 24) / median_seconds([&] { clone(a); })}});
}

void bench_losses() {
  for (const std::int64_t vocab : {256, 50304}) {
    const std::int64_t rows = vocab == 256 ? 4096 : 512;
    Tensor x = rand({rows, vocab});
    x.requires_grad_();
    const Tensor t = randint(0, vocab, {rows});
    const double s = median_seconds([&] { grad(cross_entropy(x, t), std::span(&x, 1)); });
    emit({{"what", "cross_entropy"}, {"rows", rows}, {"vocab", vocab}, {"both_us", s * 1e6}});
  }
}

void bench_attention() {
  for (const Shape& s : {Shape{16, 4, 128, 32}, Shape{16, 6, 256, 64}, Shape{4, 12, 1024, 64}}) {
    Tensor q = rand(s), k = rand(s), v = rand(s);
    for (Tensor* t : {&q, &k, &v}) t->requires_grad_();
    const Tensor inputs[] = {q, k, v}, g = rand(s);
    const json us = both([&] { return attention(q, k, v, {.causal = true}); }, g, inputs);
    const double flops = 2e-3 * static_cast<double>(s[0] * s[1] * s[2] * s[2] * s[3]);
    emit({{"what", "attention"},
          {"shape", {s[0], s[1], s[2], s[3]}},
          {"forward_gflops", flops / us["forward_us"].get<double>()},
          {"backward_gflops", 2.5 * flops / us["backward_us"].get<double>()}});
  }
}

void bench_optimizer() {
  std::vector<nn::Parameter> params;
  for (int i = 0; i < 16; ++i) {
    params.emplace_back(rand({1 << 20}));
    params.back().set_grad(rand({1 << 20}));
  }
  nn::AdamW optimizer(params);
  emit({{"what", "adamw"}, {"elements", 16 << 20}, {"ms", median_seconds([&] { optimizer.step(); }) * 1e3}});
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Training steps and kernels on the CPU, one JSON line each");
  int threads = 2;
  std::vector<std::string> only{"gpt", "mlp", "kernels"};
  app.add_option("--threads", threads, "threads an op may use")->capture_default_str();
  app.add_option("--only", only, "what to run: gpt, mlp, kernels")
      ->delimiter(',')
      ->check(CLI::IsMember({"gpt", "mlp", "kernels"}));
  CLI11_PARSE(app, argc, argv);
  Context::current().set_threads(threads);
  emit({{"what", "machine"}, {"library", "sherd"}, {"threads", threads}, {"bare_mb", peak_mb()}});
  const std::set<std::string> parts(only.begin(), only.end());
  if (parts.contains("gpt")) bench_gpt();
  if (parts.contains("mlp")) {
    bench_mlp();
    bench_apply();
  }
  if (parts.contains("kernels")) {
    bench_rows();
    bench_products();
    bench_losses();
    bench_attention();
    bench_optimizer();
  }
}
