#include "autograd/compile.h"

#include <cstring>
#include <optional>
#include <random>
#include <thread>

#include "autograd/autograd.h"
#include "autograd/recompute.h"
#include "runtime/apply.h"
#include "runtime/float32_precision.h"
#include "runtime/ops.h"
#include "tests/catch.h"
#include "tests/logged.h"

using namespace sherd;
using Catch::Matchers::ContainsSubstring;

namespace {

bool same_bits(const Tensor& a, const Tensor& b) {
  if (a.defined() != b.defined()) return false;
  if (!a.defined()) return true;
  if (a.shape() != b.shape() || a.dtype() != b.dtype()) return false;
  const Tensor x = contiguous(a.detach()), y = contiguous(b.detach());
  return std::memcmp(x.raw(), y.raw(), static_cast<std::size_t>(x.numel() * size_of(x.dtype()))) == 0;
}

bool same_bits(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(),
                                            [](const Tensor& x, const Tensor& y) { return same_bits(x, y); });
}

Tensor leaf(const Shape& shape, DType dtype = DType::f32) {
  Tensor t = to(randn(shape), dtype);
  return t.requires_grad_();
}

/// Two layers whose weights are found outside.
struct Net {
  Tensor w0, b0, w1;
  explicit Net(DType dtype = DType::f32) {
    manual_seed(5);
    w0 = leaf({16, 8}, dtype);
    b0 = leaf({16}, dtype);
    w1 = leaf({4, 16}, dtype);
  }
  std::vector<Tensor> leaves() const { return {w0, b0, w1}; }
  std::vector<Tensor> operator()(std::span<const Tensor> in) const {
    return {linear(dropout(gelu(linear(in[0], w0, b0)), 0.25), w1, {})};
  }
  std::vector<Tensor> grads() const { return {w0.grad(), b0.grad(), w1.grad()}; }
  void zero_grad() const {
    for (const Tensor& t : leaves()) t.set_grad({});
  }
};

Tensor input(int i, DType dtype = DType::f32, std::int64_t rows = 6) {
  manual_seed(100 + static_cast<std::uint64_t>(i));
  return to(randn({rows, 8}), dtype);
}

}  // namespace

TEST_CASE("compile: values, gradients and the generator are as eager, forward and backward") {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f64}) {
    const Net eager(dtype), net(dtype);
    const Compiled compiled = compile(net);
    for (int i = 0; i < 5; ++i) {
      INFO(name_of(dtype) << ", call " << i);
      std::vector<Tensor> xs{input(i, dtype), input(i, dtype)};
      for (Tensor& x : xs) x.requires_grad_();
      manual_seed(static_cast<std::uint64_t>(i));
      const Tensor y = eager({&xs[0], 1})[0];
      const Tensor drawn = randn({3});
      manual_seed(static_cast<std::uint64_t>(i));
      const Tensor z = compiled({&xs[1], 1})[0];
      CHECK(same_bits(drawn, randn({3})));
      CHECK(same_bits(y, z));
      sum(square(y)).backward();
      sum(square(z)).backward();
      CHECK(same_bits(eager.grads(), net.grads()));
      CHECK(same_bits(xs[0].grad(), xs[1].grad()));
      for (const Tensor& t : eager.leaves()) CHECK(t.grad().defined());
    }
    const CompileStats stats = compiled.stats();
    CHECK(stats.frames == 1);
    CHECK(stats.programs == 1);
    CHECK(stats.hits == 4);
    CHECK(stats.misses == 1);
    CHECK(stats.eager == 0);
  }
}

TEST_CASE("compile: the text shows forward and backward, and what crosses under one name") {
  const Net net;
  const Compiled compiled = compile([&](std::span<const Tensor> in) {
    return std::vector<Tensor>{sum(square(gelu(linear(in[0], net.w0, net.b0))))};
  });
  compiled({input(0)})[0].backward();
  const std::string text = compiled.text();
  INFO(text);
  CHECK_THAT(text, ContainsSubstring("forward\n"));
  CHECK_THAT(text, ContainsSubstring("backward\n"));
  CHECK_THAT(text, ContainsSubstring("keep %k0 = "));
  CHECK_THAT(text, ContainsSubstring("kept %k0 : f32"));
  const CompileStats stats = compiled.stats();
  CHECK(stats.graphs == 2);
  CHECK(stats.ops.size() == 2);
}

