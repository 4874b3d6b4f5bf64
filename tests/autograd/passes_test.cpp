// Passes over captured programs: as text, before and after, and as results.
#include <sstream>

#include "autograd/capture/effects.h"
#include "autograd/capture/passes/common.h"
#include "autograd/capture/passes/dead_code.h"
#include "autograd/capture/passes/decompose.h"
#include "autograd/capture/passes/pass.h"
#include "autograd/capture/program.h"
#include "autograd/compile.h"
#include "autograd/recompute.h"
#include "runtime/apply.h"
#include "runtime/float32_precision.h"
#include "tests/autograd/random_step.h"
#include "tests/catch.h"
#include "tests/runtime/op_cases.h"
#include "tests/runtime/plain_device.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;

namespace {

using PassOf = Recorded (*)(Recorded);

Recorded heard(const Step& step, const std::vector<Tensor>& in) {
  std::vector<Tensor> outputs;
  return record(step, in, outputs);
}
Program::Impl program(Recorded recorded) { return {std::move(recorded), {}}; }

/// The lines of a step's program behind its inputs and what it found, after the pass.
std::string text_after(PassOf pass, const Step& step, const std::vector<Tensor>& in) {
  manual_seed(1);
  std::istringstream text(program(pass(heard(step, in))).text());
  std::string lines;
  for (std::string line; std::getline(text, line);)
    if (!line.starts_with("inputs") && !line.starts_with("outside")) lines += line + "\n";
  return lines;
}
Recorded nothing(Recorded program) { return program; }
Recorded both(Recorded program) { return dead_code(common(std::move(program))); }

/// Copies of the inputs, in each call others.
std::vector<Tensor> drawn(unsigned call, Device device = Device::cpu()) {
  return {to(numbers({4, 6}, f32, 2 * call + 1), device), to(numbers({4, 6}, f32, 2 * call + 2), device)};
}

/// Stands for a call among ranks.
struct AmongRanks {
  static constexpr std::string_view name = "call";
  static constexpr bool differentiable = false, among_ranks = true;
  int number = 0;
  Specs infer(SpecSpan in) const { return {in[0]}; }
  void run(Inputs in, Outputs out) const { copy_(out[0], in[0]); }
  void fields(auto&& on) const { on("number", number); }
  bool operator==(const AmongRanks&) const = default;
};
/// Has no results and writes no tensor.
struct Note {
  static constexpr std::string_view name = "note";
  static constexpr bool differentiable = false;
  Specs infer(SpecSpan) const { return {}; }
  void run(Inputs, Outputs) const {}
  bool operator==(const Note&) const = default;
};

/// Whose reference reads values.
struct Reading {
  static constexpr std::string_view name = "reading";
  Specs infer(SpecSpan in) const { return {in[0]}; }
  Tensors reference(Inputs in) const { return {mul(in[0], sum(in[0]).item<double>())}; }
  bool operator==(const Reading&) const = default;
};

}  // namespace

TEST_CASE("dead code: what nobody reads goes, and what led to it") {
  const Tensor found = zeros({3});
  const Step step = [&](std::span<const Tensor> in) {
    const Tensor y = exp(in[0]);
    const Tensor unread = tanh(transpose(exp(y), 0, 1)), part = narrow(y, 0, 0, 1);
    const Tensor made = zeros({3});
    add_(made, 1);
    add_(found, sum(y, 0));
    add_(in[0], 1);
    return std::vector<Tensor>{transpose(y, 0, 1)};
  };
  const std::vector<Tensor> in{ones({2, 3})};
  CHECK(text_after(nothing, step, in) ==
        "%0 = exp(%x0) : f32 (2, 3)\n"
        "%1 = exp(%0) : f32 (2, 3)\n"
        "%2 = permute[axes=(1, 0)](%1) : f32 (3, 2)\n"
        "%3 = tanh(%2) : f32 (3, 2)\n"
        "%4 = slice[axis=0, start=0, step=1, size=1](%0) : f32 (1, 3)\n"
        "%5 = full[value=0]() : f32 (3)\n"
        "%5 = add_[right=1](%5) : f32 (3)\n"
        "%6 = sum[axes=1, keep=false, mean=false](%0) : f32 (3)\n"
        "%p0 = add_(%p0, %6) : f32 (3)\n"
        "%x0 = add_[right=1](%x0) : f32 (2, 3)\n"
        "%7 = permute[axes=(1, 0)](%0) : f32 (3, 2)\n"
        "return %7\n");
  CHECK(text_after(dead_code, step, in) ==
        "%0 = exp(%x0) : f32 (2, 3)\n"
        "%1 = sum[axes=1, keep=false, mean=false](%0) : f32 (3)\n"
        "%p0 = add_(%p0, %1) : f32 (3)\n"
        "%x0 = add_[right=1](%x0) : f32 (2, 3)\n"
        "%2 = permute[axes=(1, 0)](%0) : f32 (3, 2)\n"
        "return %2\n");
}

