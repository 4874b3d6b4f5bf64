// What is made again for each use, and what ops cost by a file.
#include <algorithm>
#include <fstream>

#include "autograd/capture/costs.h"
#include "autograd/capture/passes/copies.h"
#include "autograd/capture/passes/dead_code.h"
#include "autograd/capture/passes/late.h"
#include "autograd/capture/program.h"
#include "autograd/compile.h"
#include "runtime/io/file_system.h"
#include "tests/autograd/random_step.h"
#include "tests/catch.h"
#include "tests/runtime/op_cases.h"
#include "tests/temp_directory.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr std::int64_t everything = std::int64_t{1} << 40;  // bytes

Recorded placed(const Step& step, const std::vector<Tensor>& in) {
  std::vector<Tensor> outputs;
  return late(dead_code(record(step, in, outputs)));
}

std::string text_of_copied(const Step& step, const std::vector<Tensor>& in, std::int64_t less) {
  return Program::Impl(copied_for_uses(placed(step, in), {}, less).program, {}).text();
}

/// What is wide in the middle, where `a` waits.
std::vector<Tensor> waits(std::span<const Tensor> x) {
  const Tensor a = exp(x[0]), b = tanh(a), wide = cat({b, b, b});
  return {mul(sum(wide), a)};
}

}  // namespace

TEST_CASE("copies: what waits where most is held is made again for its next use") {
  const std::vector<Tensor> in{ones({4})};
  CHECK(text_of_copied(waits, in, 1) ==
        "inputs %x0 : f32 (4)\n"
        "%0 = exp(%x0) : f32 (4)\n"
        "%1 = tanh(%0) : f32 (4)\n"
        "%2 = cat[axis=0](%1, %1, %1) : f32 (12)\n"
        "%3 = sum[axes=1, keep=false, mean=false](%2) : f32 ()\n"
        "%4 = exp(%x0) : f32 (4)\n"
        "%5 = mul(%3, %4) : f32 (4)\n"
        "return %5\n");
  CHECK(text_of_copied(waits, in, 0) == Program::Impl(placed(waits, in), {}).text());
  CHECK(copied_for_uses(placed(waits, in), {}, everything).cost > 0);
}

TEST_CASE("copies: what a copy reads is held there, or is made once more too, where that takes no more") {
  const std::vector<Tensor> in{ones({4})};
  CHECK(text_of_copied(
            [](std::span<const Tensor> x) {
              const Tensor a = tanh(exp(x[0])), b = tanh(a), wide = cat({b, b, b});
              return std::vector<Tensor>{mul(sum(wide), a)};
            },
            in, 1) ==
        "inputs %x0 : f32 (4)\n"
        "%0 = exp(%x0) : f32 (4)\n"
        "%1 = tanh(%0) : f32 (4)\n"
        "%2 = tanh(%1) : f32 (4)\n"
        "%3 = cat[axis=0](%2, %2, %2) : f32 (12)\n"
        "%4 = sum[axes=1, keep=false, mean=false](%3) : f32 ()\n"
        "%5 = exp(%x0) : f32 (4)\n"
        "%6 = tanh(%5) : f32 (4)\n"
        "%7 = mul(%4, %6) : f32 (4)\n"
        "return %7\n");
  // What `a` is made of is wider than what it waits beside.
  const Step wide = [](std::span<const Tensor> x) {
    const Tensor a = sum(cat({x[0], x[0], x[0], x[0], x[0]})), b = tanh(x[0]), middle = cat({b, b, b, b});
    return std::vector<Tensor>{mul(sum(middle), a)};
  };
  CHECK(text_of_copied(wide, in, everything) == Program::Impl(placed(wide, in), {}).text());
}

TEST_CASE("copies: what others may change is not read again") {
  const NoGrad guard;
  std::vector<float> memory(4, 1.0F);
  const Tensor one = from_blob(memory.data(), {4}, f32, nullptr),
               same = from_blob(memory.data(), {4}, f32, nullptr);
  const Step step = [&](std::span<const Tensor> x) {
    const Tensor read = exp(one);
    Tensor b = mul(read, x[0]);
    add_(same, 1.0);
    b = tanh(b);
    return std::vector<Tensor>{mul(sum(cat({b, b, b})), read)};
  };
  const Tensor x = numbers({4}, f32);
  Program::Impl after(copied_for_uses(placed(step, {x}), {}, everything).program, {});
  for (int call = 0; call < 2; ++call) {
    const std::vector<float> before = memory;
    const std::vector<Tensor> got = after.replay({x});
    memory = before;
    check_same(got, step({&x, 1}));
  }
}

TEST_CASE(
    "copies: random programs give the bits of the step, write and draw what it does, and hold no more") {
  std::size_t copied = 0;
  for (unsigned seed = 0; seed < 400; ++seed) {
    INFO("program " << seed);
    const RandomStep step(seed, Writes::sometimes);
    // Its results wait while something wide is computed of them.
    const Step as_step = [&](std::span<const Tensor> in) {
      std::vector<Tensor> results = step(in);
      const Tensor wide = sum(cat(std::vector<Tensor>(8, flatten(results[0]))));
      for (Tensor& t : results) t = mul(t, wide);
      return results;
    };
    const NoGrad guard;
    manual_seed(0);
    const Recorded whole = placed(as_step, inputs_of(0));
    Copied after = copied_for_uses(whole, {}, everything);
    Program::Impl before(whole, {}), again(std::move(after.program), {});
    copied += after.cost > 0 ? 1 : 0;
    CHECK((after.cost > 0) == (again.steps.size() > before.steps.size()));
    for (unsigned call = 1; call < 4; ++call)
      check_same(effects_of(
                     step, [&](const std::vector<Tensor>& in) { return again.replay(in); }, call),
                 effects_of(step, as_step, call));
  }
  CHECK(copied > 20);
}