TEST_CASE("compile: what differs from what a program is for gets a program of its own") {
  Tensor w = leaf({8, 8});
  int runs = 0;
  const Compiled compiled = compile(
      [&](std::span<const Tensor> in) {
        ++runs;
        Tensor y = in[0];
        for (const Tensor& t : in) y = add(y, t);
        return std::vector<Tensor>{
            add(matmul(y, w),
                zeros({8}, in[0].dtype() == DType::f32 ? TensorOptions{} : TensorOptions{in[0].dtype()}))};
      },
      {.programs = 32});
  const auto square_of = [](DType dtype = DType::f32) { return to(randn({8, 8}), dtype); };
  const auto meets = [&](std::string_view what, const std::function<std::vector<Tensor>()>& inputs) {
    INFO(what);
    const int before = runs;
    const std::vector<Tensor> first = inputs(), again = inputs();
    compiled(std::span(first));
    CHECK(runs == before + 1);
    compiled(std::span(again));
    CHECK(runs == before + 1);
  };
  meets("at first", [&] { return std::vector{square_of()}; });
  meets("the number of inputs", [&] { return std::vector{square_of(), square_of()}; });
  meets("an input twice", [&] {
    const Tensor x = square_of();
    return std::vector{x, x};
  });
  meets("the same memory, as another tensor", [&] {
    const Tensor x = square_of();
    return std::vector{x, x.detach()};
  });
  meets("shapes", [&] { return std::vector{to(randn({4, 8}), DType::f32)}; });
  meets("strides", [&] { return std::vector{transpose(square_of(), 0, 1)}; });
  meets("requires_grad", [&] { return std::vector{square_of().requires_grad_()}; });
  meets("a history", [&] { return std::vector{mul(square_of().requires_grad_(), 2)}; });
  {
    const NoGrad guard;
    meets("grad mode", [&] { return std::vector{square_of()}; });
  }
  {
    const Float32MatmulPrecisionScope high(Float32MatmulPrecision::high);
    meets("precision", [&] { return std::vector{square_of()}; });
  }
  w.requires_grad_(false);
  meets("what is trained", [&] { return std::vector{square_of()}; });
  w.requires_grad_();
  compiled.reset();
  meets("at first again", [&] { return std::vector{square_of()}; });
}

TEST_CASE("compile: dtypes and default options are guarded") {
  int runs = 0;
  const Compiled compiled = compile([&](std::span<const Tensor> in) {
    ++runs;
    return std::vector<Tensor>{add(in[0], in[0]), zeros({2})};
  });
  const auto dtype_of_zeros = [&](DType dtype) { return compiled({zeros({3}, {dtype})})[1].dtype(); };
  CHECK(dtype_of_zeros(DType::f32) == DType::f32);
  CHECK(dtype_of_zeros(DType::bf16) == DType::f32);
  CHECK(runs == 2);
  const TensorOptions before = Context::current().default_options();
  Context::current().set_default_options({DType::f64, Device::cpu()});
  CHECK(dtype_of_zeros(DType::f32) == DType::f64);
  Context::current().set_default_options(before);
  CHECK(dtype_of_zeros(DType::f32) == DType::f32);
  CHECK(runs == 3);
}

TEST_CASE("compile: programs are bounded, and the one used longest ago goes") {
  const Net net;
  int runs = 0;
  const Compiled compiled = compile(
      [&](std::span<const Tensor> in) {
        ++runs;
        return net(in);
      },
      {.programs = 2});
  const auto of = [&](std::int64_t rows) { return compiled({input(0, DType::f32, rows)})[0]; };
  const test::Logged logger(spdlog::level::info);
  of(1), of(2), of(1), of(2);
  CHECK(runs == 2);
  CHECK(compiled.stats().programs == 2);
  const Tensor y = of(1);
  of(3);  // 2 goes
  CHECK(compiled.stats().programs == 2);
  of(1);
  CHECK(runs == 3);
  CHECK(logger.text().empty());
  of(2);  // 3 goes
  CHECK(runs == 4);
  of(3), of(2);       // 1 went
  sum(y).backward();  // whose program is gone
  CHECK(net.w0.grad().defined());
  CHECK(compiled.stats().hits == 5);
  CHECK_THAT(logger.text(), ContainsSubstring("the last one of (2, ") && ContainsSubstring("programs more"));
  CHECK(std::ranges::count(logger.text(), '\n') == 1);
  compile_reset();
  CHECK(compiled.stats().programs == 0);
  CHECK(compiled.stats().hits == 0);
  of(1);
  CHECK(compiled.stats().frames == 1);
}

TEST_CASE("compile: room for no program is refused") {
  const Step step = [](std::span<const Tensor> in) { return std::vector<Tensor>{in[0]}; };
  CHECK_THROWS_AS(compile(step, {.programs = 0}), ValueError);
}