TEST_CASE("dead code: a write to memory that is read later stays, by whatever view it goes") {
  const Step step = [](std::span<const Tensor> in) {
    const Tensor made = empty({4, 2});
    fill_(narrow(made, 0, 0, 2), 1);
    fill_(narrow(made, 0, 2, 2), 2);
    const Tensor other = empty({4, 2});
    fill_(narrow(other, 0, 0, 2), 1);
    return std::vector<Tensor>{add(made, in[0])};
  };
  CHECK(text_after(dead_code, step, {ones({4, 2})}) ==
        "%1 = slice[axis=0, start=0, step=1, size=2](%0) : f32 (2, 2)\n"
        "%1 = fill_[value=1](%1) : f32 (2, 2)\n"
        "%2 = slice[axis=0, start=2, step=1, size=2](%0) : f32 (2, 2)\n"
        "%2 = fill_[value=2](%2) : f32 (2, 2)\n"
        "%3 = add(%0, %x0) : f32 (4, 2)\n"
        "return %3\n");
  Program::Impl after = program(dead_code(heard(step, {ones({4, 2})})));
  for (int i = 0; i < 3; ++i) check_same(after.replay({full({4, 2}, i)}), step(std::vector{full({4, 2}, i)}));
}

TEST_CASE("dead code: calls among ranks and ops without results stay, with what they read") {
  const Step step = [](std::span<const Tensor> in) {
    sherd::apply(AmongRanks{1}, exp(in[0]));
    apply_many(Note{}, {tanh(in[0])});
    return std::vector<Tensor>{sherd::apply(AmongRanks{2}, in[0])};
  };
  CHECK(text_after(dead_code, step, {ones({2})}) == text_after(nothing, step, {ones({2})}));
}

TEST_CASE("dead code: random numbers are those of the step, for those that stay and after it") {
  const Step step = [](std::span<const Tensor> in) {
    const Tensor unread = dropout(in[0], 0.5);
    const Tensor y = dropout(in[0], 0.5);
    const Tensor last = dropout(in[0], 0.5);
    return std::vector<Tensor>{y};
  };
  const std::vector<Tensor> in{ones({64})};
  Program::Impl after = program(dead_code(heard(step, in)));
  CHECK(after.steps.size() == 1);
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    manual_seed(seed);
    const Tensor expected = step(in)[0], next = randn({3});
    manual_seed(seed);
    CHECK(same_bits(after.replay(in)[0], expected));
    CHECK(same_bits(randn({3}), next));
  }
}

TEST_CASE("dead code: what a step does beside its ops stays between the same ones") {
  const Tensor found = zeros({});
  std::vector<double> seen;
  const Step step = [&](std::span<const Tensor> in) {
    add_(found, 1);
    const Tensor unread = exp(exp(in[0]));
    repeat_in_replays([&] { seen.push_back(*reinterpret_cast<const float*>(found.raw())); });
    const Tensor unread_too = exp(in[0]);
    add_(found, 1);
    repeat_in_replays([&] { seen.push_back(*reinterpret_cast<const float*>(found.raw())); });
    const Tensor unread_last = exp(in[0]);
    return std::vector<Tensor>{in[0]};
  };
  Program::Impl after = program(dead_code(heard(step, {ones({2})})));
  CHECK(after.steps.size() == 2);
  seen.clear();
  fill_(found, 0);
  after.replay({ones({2})});
  CHECK(seen == std::vector<double>{1, 2});
}

