// Every op that a user calls: microseconds of the forward alone, and of forward and backward. On the CPU the
// least of many calls, on a GPU the median of some runs by its own clock. ops_table.py beside it runs
// PyTorch's in turn and prints both with their ratio.
//
//   ops_bench [--device cpu|cuda] [--threads 2] [--only NAME] [--list]
//   ops_bench --serve     reads lines `NAME DTYPE ELEMENTS` and answers each with a line of JSON
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/bench/op_rows.h"

namespace {

using namespace sherd;
using namespace sherd::bench;

struct Machine {
  Device device;
  std::vector<std::int64_t> sizes;  // elements of the first input
  std::vector<DType> dtypes;
};
const Machine cpu_machine{{}, {1 << 10, 1 << 16, 1 << 22}, {DType::f32, DType::bf16}};
const Machine gpu_machine{
    Device::cuda(0), {1 << 12, 1 << 20, 1 << 26}, {DType::f32, DType::bf16, DType::f16}};

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// The least microseconds of a call: other programs make a call longer and never shorter.
double least_us(const std::function<void()>& call) {
  for (int i = 0; i < 3; ++i) call();
  double least = 1e9;
  const double start = now();
  for (int i = 0; i < 7 || (now() - start < 0.06 && i < 20000); ++i) {
    const double t = now();
    call();
    least = std::min(least, now() - t);
  }
  return least * 1e6;
}

/// The median of runs of about two milliseconds, between two marks in the device's own work.
double median_us(Device device, const std::function<void()>& call) {
  Backend& gpu = backend(device.type);
  call();
  gpu.synchronize(device);
  const double start = now();
  call();
  gpu.synchronize(device);
  const double once = now() - start;
  const int calls = static_cast<int>(std::clamp(2e-3 / once, 1.0, 200.0));
  std::vector<double> runs(once > 0.05 ? 3 : 7);
  for (double& run : runs) {
    const auto begin = gpu.mark(device);
    for (int i = 0; i < calls; ++i) call();
    const auto end = gpu.mark(device);
    end->wait();
    run = end->seconds_since(*begin) / calls * 1e6;
  }
  std::sort(runs.begin(), runs.end());
  return runs[runs.size() / 2];
}

nlohmann::json measured(const OpRow& row, Device device, DType dtype, std::int64_t n) {
  const auto us = [&](const std::function<void()>& call) {
    return device.type == DeviceType::cpu ? least_us(call) : median_us(device, call);
  };
  manual_seed(0);
  const List in = row.make(n, dtype);
  nlohmann::json line{{"op", row.name}, {"dtype", name_of(dtype)}, {"n", n}};
  Tensor upstream;
  {
    const NoGrad guard;
    line["forward"] = us([&] { row.call(in); });
    if (row.gradient) upstream = ones_like(row.call(in));
  }
  if (row.gradient) {
    List leaves, wanted;
    for (const Tensor& x : in) {
      leaves.push_back(x.detach());
      if (is_floating(x.dtype())) wanted.push_back(leaves.back().requires_grad_());
    }
    line["both"] = us([&] {
      for (const Tensor& x : wanted) x.set_grad({});
      row.call(leaves).backward(upstream);
    });
  }
  return line;
}

void print(const nlohmann::json& line) {
  std::puts(line.dump().c_str());
  std::fflush(stdout);
}

/// What cannot be measured (memory, say) is told in its line, and the next one goes on.
nlohmann::json answer(const std::vector<OpRow>& rows, const Machine& machine, std::istringstream words) {
  std::string name, dtype;
  std::int64_t n = 0;
  words >> name >> dtype >> n;
  const auto row = std::ranges::find(rows, name, &OpRow::name);
  try {
    const auto d = std::ranges::find(machine.dtypes, dtype, [](DType each) { return name_of(each); });
    if (row == rows.end() || d == machine.dtypes.end()) throw ValueError("ops_bench: no such row or dtype");
    return measured(*row, machine.device, *d, n);
  } catch (const Error& error) {
    return {{"op", name}, {"dtype", dtype}, {"n", n}, {"error", error.what()}};
  }
}

}  // namespace

int main(int argc, char** argv) {
  int threads = 2;
  std::string only, device = "cpu";
  bool list = false, serve = false;
  CLI::App app("Every op, in some dtypes and three sizes");
  app.add_option("--device", device, "cpu or cuda")->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--threads", threads, "threads of the rank");
  app.add_option("--only", only, "one op");
  app.add_flag("--list", list, "all ops, a line of JSON each, and first the dtypes and sizes");
  app.add_flag("--serve", serve, "answer lines NAME DTYPE ELEMENTS");
  CLI11_PARSE(app, argc, argv);
  const Machine& machine = device == "cpu" ? cpu_machine : gpu_machine;
  const std::vector<OpRow> rows = op_rows();
  if (list) {
    nlohmann::json first{{"sizes", machine.sizes}};
    for (const DType dtype : machine.dtypes) first["dtypes"].push_back(name_of(dtype));
    print(first);
    for (const OpRow& row : rows)
      print({{"op", row.name}, {"arity", row.arity}, {"low", row.low}, {"high", row.high}});
    return 0;
  }
  Context::current().set_threads(threads);
  const DefaultOptions here({.device = machine.device});
  if (serve) {
    for (std::string line; std::getline(std::cin, line);)
      print(answer(rows, machine, std::istringstream(line)));
    return 0;
  }
  for (const OpRow& row : rows) {
    if (!only.empty() && row.name != only) continue;
    for (const DType dtype : machine.dtypes)
      for (const std::int64_t n : machine.sizes) print(measured(row, machine.device, dtype, n));
  }
}