TEST_CASE("compile: what cannot be captured runs eagerly, or is an error that names it") {
  Tensor w = leaf({8, 8}), kept, history = mul(w, 2);
  struct Case {
    std::string_view what, message;
    Step step;
  };
  const std::vector<Case> cases{
      {"item", "the host reads",
       [&](std::span<const Tensor> in) {
         const Tensor y = matmul(in[0], w);
         return std::vector<Tensor>{mul(y, sum(y.detach()).item() > 0 ? 2.0 : 3.0)};
       }},
      {"a tensor put aside", "still held",
       [&](std::span<const Tensor> in) {
         kept = matmul(in[0], w);
         return std::vector<Tensor>{gelu(kept)};
       }},
      {"a tensor put aside that a gradient keeps too", "still held",
       [&](std::span<const Tensor> in) {
         kept = matmul(in[0], w).detach();
         return std::vector<Tensor>{gelu(kept), matmul(kept, w)};
       }},
      {"host numbers", "random numbers",
       [&](std::span<const Tensor> in) {
         return std::vector<Tensor>{mul(
             matmul(in[0], w), static_cast<double>(Context::current().generator().reserve(1).offset % 7))};
       }},
      {"history from elsewhere", "history",
       [&](std::span<const Tensor> in) { return std::vector<Tensor>{matmul(in[0], history)}; }},
      {"a hook inside", "hook",
       [&](std::span<const Tensor> in) {
         const Tensor y = matmul(in[0], w);
         static std::vector<Subscription> hooks;
         hooks.push_back(register_hook(y, [](const Tensor& g) { return mul(g, 2); }));
         return std::vector<Tensor>{gelu(y)};
       }},
  };
  for (const Case& c : cases) {
    INFO(c.what);
    const Compiled loose = compile(c.step), strict = compile(c.step, {.full_graph = FullGraph::yes});
    for (int i = 0; i < 3; ++i) {
      const auto run = [&](const Step& step) {
        manual_seed(static_cast<std::uint64_t>(i));
        w.set_grad({});
        Tensor x = input(i).requires_grad_();
        std::vector<Tensor> y = step(std::span(&x, 1));
        sum(square(y.back())).backward({}, true);
        for (Tensor& t : y) t = t.detach();
        y.push_back(w.grad());
        y.push_back(x.grad());
        return y;
      };
      CHECK(same_bits(run(c.step), run(loose)));
    }
    CHECK(loose.stats().hits == 0);
    CHECK(loose.stats().frames == 1);
    CHECK(loose.stats().eager == 2);
    CHECK_THAT(loose.text(), ContainsSubstring(std::string(c.message)));
    manual_seed(0);
    Tensor x = input(0).requires_grad_();
    CHECK_THROWS_WITH(strict({x}), ContainsSubstring(std::string(c.message)));
  }
}

TEST_CASE("compile: a forward without a backward, and two forwards before the backwards in any order") {
  for (const bool reversed : {false, true}) {
    const Net eager, net;
    const Compiled compiled = compile(net);
    for (int round = 0; round < 3; ++round) {
      const auto run = [&](const auto& fn, const Net& of) {
        manual_seed(static_cast<std::uint64_t>(round));
        fn({input(7)});
        const Tensor a = fn({input(1)})[0], b = fn({input(2)})[0];
        sum(square(reversed ? b : a)).backward();
        sum(square(reversed ? a : b)).backward();
        return of.grads();
      };
      const auto plain = [&](std::initializer_list<Tensor> in) { return eager({in.begin(), in.size()}); };
      CHECK(same_bits(run(plain, eager), run(compiled, net)));
    }
  }
}

TEST_CASE("compile: retain_graph and other needed gradients, of traced and replayed calls") {
  const Net eager, net;
  const Compiled compiled = compile(net);
  for (int call = 0; call < 4; ++call) {
    const auto run = [&](const Step& fn, const Net& of) {
      manual_seed(9);
      Tensor x = input(call).requires_grad_();
      const Tensor y = fn({&x, 1})[0];
      std::vector<Tensor> seen;
      const auto see = [&](const std::vector<Tensor>& more) {
        seen.insert(seen.end(), more.begin(), more.end());
      };
      see(grad(sum(square(y)), {of.w1}, {}, {.retain_graph = true}));
      see(grad(sum(y), {x, of.b0}, {}, {.retain_graph = true}));
      see(grad(sum(square(y)), {x, of.w0}, {}, {.create_graph = true}));
      sum(square(y)).backward({}, true);
      sum(square(y)).backward();
      see(of.grads());
      CHECK_THROWS_AS(sum(y).backward(), StateError);
      return seen;
    };
    const std::vector<Tensor> a = run(eager, eager), b = run(compiled, net);
    REQUIRE(a.size() == b.size());
    for (std::size_t i = 0; i < a.size(); ++i) {
      INFO("call " << call << ", gradient " << i);
      CHECK(same_bits(a[i], b[i]));
    }
  }
  CHECK(compiled.stats().hits == 3);
}

TEST_CASE("compile: second derivatives have eager's bits, of traced and replayed calls, dropout included") {
  for (const DType dtype : {DType::f32, DType::f64, DType::bf16}) {
    const Net eager(dtype), net(dtype);
    const Compiled compiled = compile(net);
    for (int call = 0; call < 6; ++call) {
      const auto run = [&](const Step& fn, const Net& of) {
        manual_seed(9);
        Tensor x = input(call, dtype).requires_grad_();
        const Tensor y = fn({&x, 1})[0];
        if (call == 3) sum(y).backward({}, true);  // by a program, before
        const std::vector<Tensor> first = grad(sum(square(y)), {x, of.w0}, {}, {.create_graph = true});
        const Tensor slopes = add(sum(square(first[0])), sum(square(first[1])));
        // Alone, and beside what reads the call's result.
        if (call % 2 == 0) return grad(slopes, {x, of.w0, of.w1, of.b0});
        add(slopes, sum(exp(y))).backward({}, call == 5, call == 5);
        if (call == 5) sum(y).backward();
        std::vector<Tensor> seen = of.grads();
        seen.push_back(x.grad());
        for (Tensor& t : seen) t = clone(t.detach());
        x.set_grad({});  // it has a history, which leads to x
        of.zero_grad();
        return seen;
      };
      const std::vector<Tensor> a = run(eager, eager), b = run(compiled, net);
      REQUIRE(a.size() == b.size());
      for (std::size_t i = 0; i < a.size(); ++i) {
        INFO(name_of(dtype) << ", call " << call << ", gradient " << i);
        CHECK(same_bits(a[i], b[i]));
      }
    }
    CHECK(compiled.stats().hits == 5);
  }
}