namespace {

/// Levels that the way back up reads in the other order, as a U-Net does.
struct Skips {
  std::vector<Tensor> down, up;
  explicit Skips(int levels) {
    manual_seed(5);
    for (int i = 0; i < levels; ++i)
      for (auto* list : {&down, &up}) list->push_back(mul(randn({32, 32}), 0.2).requires_grad_());
  }
  std::vector<Tensor> operator()(std::span<const Tensor> in) const {
    Tensor x = in[0];
    std::vector<Tensor> levels;
    for (const Tensor& w : down) levels.push_back(x = dropout(tanh(linear(x, w)), 0.1));
    for (std::size_t i = up.size(); i-- > 0;) x = mul(tanh(linear(x, up[i])), levels[i]);
    return {mean(square(x))};
  }
  std::vector<Tensor> grads() const {
    std::vector<Tensor> all;
    for (const auto* list : {&down, &up})
      for (const Tensor& t : *list) all.push_back(t.grad());
    return all;
  }
  void zero_grad() const {
    for (const auto* list : {&down, &up})
      for (const Tensor& t : *list) t.set_grad({});
  }
};

std::size_t count_of(std::string_view word, std::string_view text) {
  std::size_t count = 0;
  for (std::size_t at = text.find(word); at != text.npos; at = text.find(word, at + 1)) ++count;
  return count;
}

}  // namespace

TEST_CASE("copies: at a small budget a level is made again for each way, with eager's bits") {
  const Skips net(8);
  const Tensor x = randn({64, 32});
  for (const Executor executor : {Executor::replay, Executor::fused}) {
    net.zero_grad();
    manual_seed(3);
    net(std::span(&x, 1))[0].backward();
    const std::vector<Tensor> expected = net.grads();
    const Compiled compiled = compile(net, {.executor = executor, .memory = MemoryBudget::least()});
    for (int call = 0; call < 3; ++call) {
      net.zero_grad();
      manual_seed(3);
      compiled({x})[0].backward();
      check_same(net.grads(), expected);
    }
    const std::string text = compiled.text();
    INFO(text << compiled.stats().peak_bytes << " of " << compiled.stats().eager_peak_bytes);
    if (executor == Executor::replay) CHECK(count_of("dropout[", text) > 2 * 8);
  }
}

// ---- costs ----

TEST_CASE("costs: what was measured is written and read, and a file that is not of that kind is refused") {
  const TempDirectory folder;
  const std::filesystem::path path = folder / "costs";
  const Tensor w = randn({16, 8}).requires_grad_(), x = randn({4, 8});
  const OpCosts costs = OpCosts::measure([&] { sum(dropout(linear(x, w), 0.5)).backward(); }, 3);
  CHECK(costs.size() >= 5);
  CHECK(costs.nanoseconds("cpu linear(f32 (4, 8), f32 (16, 8), none, none)"));
  CHECK_FALSE(costs.nanoseconds("cpu linear(f32 (4, 8), f32 (16, 9), none, none)"));
  costs.write(path);
  const std::string text = posix_file_system().read(path);
  const OpCosts again = OpCosts::read(path);
  CHECK(again.size() == costs.size());
  again.write(path);
  CHECK(posix_file_system().read(path) == text);
  CHECK_THROWS_AS(OpCosts::read(folder / "nothing"), FileError);
  const std::string bad[] = {"",
                             "other\n",
                             "sherd op costs 1\nx matmul()\n",
                             "sherd op costs 1\n-1 matmul()\n",
                             "sherd op costs 1\n12\n",
                             "sherd op costs 1\n1 matmul()\n2 tan"};
  for (const std::string& content : bad) {
    INFO(content);
    std::ofstream(path, std::ios::trunc) << content;
    CHECK_THROWS_WITH(OpCosts::read(path),
                      ContainsSubstring(path.string()) && ContainsSubstring("measure anew"));
  }
  CHECK_THROWS_WITH(OpCosts::measure([] {}, 0), ContainsSubstring("give it one or more"));
}

TEST_CASE("costs: a budget makes again what a file says is cheap, with eager's bits") {
  const Tensor first = mul(randn({64, 8}), 0.2).requires_grad_(),
               second = mul(randn({65, 8}), 0.2).requires_grad_(), x = randn({256, 8});
  const auto step = [&](std::span<const Tensor> in) {
    return std::vector<Tensor>{
        add(sum(square(gelu(linear(in[0], first)))), sum(square(gelu(linear(in[0], second)))))};
  };
  const auto gradients = [&](const auto& call) {
    for (const Tensor& t : {first, second}) t.set_grad({});
    call(std::span(&x, 1))[0].backward();
    return std::vector<Tensor>{first.grad(), second.grad()};
  };
  const std::vector<Tensor> expected = gradients(step);
  const TempDirectory folder;
  for (const int dear : {64, 65}) {
    std::ofstream(folder / "costs", std::ios::trunc)
        << "sherd op costs 1\n"
        << (dear == 64 ? 90000 : 10) << " cpu linear(f32 (256, 8), f32 (64, 8), none, none)\n"
        << (dear == 65 ? 90000 : 10) << " cpu linear(f32 (256, 8), f32 (65, 8), none, none)\n";
    const Compiled compiled =
        compile(step, {.memory = MemoryBudget::part(0.99), .costs = OpCosts::read(folder / "costs")});
    check_same(gradients(compiled), expected);
    const std::string text = compiled.text(), backward = text.substr(text.find("backward"));
    INFO(text);
    for (const int width : {64, 65})
      CHECK((count_of(fmt::format("none, none) : f32 (256, {})", width), backward) > 0) == (width != dear));
  }
}