TEST_CASE("dead code: what the other half keeps stays, and what the program found and reads no more goes") {
  const Tensor found = ones({3});
  Recorded whole = heard(
      [&](std::span<const Tensor> in) {
        const Tensor for_the_other = exp(in[0]), unread = mul(in[0], found);
        return std::vector<Tensor>{tanh(in[0])};
      },
      {ones({3})});
  const std::uint32_t held = found.storage().use_count();
  whole.cut = Cut{{{whole.trace.ops[0].out[0].storage, 0}}, {}};
  const Recorded after = dead_code(std::move(whole));
  CHECK(found.storage().use_count() < held);
  CHECK(program(after).text() ==
        "inputs %x0 : f32 (3)\n"
        "%0 = exp(%x0) : f32 (3)\n"
        "%1 = tanh(%x0) : f32 (3)\n"
        "keep %k0 = %0\n"
        "return %1\n");
}

TEST_CASE("common: what is the same is computed once") {
  const Step step = [](std::span<const Tensor> in) {
    const auto branch = [&] { return mul(gelu(transpose(in[0], 0, 1)), 2); };
    const Tensor a = branch(), b = branch(), c = branch();
    return std::vector<Tensor>{add(a, b), sum(c)};
  };
  CHECK(text_after(nothing, step, {ones({2, 3})}) ==
        "%0 = permute[axes=(1, 0)](%x0) : f32 (3, 2)\n"
        "%1 = gelu(%0) : f32 (3, 2)\n"
        "%2 = mul[right=2](%1) : f32 (3, 2)\n"
        "%0 = permute[axes=(1, 0)](%x0) : f32 (3, 2)\n"
        "%3 = gelu(%0) : f32 (3, 2)\n"
        "%4 = mul[right=2](%3) : f32 (3, 2)\n"
        "%0 = permute[axes=(1, 0)](%x0) : f32 (3, 2)\n"
        "%5 = gelu(%0) : f32 (3, 2)\n"
        "%6 = mul[right=2](%5) : f32 (3, 2)\n"
        "%7 = add(%2, %4) : f32 (3, 2)\n"
        "%8 = sum[axes=3, keep=false, mean=false](%6) : f32 ()\n"
        "return %7, %8\n");
  CHECK(text_after(common, step, {ones({2, 3})}) ==
        "%0 = permute[axes=(1, 0)](%x0) : f32 (3, 2)\n"
        "%1 = gelu(%0) : f32 (3, 2)\n"
        "%2 = mul[right=2](%1) : f32 (3, 2)\n"
        "%3 = add(%2, %2) : f32 (3, 2)\n"
        "%4 = sum[axes=3, keep=false, mean=false](%2) : f32 ()\n"
        "return %3, %4\n");
}

TEST_CASE("common: what only looks the same stays") {
  const std::vector<Tensor> in{ones({4, 4})};
  const auto stays = [&](const char* what, const Step& step) {
    INFO(what);
    CHECK(text_after(common, step, in) == text_after(nothing, step, in));
    Program::Impl after = program(common(heard(step, in)));
    manual_seed(3);
    const std::vector<Tensor> expected = step(std::vector{numbers({4, 4}, f32, 9)});
    manual_seed(3);
    check_same(after.replay({numbers({4, 4}, f32, 9)}), expected);
  };
  using Span = std::span<const Tensor>;
  stays("0 and -0",
        [](Span in) { return std::vector{add(div(1, mul(in[0], 0.0)), div(1, mul(in[0], -0.0)))}; });
  stays("random numbers", [](Span in) {
    const Tensor y = dropout(in[0], 0.5);
    return std::vector{add(y, dropout(in[0], 0.5))};
  });
  stays("the same random numbers", [](Span in) {
    const ops::Dropout op{0.5, Context::current().generator().reserve(16)};
    const Tensor y = sherd::apply(op, in[0]);
    return std::vector{add(y, sherd::apply(op, in[0]))};
  });
  stays("an input that is written between", [](Span in) {
    const Tensor x = clone(in[0]), y = exp(x);
    add_(narrow(x, 0, 0, 1), 1);
    return std::vector{add(y, exp(x))};
  });
  stays("a first result that is written later", [](Span in) {
    const Tensor y = exp(in[0]), z = exp(in[0]);
    add_(y, 1);
    return std::vector{add(y, z)};
  });
  stays("a second result that is written later", [](Span in) {
    const Tensor y = exp(in[0]), z = exp(in[0]);
    add_(transpose(z, 0, 1), 1);
    return std::vector{add(y, z)};
  });
  stays("two results that the caller may write",
        [](Span in) { return std::vector{exp(in[0]), transpose(exp(in[0]), 0, 1)}; });
  stays("views of memory that is written", [](Span in) {
    const Tensor x = clone(in[0]), y = sum(narrow(x, 0, 0, 2));
    add_(x, 1);
    return std::vector{add(y, sum(narrow(x, 0, 0, 2)))};
  });
  stays("calls among ranks", [](Span in) {
    return std::vector{add(sherd::apply(AmongRanks{}, in[0]), sherd::apply(AmongRanks{}, in[0]))};
  });
  stays("another precision of products", [](Span in) {
    const Tensor y = matmul(in[0], in[0]);
    const Float32MatmulPrecisionScope high(Float32MatmulPrecision::high);
    return std::vector{add(y, matmul(in[0], in[0]))};
  });
}