TEST_CASE("compile: a backward that is recorded goes through a call's ops, where they were recorded") {
  const Net eager, net;
  const Compiled compiled = compile(net);
  for (int call = 0; call < 4; ++call) {
    const auto run = [&](const Step& fn, const Net& of) {
      manual_seed(9);
      Tensor x = input(call).requires_grad_();
      const Tensor before = exp(x), y = fn({&before, 1})[0];
      std::vector<Tensor> seen;
      const auto see = [&](const Tensor& t) -> Tensor { return seen.push_back(t.detach()), Tensor(); };
      // Hooks and targets, before and after.
      const Subscription first = register_hook(y, see);
      const Tensor slope = grad(sum(square(y)), {y, before}, {}, {.create_graph = true})[1];
      const Subscription second = register_hook(y, see);
      seen.push_back(grad(sum(square(slope)), {y}, {}, {.retain_graph = true})[0]);
      // Another call in between, and one that is not recorded.
      const Tensor wide = cat({y, y}, 1), z = fn({&wide, 1})[0];
      seen.push_back(grad(add(sum(square(z)), sum(slope)), {x, of.w0}, {}, {.create_graph = true})[1]);
      add(sum(exp(y)), sum(square(slope))).backward();
      CHECK_THROWS_AS(sum(y).backward(), StateError);
      CHECK_THROWS_AS(grad(sum(y), {x}, {}, {.create_graph = true}), StateError);
      for (Tensor& t : seen) t = t.detach();
      for (const Tensor& t : of.grads()) seen.push_back(t);
      seen.push_back(x.grad());
      return seen;
    };
    const std::vector<Tensor> a = run(eager, eager), b = run(compiled, net);
    REQUIRE(a.size() == b.size());
    REQUIRE(a.size() > 8);
    for (std::size_t i = 0; i < a.size(); ++i) {
      INFO("call " << call << ", tensor " << i);
      CHECK(same_bits(a[i], b[i]));
    }
  }
  CHECK(compiled.stats().hits >= 6);
}

TEST_CASE("compile: of results that were computed of each other gradients are whole, and hooks see all") {
  const Step step = [](std::span<const Tensor> in) {
    const Tensor a = exp(in[0]), b = mul(a, a), c = sin(in[0]);
    return std::vector<Tensor>{a, b, c, transpose(b, 0, 1)};
  };
  const Compiled compiled = compile(step);
  for (int call = 0; call < 4; ++call)
    for (int what = 0; what < 4; ++what) {
      INFO("call " << call << ", " << what);
      const auto run = [&](const Step& fn) {
        Tensor x = input(call).requires_grad_();
        const std::vector<Tensor> y = fn({&x, 1});
        std::vector<Tensor> seen;
        const auto see = [&](const Tensor& g) -> Tensor { return seen.push_back(clone(g)), Tensor(); };
        std::vector<Subscription> hooks;
        if (what % 2 == 1)
          for (const std::size_t i : {2, 0, 1}) hooks.push_back(register_hook(y[i], see));
        const Tensor loss = add(add(sum(y[1]), sum(y[2])), sum(exp(y[3])));
        if (what < 2)
          for (const Tensor& g : grad(loss, {y[2], x, y[0], y[1]}, {}, {.retain_graph = true}))
            seen.push_back(g);
        loss.backward();
        seen.push_back(x.grad());
        return seen;
      };
      const std::vector<Tensor> eager = run(step);
      CHECK(eager.size() == std::size_t{1} + (what % 2) * (what < 2 ? 6 : 3) + (what < 2 ? 4 : 0));
      CHECK(same_bits(eager, run(compiled)));
    }
  CHECK(compiled.stats().hits == 15);
}

TEST_CASE(
    "compile: gradients inside are those of the call, and what goes beyond its inputs is not a program") {
  const Step first = [](std::span<const Tensor> in) { return std::vector<Tensor>{square(in[0])}; };
  const Step slope = [](std::span<const Tensor> in) {
    return grad(sum(add(tanh(in[0]), in[1])), {in[0]}, {}, {.create_graph = true});
  };
  for (const bool related : {false, true}) {
    const Compiled of_x = compile(first), compiled = compile(slope);
    for (int call = 0; call < 4; ++call) {
      const auto run = [&](const Step& one, const Step& two) {
        Tensor x = input(call).requires_grad_(), z = input(9).requires_grad_();
        std::vector<Tensor> in{one({&x, 1})[0], {}};
        in[1] = call < 2 ? z : related ? exp(in[0]) : exp(z);
        const Tensor y = two(in)[0];
        sum(square(y)).backward();
        return std::vector{y.detach(), x.grad()};
      };
      INFO("call " << call << ", " << related);
      CHECK(same_bits(run(first, slope), run(of_x, compiled)));
    }
    INFO(compiled.text());
    CHECK(compiled.stats().hits > 0);
  }
}

TEST_CASE("compile: outputs that are inputs, views, found outside, repeated, integers or without gradients") {
  Tensor w = leaf({8, 8}), constant = randn({3});
  const Step step = [&](std::span<const Tensor> in) {
    const Tensor y = matmul(in[0], w);
    return std::vector<Tensor>{
        in[0], transpose(in[0], 0, 1), w,          transpose(w, 0, 1), constant, y,
        y,     transpose(y, 0, 1),     y.detach(), argmax(y, 1),       in[1],    Tensor()};
  };
  const Compiled compiled = compile(step);
  for (int i = 0; i < 4; ++i) {
    const auto run = [&](const Step& fn) {
      w.set_grad({});
      manual_seed(static_cast<std::uint64_t>(i));
      std::vector<Tensor> in{randn({8, 8}).requires_grad_(), randn({2})};
      const std::vector<Tensor> out = fn(in);
      CHECK(out[0].is(in[0]));
      CHECK(out[2].is(w));
      CHECK(out[4].is(constant));
      CHECK(out[10].is(in[1]));
      CHECK(out[5].is(out[6]));
      CHECK(out[5].storage_ref() == out[7].storage_ref());
      CHECK(out[1].storage_ref() == in[0].storage_ref());
      CHECK(out[3].storage_ref() == w.storage_ref());
      Tensor loss = zeros({});
      double weight = 1;
      for (const std::size_t k : {0, 1, 2, 3, 5, 6, 7}) loss = add(loss, mul(sum(square(out[k])), weight++));
      std::vector<Tensor> seen;
      for (const Tensor& t : out) {
        seen.push_back(t.defined() ? clone(t.detach()) : t);
        if (!t.defined()) continue;
        seen.push_back(Tensor::scalar(t.requires_grad()));
        seen.push_back(Tensor::scalar(t.is_view()));
        seen.push_back(Tensor::scalar(t.is_leaf()));
      }
      loss.backward();
      seen.push_back(w.grad());
      seen.push_back(in[0].grad());
      return seen;
    };
    const std::vector<Tensor> a = run(step), b = run(compiled);
    REQUIRE(a.size() == b.size());
    for (std::size_t k = 0; k < a.size(); ++k) {
      INFO("call " << i << ", " << k);
      CHECK(same_bits(a[k], b[k]));
    }
  }
  CHECK(compiled.stats().hits == 3);
}

TEST_CASE("compile: writes to inputs and to what is found outside are repeated") {
  Tensor w = leaf({8, 8});
  const Tensor running = zeros({8});
  const Step step = [&](std::span<const Tensor> in) {
    add_(in[1], 1);
    {
      const NoGrad guard;
      add_(running, sum(in[0], 0));
    }
    return std::vector<Tensor>{add(matmul(in[0], w), in[1])};
  };
  const Compiled compiled = compile(step);
  for (int i = 0; i < 4; ++i) {
    const auto run = [&](const Step& fn) {
      w.set_grad({});
      fill_(running, i);
      manual_seed(static_cast<std::uint64_t>(i));
      std::vector<Tensor> in{randn({8, 8}), zeros({8})};
      const std::uint32_t version = running.storage().version();
      std::vector<Tensor> out = fn(in);
      CHECK(running.storage().version() == version + 1);
      sum(square(out[0])).backward();
      return std::vector<Tensor>{out[0].detach(), w.grad(), clone(running), in[1]};
    };
    CHECK(same_bits(run(step), run(compiled)));
  }
  CHECK(compiled.stats().hits == 3);
}

TEST_CASE("compile: a kept value that is changed before the backward is the error that it is eagerly") {
  const Net net;
  const Compiled compiled = compile(net);
  for (int i = 0; i < 3; ++i) {
    const Tensor x = input(0), y = compiled({x})[0];
    add_(x, 1);
    CHECK_THROWS_WITH(sum(y).backward(), ContainsSubstring("changed in place"));
    const Tensor z = compiled({input(0)})[0];
    {
      const NoGrad guard;
      mul_(net.w1, 1);
    }
    CHECK_THROWS_WITH(sum(z).backward(), ContainsSubstring("changed in place"));
    net.zero_grad();
    sum(compiled({input(0)})[0]).backward();
    CHECK(net.w0.grad().defined());
  }
}