TEST_CASE("common: a result that the caller gets serves inside too, and he gets no other one of it") {
  const Step step = [](std::span<const Tensor> in) {
    const Tensor inside = tanh(exp(in[0])), first = exp(in[0]), second = exp(in[0]);
    return std::vector<Tensor>{inside, first, second};
  };
  Program::Impl after = program(common(heard(step, {ones({4})})));
  CHECK(after.steps.size() == 3);
  const Tensor x = numbers({4}, f32);
  check_same(after.replay({x}), step({&x, 1}));
}

TEST_CASE("passes: random programs give the bits of the step, and write and draw what it does") {
  std::size_t before = 0, without_dead = 0, without_common = 0, all = 0;
  for (unsigned seed = 0; seed < 300; ++seed) {
    INFO("program " << seed);
    const RandomStep step(seed, Writes::sometimes);
    const Step& as_step = step;
    const NoGrad guard;
    std::size_t* counts[] = {&before, &without_dead, &without_common, &all};
    const PassOf passes[] = {nothing, dead_code, common, both};
    for (std::size_t p = 0; p < 4; ++p) {
      Recorded whole = heard(as_step, drawn(0));
      const std::vector<TracedStorage> storages = whole.trace.storages;
      Recorded changed = passes[p](std::move(whole));
      for (std::size_t i = 0; i < storages.size(); ++i)  // of what others have
        if (storages[i].maker == TracedTensor::none)
          CHECK(changed.trace.storages[i].rewritten == storages[i].rewritten);
      Program::Impl after = program(std::move(changed));
      *counts[p] += after.steps.size();
      for (unsigned call = 1; call < 4; ++call)
        check_same(effects_of(
                       step, [&](const std::vector<Tensor>& in) { return after.replay(in); }, call),
                   effects_of(step, as_step, call));
    }
  }
  CHECK(without_dead < before);
  CHECK(without_common < before);
  CHECK(all < std::min(without_dead, without_common));
}

TEST_CASE("passes: compiled random functions have the bits of eager ones, forward and backward") {
  for (unsigned seed = 0; seed < 150; ++seed) {
    RandomStep step(seed, Writes::never), other(seed, Writes::never);
    const CommonSubexpressions how = seed % 2 == 0 ? CommonSubexpressions::once : CommonSubexpressions::each;
    const Compiled compiled = compile([&](std::span<const Tensor> in) { return other(in); },
                                      {.full_graph = FullGraph::yes, .common_subexpressions = how});
    for (unsigned call = 0; call < 4; ++call) {
      INFO("function " << seed << ", call " << call);
      check_same(gradients_of(other, compiled, call), gradients_of(step, step, call));
    }
    CHECK(compiled.stats().hits == 3);
  }
}

TEST_CASE("compile: common subexpressions are computed as often as the options say") {
  const Step step = [](std::span<const Tensor> in) {
    return std::vector<Tensor>{sum(add(gelu(in[0]), gelu(in[0])))};
  };
  const auto ops = [&](CommonSubexpressions how) {
    const Compiled compiled = compile(step, {.common_subexpressions = how});
    compiled({ones({3})});
    return compiled.stats().ops;
  };
  CHECK(ops(CommonSubexpressions::each) == std::vector<std::size_t>{4});
  CHECK(ops(CommonSubexpressions::once) == std::vector<std::size_t>{3});
}