TEST_CASE("compile: an exception leaves nothing behind") {
  const Net net;
  bool throws = true;
  const Compiled compiled = compile([&](std::span<const Tensor> in) {
    auto y = net(in);
    if (throws) throw ValueError("no");
    return y;
  });
  CHECK_THROWS_AS(compiled({input(0)}), ValueError);
  CHECK(compiled.stats().programs == 0);
  throws = false;
  for (int i = 0; i < 2; ++i) {
    manual_seed(3);
    const Tensor a = compiled({input(0)})[0];
    manual_seed(3);
    const Tensor x = input(0);
    CHECK(same_bits(a, net({&x, 1})[0]));
  }
  const Subscription hook = register_hook(net.w0, [](const Tensor&) -> Tensor { throw ValueError("hook"); });
  CHECK_THROWS_AS(sum(compiled({input(0)})[0]).backward(), ValueError);
}

TEST_CASE(
    "compile: gradients of leaves' hooks, of hooks on outputs, and of uses beside the call are as eager") {
  Tensor w = leaf({8, 8}, DType::bf16);
  const Step step = [&](std::span<const Tensor> in) {
    return std::vector<Tensor>{matmul(gelu(matmul(matmul(in[0], w), w)), w)};
  };
  const Compiled compiled = compile(step);
  int heard = 0;
  const Subscription hook = register_hook(w, [&](const Tensor& g) {
    ++heard;
    return mul(g, 2);
  });
  for (int i = 0; i < 3; ++i) {
    const auto run = [&](const Step& fn) {
      w.set_grad({});
      manual_seed(static_cast<std::uint64_t>(i));
      Tensor x = to(randn({8, 8}), DType::bf16).requires_grad_();
      const Tensor h = mul(x, 2);
      const Tensor y = fn(std::span(&h, 1))[0];
      const Subscription on_y = register_hook(y, [](const Tensor& g) { return mul(g, 3); });
      sum(square(add(y, h))).backward();
      return std::vector<Tensor>{w.grad(), x.grad(), y.detach()};
    };
    CHECK(same_bits(run(step), run(compiled)));
  }
  CHECK(heard == 6);
  CHECK(compiled.stats().hits == 2);
}

TEST_CASE("compile: a leaf of 16 bits that is used inside and beside is summed as eagerly, in f32 or not") {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32})
    for (const Executor executor : {Executor::replay, Executor::partition, Executor::fused})
      for (int uses = 0; uses < 27; ++uses) {
        const int inside = uses % 3 + 1, before = uses / 3 % 3, behind = uses / 9;
        const double large = dtype == DType::f16 ? 0x1p10 : 0x1p24;  // what is added to it shows in no f32
        const Tensor w = leaf({40}, dtype), v = leaf({40}, dtype);
        const Step step = [&](std::span<const Tensor> in) {
          Tensor y = mul(in[0], in[1]);
          for (int i = 0; i < inside; ++i) y = add(y, mul(w, i + 1 < inside ? 0.7 + i : -large));
          return std::vector<Tensor>{add(y, mul(in[1], 0.3))};
        };
        const Compiled compiled = compile(step, {.executor = executor});
        for (int call = 0; call < 3; ++call) {
          const auto run = [&](const Step& fn) {
            for (Tensor leaf : {w, v}) leaf.set_grad({});
            manual_seed(static_cast<std::uint64_t>(call));
            Tensor y = to(randn({40}), dtype);
            for (int i = 0; i < before; ++i) y = add(mul(y, w), v);
            y = fn(std::vector{y, v})[0];
            y = fn(std::vector{y, v})[0];
            for (int i = 0; i < behind; ++i) y = add(y, mul(w, i == 0 ? 2 * large : 0.1));
            y.backward(to(randn({40}), dtype));
            return std::vector<Tensor>{w.grad(), v.grad()};
          };
          INFO(name_of(dtype) << ", inside " << inside << ", before " << before << ", behind " << behind);
          CHECK(same_bits(run(step), run(compiled)));
        }
      }
}

TEST_CASE("compile: inside capture, recompute and another compiled call the ops are theirs") {
  const Net net;
  const Compiled inner = compile(net);
  const Compiled outer =
      compile([&](std::span<const Tensor> in) { return std::vector<Tensor>{gelu(inner(in)[0])}; });
  for (int i = 0; i < 3; ++i) outer({input(i)});
  CHECK(outer.stats().hits == 2);
  CHECK(inner.stats().frames == 0);
  Program program = capture([&](std::span<const Tensor> in) { return inner(in); }, {input(0)});
  CHECK(inner.stats().frames == 0);
  CHECK(program.size() > 3);
  const Tensor x = input(0).requires_grad_();
  sum(recompute([&] { return inner({x})[0]; })).backward();
  CHECK(x.grad().defined());
}