TEST_CASE("compile: a result that the caller writes is not what a gradient keeps of another") {
  // What is kept comes after what is returned, before it, and after what is neither.
  const Step steps[] = {[](std::span<const Tensor> in) {
                          const Tensor y = exp(in[0]).detach();
                          return std::vector<Tensor>{y, mul(exp(in[0]), 3)};
                        },
                        [](std::span<const Tensor> in) {
                          const Tensor y = mul(exp(in[0]), 3);
                          return std::vector<Tensor>{exp(in[0]).detach(), y};
                        },
                        [](std::span<const Tensor> in) {
                          const Tensor s = sum(exp(in[0].detach())), y = mul(exp(in[0]), 3);
                          return std::vector<Tensor>{exp(in[0]).detach(), add(y, s)};
                        }};
  for (const Step& step : steps) {
    const Compiled compiled = compile(step, {.common_subexpressions = CommonSubexpressions::once});
    for (unsigned call = 0; call < 4; ++call) {
      const auto run = [&](const auto& body) {
        Tensor x = numbers({5}, f32, call + 1);
        x.requires_grad_();
        const std::vector<Tensor> y = body(std::vector{x});
        add_(y[0], 1);
        sum(y[1]).backward();
        return std::vector<Tensor>{y[0], y[1], x.grad()};
      };
      check_same(run(compiled), run(step));
    }
    CHECK(compiled.stats().hits == 3);
  }
}

TEST_CASE("decompose: an op becomes what it is made of, in its place") {
  const Step step = [](std::span<const Tensor> in) {
    const Tensor y = softmax(exp(in[0]), -1);
    return std::vector<Tensor>{y, sum(y)};
  };
  CHECK(text_after(nothing, step, {ones({2, 3})}) ==
        "%0 = exp(%x0) : f32 (2, 3)\n"
        "%1 = softmax[log=false](%0) : f32 (2, 3)\n"
        "%2 = sum[axes=3, keep=false, mean=false](%1) : f32 ()\n"
        "return %1, %2\n");
  CHECK(text_after(decompose, step, {ones({2, 3})}) ==
        "%0 = exp(%x0) : f32 (2, 3)\n"
        "%1 = extreme[axes=2, keep=true, largest=true](%0) : f32 (2, 1)\n"
        "%2 = sub(%0, %1) : f32 (2, 3)\n"
        "%3 = exp(%2) : f32 (2, 3)\n"
        "%4 = sum[axes=2, keep=true, mean=false](%3) : f32 (2, 1)\n"
        "%5 = exp(%2) : f32 (2, 3)\n"
        "%6 = div(%5, %4) : f32 (2, 3)\n"
        "%7 = sum[axes=3, keep=false, mean=false](%6) : f32 ()\n"
        "return %6, %7\n");
  CHECK(program(common(decompose(heard(step, {ones({2, 3})})))).steps.size() == 7);
}

TEST_CASE("decompose: what writes a list of tensors writes them") {
  const Step step = [](std::span<const Tensor> in) {
    add_(in[0], mul(in[1], 2));
    return std::vector<Tensor>{in[0]};
  };
  Program::Impl after = program(decompose(heard(step, drawn(0))));
  CHECK_THAT(after.text(), ContainsSubstring("%x0 = copy_(%x0, "));
  const std::vector<Tensor> got = drawn(1), expected = drawn(1);
  check_same(after.replay(got), step(expected));
  CHECK(same_bits(got[0], expected[0]));
}