TEST_CASE("compile: a call whose backward inside goes through what its input was computed by runs eagerly") {
  const auto gradients = [](bool compiles) {
    Tensor w = ones({3}).requires_grad_();
    const Step step = [](std::span<const Tensor> in) {
      const Tensor loss = sum(square(in[0]));
      loss.backward();
      return std::vector<Tensor>{loss.detach()};
    };
    const Compiled compiled = compile(step);
    std::vector<float> all;
    for (int call = 1; call < 4; ++call) {
      const std::vector<Tensor> in{mul(w, call)};
      all.push_back(static_cast<float>((compiles ? compiled(in) : step(in))[0].item()));
      for (const float g : w.grad().to_vector<float>()) all.push_back(g);
    }
    if (compiles) CHECK_THAT(compiled.text(), ContainsSubstring("a backward inside may go through what"));
    return all;
  };
  CHECK(gradients(true) == gradients(false));
}

TEST_CASE("compile: recompute is honoured, its dropout drawn again, in any backward") {
  const Net eager, net;
  const auto region = [](const Net& of) {
    return [&of](std::span<const Tensor> in) {
      const Tensor x = mul(in[0], 0.5);
      const Tensor h = recompute([&] { return dropout(gelu(linear(gelu(x), of.w0, of.b0)), 0.25); });
      return std::vector<Tensor>{recompute([&] { return linear(gelu(h), of.w1, {}); })};
    };
  };
  const Step plain = region(eager);
  const Compiled compiled = compile(region(net), {.full_graph = FullGraph::yes});
  for (int i = 0; i < 5; ++i) {
    const auto run = [&](const Step& fn, const Net& of) {
      manual_seed(static_cast<std::uint64_t>(20 + i));
      Tensor x = narrow(input(i, DType::f32, 9), 0, i, 4).detach().requires_grad_();
      const Tensor y = fn({&x, 1})[0];
      randn({3});
      std::vector<Tensor> seen = grad(sum(y), {of.w1}, {}, {.retain_graph = true});
      if (i == 3) seen.push_back(grad(sum(square(y)), {of.b0, x}, {}, {.create_graph = true})[0]);
      sum(square(y)).backward({}, i % 2 == 0);
      if (i % 2 == 0) sum(square(y)).backward();
      for (const Tensor& t : of.grads()) seen.push_back(clone(t));
      seen.push_back(x.grad());
      return seen;
    };
    INFO("call " << i);
    CHECK(same_bits(run(plain, eager), run(compiled, net)));
  }
  CHECK(compiled.stats().hits >= 3);
}

TEST_CASE("compile: inputs that share memory are told apart by where they lie in it") {
  const Step step = [](std::span<const Tensor> in) { return std::vector<Tensor>{add(mul(in[0], 3), in[1])}; };
  const Compiled compiled = compile(step);
  const Tensor all = randn({8, 3});
  const auto rows = [&](std::int64_t a, std::int64_t b) {
    return std::vector{narrow(all, 0, a, 2), narrow(all, 0, b, 2)};
  };
  for (const auto& [a, b] : {std::pair(0, 4), {0, 3}, {1, 5}, {0, 4}, {2, 2}, {5, 1}}) {
    const std::vector<Tensor> in = rows(a, b);
    CHECK(same_bits(step(in), compiled(std::span(in))));
  }
  CHECK(compiled.stats().hits == 2);
}

TEST_CASE("compile: an input at another place of its memory is kept and read there") {
  Tensor w = leaf({4, 4});
  const Step step = [&](std::span<const Tensor> in) { return std::vector<Tensor>{matmul(in[0], w)}; };
  const Tensor all = randn({12, 4});
  for (const int traced : {0, 1, 2}) {  // the call whose backward is the first
    const Compiled compiled = compile(step);
    for (const int at : {0, 1, 2, 3, 0, 2}) {
      const auto run = [&](const Step& fn) {
        w.set_grad({});
        const Tensor x = narrow(all, 0, 3 * at, 3);
        const Tensor y = fn({&x, 1})[0];
        if (compiled.stats().hits >= static_cast<std::size_t>(traced)) sum(square(y)).backward();
        return std::vector<Tensor>{w.grad()};
      };
      INFO("the first backward is of call " << traced << ", now at " << at);
      const auto got = run(compiled);
      CHECK(same_bits(got, run(step)));
    }
    CHECK(compiled.stats().hits == 5);
  }
}

TEST_CASE("compile: a leaf that is found outside and given as an input gets both gradients") {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Tensor w = leaf({4, 4}, dtype);
    const Step step = [&](std::span<const Tensor> in) {
      return std::vector<Tensor>{matmul(matmul(in[0], w), w)};
    };
    const Compiled compiled = compile(step);
    for (int i = 0; i < 4; ++i) {
      const auto run = [&](const Step& fn) {
        w.set_grad({});
        manual_seed(static_cast<std::uint64_t>(i));
        const Tensor x = i % 2 == 0 ? to(randn({4, 4}), dtype).requires_grad_() : w;
        sum(square(fn({&x, 1})[0])).backward();
        return std::vector<Tensor>{w.grad(), x.grad()};
      };
      INFO("call " << i << ", " << name_of(dtype));
      CHECK(same_bits(run(step), run(compiled)));
    }
  }
}

TEST_CASE("compile: what comes from uses before and after a call adds up in the eager order") {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    Tensor w = leaf({8, 8}, dtype), gain = leaf({8}, dtype), bias = leaf({8}, dtype);
    const Step step = [&](std::span<const Tensor> in) {
      return std::vector<Tensor>{add(in[0], matmul(layer_norm(in[0], gain, bias), w)), mul(in[0], 3)};
    };
    const Compiled compiled = compile(step);
    for (int i = 0; i < 3; ++i) {
      const auto run = [&](const Step& fn) {
        for (const Tensor& t : {w, gain, bias}) t.set_grad({});
        manual_seed(static_cast<std::uint64_t>(i));
        Tensor x = to(randn({8, 8}), dtype).requires_grad_();
        const Tensor h = mul(x, 1.5), before = matmul(h, w);
        std::vector<Tensor> y = fn({&h, 1});
        y = fn({&y[0], 1});
        const Tensor after = matmul(add(h, y[1]), w);
        sum(square(add(add(before, y[0]), add(after, h)))).backward();
        return std::vector<Tensor>{w.grad(), gain.grad(), bias.grad(), x.grad()};
      };
      INFO("call " << i << ", " << name_of(dtype));
      CHECK(same_bits(run(step), run(compiled)));
    }
  }
}

TEST_CASE(
    "compile: a backward is told apart by the strides of the gradients that it is given, and by which they "
    "are") {
  Tensor w = leaf({8, 8});
  const Step step = [&](std::span<const Tensor> in) {
    const Tensor y = matmul(gelu(in[0]), w);
    return std::vector<Tensor>{y, gelu(y)};
  };
  const Compiled compiled = compile(step);
  for (int i = 0; i < 12; ++i) {
    const auto run = [&](const Step& fn) {
      w.set_grad({});
      manual_seed(static_cast<std::uint64_t>(i));
      Tensor x = randn({8, 8}).requires_grad_();
      const Tensor dense = randn({8, 8}), row = expand(randn({8}), {8, 8});
      const std::vector<Tensor> gradients{dense, transpose(dense, 0, 1), row};
      const Tensor y = fn({&x, 1})[i % 4 == 3 ? 1 : 0];
      y.backward(gradients[static_cast<std::size_t>(i) % 3]);
      return std::vector<Tensor>{w.grad(), x.grad()};
    };
    INFO("call " << i);
    CHECK(same_bits(run(step), run(compiled)));
  }
  CHECK(compiled.stats().hits == 11);
}

namespace {

/// An op whose gradient is its second input, or a view of it.
struct KeptSlope {
  static constexpr std::string_view name = "kept_slope";
  static constexpr Arity arity = 2;
  bool turned = false, also = false;
  Specs infer(SpecSpan in) const { return {in[0]}; }
  void run(Inputs in, Outputs out) const { copy_(out[0], in[0]); }
  Reads reads(Mask) const { return {.inputs = 0b11}; }
  Tensors grad(const GradArgs& args) const {
    const Tensor& slope = args.inputs[1];
    return {turned ? transpose(slope, 0, 1) : slope, also ? mul(slope, 2.0) : Tensor{}};
  }
  void fields(auto&& on) const {
    on("turned", turned);
    on("also", also);
  }
  bool operator==(const KeptSlope&) const = default;
};

}  // namespace

TEST_CASE("compile: a gradient that is what the forward kept, or a view of it, is this call's") {
  for (const KeptSlope& op : {KeptSlope{}, KeptSlope{.turned = true}, KeptSlope{.also = true}})
    for (const Executor executor : {Executor::replay, Executor::partition, Executor::fused})
      for (const MemoryBudget& memory : {MemoryBudget{}, MemoryBudget::least()}) {
        const Step step = [&](std::span<const Tensor> in) {
          return std::vector<Tensor>{sum(apply(op, in[0], tanh(mul(in[1], 2.0))))};
        };
        const Compiled compiled = compile(step, {.executor = executor, .memory = memory});
        for (int call = 0; call < 4; ++call) {
          const auto run = [&](const auto& f) {
            manual_seed(static_cast<std::uint64_t>(call));
            const std::vector<Tensor> in{randn({4, 4}).requires_grad_(), randn({4, 4}).requires_grad_()};
            f(in)[0].backward();
            return std::vector<Tensor>{in[0].grad(), op.also ? in[1].grad() : Tensor{}};
          };
          INFO("call " << call << " turned " << op.turned << " also " << op.also);
          const std::vector<Tensor> got = run(compiled), wanted = run(step);
          CHECK(same_bits(got[0], wanted[0]));
          if (op.also) CHECK(same_bits(got[1], wanted[1]));
        }
      }
}

TEST_CASE("compile: calls of a thread that is over are counted, whoever calls next") {
  const Compiled compiled = compile([](std::span<const Tensor> in) { return std::vector{mul(in[0], 2.0)}; });
  std::thread([&] {
    for (int call = 0; call < 10; ++call) compiled({ones({3})});
  }).join();
  CHECK(compiled.stats().hits == 9);
  for (int call = 0; call < 3; ++call) compiled({ones({3})});
  CHECK(compiled.stats().hits == 11);
  CHECK(compiled.stats().misses == 2);
}