TEST_CASE("decompose: every op comes down to the bits of a device that has the primitives alone",
          "[one thread]") {
  std::size_t programs = 0, grown = 0;
  for_each_case_and_dtype([&](const Case& c, DType dtype) {
    const std::vector<Tensor> in = draw(c, dtype, small_shapes(c)), there = [&] {
      std::vector<Tensor> list;
      for (const Tensor& t : in) list.push_back(to(t, plain()));
      return list;
    }();
    const auto compare = [&](const Step& step) {
      manual_seed(7);
      Recorded whole;
      try {
        whole = heard(step, in);
      } catch (const StateError&) {
        return;  // reads values, which no program does
      }
      const std::size_t size = whole.trace.ops.size();
      Recorded parts = decompose(std::move(whole));
      ++programs;
      grown += parts.trace.ops.size() > size ? 1 : 0;
      CHECK(decompose(parts).trace.ops.size() == parts.trace.ops.size());
      manual_seed(7);
      const std::vector<Tensor> got = program(std::move(parts)).replay(in);
      manual_seed(7);
      const std::vector<Tensor> expected = step(there);
      REQUIRE(got.size() == expected.size());
      for (std::size_t i = 0; i < got.size(); ++i) CHECK(same_bits(got[i], to(expected[i], Device::cpu())));
    };
    compare([&](std::span<const Tensor> x) { return run(c, x); });
    if (c.gradients && is_floating(dtype))
      compare([&](std::span<const Tensor> x) {
        std::vector<Tensor> slopes;
        for (const Tensor& g : gradients(c, x, Lay::dense))
          if (g.defined()) slopes.push_back(g);
        return slopes;
      });
  });
  CHECK(programs > 300);
  CHECK(grown > 200);
}

TEST_CASE("decompose: random programs too, and nobody hears how an op was looked at") {
  struct Counting final : Listener {
    void after(const AnyOp&, Inputs, Outputs) override { ++ops; }
    std::size_t ops = 0;
  } counting;
  for (unsigned seed = 0; seed < 100; ++seed) {
    INFO("program " << seed);
    const NoGrad guard;
    const RandomStep here(seed, Writes::sometimes), there(seed, Writes::sometimes, plain());
    Recorded whole = heard(here, drawn(0));
    const RandomKey before = Context::current().generator().state();
    const Listening listening(counting);
    Program::Impl parts = program(decompose(std::move(whole)));
    CHECK(Context::current().generator().state() == before);
    CHECK(counting.ops == 0);
    for (unsigned call = 1; call < 3; ++call) {
      manual_seed(call);
      const std::vector<Tensor> in = drawn(call), in_there = drawn(call, plain());
      fill_(here.running, 0.25);
      fill_(there.running, 0.25);
      std::vector<Tensor> got = parts.replay(in);
      manual_seed(call);
      std::vector<Tensor> expected = there(in_there);
      for (const auto& [list, step, given] : {std::tuple(&got, &here, &in), {&expected, &there, &in_there}})
        for (const Tensor& t : {step->running, (*given)[0], (*given)[1]}) list->push_back(t);
      for (Tensor& t : expected) t = to(t, Device::cpu());
      check_same(got, expected);
    }
    counting.ops = 0;
  }
}

TEST_CASE("decompose: an op whose reference reads values stays") {
  const Step step = [](std::span<const Tensor> in) {
    return std::vector<Tensor>{sherd::apply(Reading{}, softmax(in[0], -1))};
  };
  const std::string after = text_after(decompose, step, {ones({3})});
  CHECK_THAT(after, ContainsSubstring("= reading("));
  CHECK_THAT(after, !ContainsSubstring("= softmax"));
}

TEST_CASE("passes: a pass that changes calls among ranks is refused, by name and place") {
  const auto recorded = [] {
    return heard(
        [](std::span<const Tensor> in) {
          const Tensor y = sherd::apply(AmongRanks{1}, in[0]);
          return std::vector<Tensor>{sherd::apply(AmongRanks{2}, y), sherd::apply(AmongRanks{3}, in[0])};
        },
        {ones({2})});
  };
  const auto refused = [&](const Pass& pass, const std::string& message) {
    CHECK(message_of<InternalError>([&] { run_passes(recorded(), {&pass, 1}); }) == message);
  };
  refused({"loses",
           [](Recorded program) {
             program.trace.ops.pop_back();
             return program;
           }},
          "pass loses: call 2 among ranks was call and is none; a pass leaves calls as they are");
  refused({"turns",
           [](Recorded program) {
             std::swap(program.trace.ops[1], program.trace.ops[2]);
             return program;
           }},
          "pass turns: call 1 among ranks was call and is call; a pass leaves calls as they are");
  refused({"repeats",
           [](Recorded program) {
             program.trace.ops.push_back(program.trace.ops.back());
             return program;
           }},
          "pass repeats: call 3 among ranks was none and is call; a pass leaves calls as they are");
  const Pass all[] = {{"common", common}, {"dead_code", dead_code}, {"decompose", decompose}};
  CHECK(run_passes(recorded(), all).trace.ops.size() == 3);
}
