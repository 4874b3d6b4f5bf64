// Fused regions: one op, to the bit what its members give one after the other, whatever lies how.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <sstream>

#include "autograd/capture/effects.h"
#include "autograd/capture/min_cut.h"
#include "autograd/capture/passes/fuse.h"
#include "autograd/capture/program.h"
#include "autograd/compile.h"
#include "runtime/apply.h"
#include "runtime/cpu/elementwise_loop.h"
#include "runtime/cpu/region_plan.h"
#include "runtime/fused_region.h"
#include "runtime/ops.h"
#include "runtime/ops/listing.h"
#include "tests/autograd/fused_steps.h"
#include "tests/autograd/random_step.h"
#include "tests/catch.h"
#include "tests/runtime/op_cases.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;

namespace {

/// Members of each region of a program, which the CPU runs tile by tile.
std::vector<std::size_t> regions(const Program::Impl& program) {
  std::vector<std::size_t> sizes;
  for (const Program::Impl::Step& step : program.steps)
    if (const ops::Region* region = ops::region_of(*step.op)) {
      CHECK(cpu::RegionPlan(*region).complete);
      sizes.push_back(region->members.size());
    }
  return sizes;
}

/// A tensor of these numbers that lies otherwise than its shape says.
Tensor apart(const Tensor& t, int how) {
  switch (how % 3) {
    case 0:
      return t;
    case 1: {  // part of wider rows
      Shape wide = t.shape();
      wide[t.rank() - 1] += 3;
      const Tensor all = zeros(wide, {t.dtype()}), part = narrow(all, -1, 1, t.shape().back());
      copy_(part, t);
      return part;
    }
    default: {
      const Tensor turned = transpose(contiguous(transpose(t, 0, 1)), 0, 1);
      return turned;
    }
  }
}

/// An application's ops.
struct Twice : Functor<"twice", 1, floating_dtypes> {
  static constexpr bool differentiable = false;
  constexpr auto operator()(auto x) const { return x + x; }
};
struct Replaced : Functor<"replaced", 1, floating_dtypes> {
  static constexpr bool differentiable = false;
  constexpr auto operator()(auto x) const { return x; }
};
void thrice(const Replaced&, Inputs in, Outputs out) { copy_(out[0], mul(in[0], 3.0)); }

}  // namespace

TEST_CASE("fuse: an application's own op is a member, but for one whose kernel it replaced") {
  cpu::add_elementwise<Twice>();
  cpu::add_elementwise<Replaced>();
  add_kernel<thrice>(DeviceType::cpu);
  const std::vector<Tensor> in{numbers({3, 9}, f32, 1)};
  const Step own = [](std::span<const Tensor> x) {
    return std::vector<Tensor>{exp(sherd::apply(Twice{}, neg(x[0])))};
  };
  CHECK(regions(fused(own, in)) == std::vector<std::size_t>{3});
  check_bits(own, in);
  const Step replaced = [](std::span<const Tensor> x) {
    return std::vector<Tensor>{exp(sherd::apply(Replaced{}, neg(x[0])))};
  };
  CHECK(regions(fused(replaced, in)).empty());
  check_bits(replaced, in);
}

TEST_CASE("fuse: ops over one space run as one, and nobody stores what nobody else reads") {
  const Step step = [](std::span<const Tensor> in) {
    const Tensor scaled = mul(in[0], rsqrt(add(mean(square(in[0]), {-1}, Keep::dims), 1e-5)));
    return std::vector<Tensor>{add(silu(mul(scaled, in[1])), in[0])};
  };
  const Program::Impl program = fused(step, {randn({4, 8}), randn({8})});
  CHECK(regions(program) == std::vector<std::size_t>{8});
  CHECK(program.steps.size() == 1);
  CHECK(program.buffers.empty());
  CHECK_THAT(program.text(),
             ContainsSubstring("fused[ops=2 = square(0), 3 = sum[axes=2, keep=true, mean=true](2), 4 = "
                               "add[right=1e-05](3), 5 = rsqrt(4), 6 = mul(0 5), 7 = mul(6 1), 8 = "
                               "silu(7), 9 = add(8 0)]"));
}

TEST_CASE("fuse: every elementwise op has its bits as a member, on any dtype, size and layout") {
  std::size_t tried = 0;
  for (const ElementwiseListing& listing : elementwise_listing())
    for (const DType dtype : all_dtypes) {
      if (!listing.dtypes.contains(dtype)) continue;
      for (const Shape& shape : {Shape{1, 1}, Shape{3, 5}, Shape{2, 70}, Shape{1, 1500}, Shape{40, 33}})
        for (int how = 0; how < 8; ++how) {
          INFO(listing.op->name() << " of " << name_of(dtype) << " " << shape << ", way " << how);
          std::vector<Tensor> in;
          for (int k = 0; k < listing.arity; ++k) {
            // An element for each, for each row, for each column, one for all, or lying apart.
            const int kind = how == 0 ? 0 : (how + k) % 5;
            const Shape own = kind == 1   ? Shape{shape[0], 1}
                              : kind == 2 ? Shape{shape[1]}
                              : kind == 3 ? Shape{}
                                          : shape;
            Tensor t = numbers(own, dtype, static_cast<unsigned>(10 * how + k), listing.low, listing.high);
            if (k == 0 && listing.arity == 3) t = greater(numbers(own, f32, static_cast<unsigned>(how)), 0.0);
            // Of two that are NaN the same one comes out.
            if (is_floating(t.dtype()) && how >= 6) fill_(t, k % 2 == 0 ? std::nan("") : -std::nan(""));
            in.push_back(kind == 4 ? apart(t, how) : t);
          }
          const Step step = [&](std::span<const Tensor> x) {
            Tensors given;
            for (int k = 0; k < listing.arity; ++k) {
              const Tensor& own = x[static_cast<std::size_t>(k)];
              // Of those that are as large as the space, what another member gives.
              given.push_back(own.shape() == shape ? where(equal(own, own), own, own) : own);
            }
            return std::vector<Tensor>{apply(*listing.op, Inputs(given.begin(), given.size()))[0]};
          };
          Program::Impl program = fused(step, in);
          tried += regions(program).size();
          check_bits(step, in, program);
        }
    }
  CHECK(tried > 4000);
}

TEST_CASE("fuse: casts and sums of rows are members, of 16 bits as they round") {
  for (const DType dtype : {f64, f32, bf16, f16})
    for (const DType other : {f64, f32, bf16, f16})
      for (const std::int64_t columns : {2, 17, 64, 65, 512, 1000, 2048, 16384}) {
        INFO(name_of(dtype) << " by " << name_of(other) << ", " << columns << " columns");
        const Step step = [&](std::span<const Tensor> in) {
          const Tensor x = to(in[0], other);
          const Tensor centred = sub(x, mean(x, {-1}, Keep::dims));
          const Tensor scaled = div(centred, sqrt(add(mean(square(centred), {-1}, Keep::dims), 1e-5)));
          return std::vector<Tensor>{to(mul(scaled, to(in[1], other)), dtype), sum(centred, {-1})};
        };
        const std::vector<Tensor> in{numbers({5, columns}, dtype, 1), numbers({columns}, dtype, 2)};
        Program::Impl program = fused(step, in);
        CHECK(regions(program).size() == 1);
        check_bits(step, in, program);
      }
}

TEST_CASE("fuse: rows that are too long for sums of one part are no members' and stay right") {
  const Step step = [](std::span<const Tensor> in) {
    const Tensor x = exp(in[0]);
    return std::vector<Tensor>{mul(x, sum(x, {-1}, Keep::dims))};
  };
  check_bits(step, {numbers({2, ops::most_columns + 1}, f32, 1)});
}

TEST_CASE("fuse: what is written in place is read before and after as the step does") {
  const Step step = [](std::span<const Tensor> in) {
    const Tensor x = matmul(in[0], in[1]);
    const Tensor before = mul(x, 2.0);
    add_(x, in[1]);
    const Tensor y = exp(mul(x, 0.01));
    mul_(y, before);
    mul_(x, y);
    return std::vector<Tensor>{y, add(y, x)};
  };
  for (const DType dtype : {f32, bf16}) {
    const std::vector<Tensor> in{numbers({70, 70}, dtype, 1), numbers({70, 70}, dtype, 2)};
    Program::Impl program = fused(step, in);
    CHECK(regions(program) == std::vector<std::size_t>{7});
    check_bits(step, in, program);
  }
}

TEST_CASE(
    "fuse: memory from outside is written in the order of the step, whoever else knows it and whatever "
    "throws") {
  std::vector<float> memory(12, 1);
  const auto show = [&] { return from_blob(memory.data(), {3, 4}, f32); };
  const Tensor a = show(), b = show(), product = ones({4, 2});
  const Step step = [&](std::span<const Tensor> in) {
    const Tensor x = mul(in[0], 2.0);
    add_(a, 1.0);
    const Tensor y = matmul(b, product);
    mul_(a, 3.0);
    return std::vector<Tensor>{add(x, 1.0), y};
  };
  Program::Impl program = fused(step, {ones({3, 4})});
  std::ranges::fill(memory, 1.0f);
  const std::vector<Tensor> got = program.replay({ones({3, 4})});
  CHECK(same_bits(got[1], full({3, 2}, 8.0)));
  CHECK(memory == std::vector<float>(12, 6.0f));

  const Tensor count = zeros({2});
  const Step throwing = [&](std::span<const Tensor> in) {
    add_(count, 1.0);
    mul_(count, 2.0);
    return std::vector<Tensor>{index_select(in[0], 0, in[1])};
  };
  const Tensor good = full({1}, 0, {i64}), bad = full({1}, 7, {i64});
  Program::Impl throws = fused(throwing, {ones({2}), good});
  fill_(count, 0);
  CHECK_THROWS_AS(throws.replay({ones({2}), bad}), Error);
  CHECK(same_bits(count, full({2}, 2.0)));
}

TEST_CASE("fuse: what was made of a row is made anew once that is written, beside rows of any length") {
  const Step step = [](std::span<const Tensor> in) {
    const Tensor r = mean(in[0], {-1}, Keep::dims);
    const Tensor x = mul(in[0], r), wide = cat({x, x}, -1), before = pow(wide, r);
    add_(r, 1.0);
    return std::vector<Tensor>{before, pow(wide, r), pow(x, r)};
  };
  check_bits(step, {numbers({5, 8}, f32, 1, 1, 2)});
  check_bits(step, {numbers({5, 8}, bf16, 1, 1, 2)});
  // And of an input.
  const Step of_input = [](std::span<const Tensor> in) {
    const Tensor r = matmul(in[0], in[1]);  // (5, 1)
    const Tensor wide = cat({in[0], in[0]}, -1), before = pow(wide, r), x = pow(in[0], r);
    add_(r, 1.0);
    return std::vector<Tensor>{before, x, pow(wide, r), pow(in[0], r)};
  };
  check_bits(of_input, {numbers({5, 8}, f32, 1, 1, 2), numbers({8, 1}, f32, 2, 0, 0.1)});
}

TEST_CASE("fuse: a part of rows has the shape that it is read with") {
  const Step step = [](std::span<const Tensor> in) {
    return std::vector<Tensor>{mul(in[1], narrow(cat({in[0], neg(in[0])}, -1), -1, 1, 4))};
  };
  check_bits(step, {numbers({4}, f32, 1), numbers({1, 4}, f32, 2)});
}

TEST_CASE("fuse: of NaN every bit stays") {
  std::vector<std::uint16_t> bits(65536);
  std::iota(bits.begin(), bits.end(), 0);
  for (const DType dtype : {bf16, f16}) {
    const Tensor all = from_blob(bits.data(), {256, 256}, dtype);
    check_bits([](std::span<const Tensor> in) { return std::vector<Tensor>{exp(in[0]), clone(in[0])}; },
               {all});
    check_bits([](std::span<const Tensor> in) { return std::vector<Tensor>{mul(add(in[0], in[1]), in[0])}; },
               {all, contiguous(transpose(all, 0, 1))});
  }
}

TEST_CASE("fuse: memory that is read as rows and as columns is not written in one region") {
  const Step step = [](std::span<const Tensor> in) {
    const Tensor r = select(matmul(in[0], in[0]), 0, 0);
    const Tensor y = mul(in[0], r);                     // r for each column
    mul_(r, sum(y, {-1}));                              // and for each row
    return std::vector<Tensor>{add(mul(y, r), in[0])};  // for each column again
  };
  check_bits(step, {numbers({6, 6}, f32, 1)});
}

TEST_CASE("fuse: of two views of one memory neither is written in a region that reads the other") {
  const std::vector<Step> steps{[](std::span<const Tensor> in) {
                                  const Tensor x = matmul(in[0], in[1]);
                                  const Tensor y = add(transpose(x, 0, 1), in[1]);
                                  mul_(x, 0.5);
                                  return std::vector<Tensor>{y, x};
                                },
                                [](std::span<const Tensor> in) {
                                  const Tensor x = matmul(in[0], in[1]);
                                  const Tensor y = exp(mul(in[1], 0.1));
                                  mul_(x, y);
                                  return std::vector<Tensor>{add(transpose(x, 0, 1), y), x};
                                }};
  for (const Step& step : steps) check_bits(step, {numbers({70, 70}, f32, 1), numbers({70, 70}, f32, 2)});
}

TEST_CASE("fuse: parts of what members make, and what lies in several ways, have their bits") {
  for (const NamedStep& named : steps_of_parts()) {
    INFO(named.name);
    check_bits(named.step, named.in);
  }
}

TEST_CASE("fuse: every op has its bits between members of regions, and so have its gradients") {
  std::size_t programs = 0, members = 0;
  for_each_case_and_dtype([&](const Case& c, DType dtype) {
    const std::vector<Tensor> in = draw(c, dtype, small_shapes(c));
    const auto among_members = [](std::span<const Tensor> of) {
      std::vector<Tensor> list;
      for (const Tensor& t : of)
        list.push_back(t.defined() && is_floating(t.dtype()) ? neg(mul(neg(t), 1.0)) : t);
      return list;
    };
    const auto compare = [&](const Step& step) {
      manual_seed(7);
      Recorded whole;
      try {
        whole = heard(step, in);
      } catch (const StateError&) {
        return;  // reads values, which no program does
      }
      Program::Impl program(fuse(std::move(whole)), {});
      ++programs;
      for (const std::size_t size : regions(program)) members += size;
      manual_seed(7);
      const std::vector<Tensor> got = program.replay(in);
      manual_seed(7);
      const std::vector<Tensor> expected = step(in);
      REQUIRE(got.size() == expected.size());
      for (std::size_t i = 0; i < got.size(); ++i) CHECK(same_bits(got[i], expected[i]));
    };
    compare([&](std::span<const Tensor> x) { return among_members(run(c, among_members(x))); });
    if (c.gradients && is_floating(dtype))
      compare([&](std::span<const Tensor> x) {
        std::vector<Tensor> slopes;
        for (const Tensor& g : gradients(c, among_members(x), Lay::dense))
          if (g.defined()) slopes.push_back(neg(mul(g, 0.5)));
        return slopes;
      });
  });
  CHECK(programs > 300);
  CHECK(members > 1000);
}

TEST_CASE("fuse: a region ends before what would find something else behind it") {
  const auto products = [&](std::span<const Tensor> in) {
    const Tensor a = exp(in[0]);
    const Tensor b = matmul(a, in[1]);  // reads what the region made
    const Tensor c = add(a, b);
    return std::vector<Tensor>{mul(c, 2.0)};
  };
  const std::vector<Tensor> in{numbers({8, 8}, f32, 1), numbers({8, 8}, f32, 2)};
  CHECK(regions(fused(products, in)) == std::vector<std::size_t>{2});
  check_bits(products, in);

  const auto beside = [&](std::span<const Tensor> given) {
    const Tensor a = exp(given[0]);
    const Tensor b = matmul(given[1], given[1]);  // has nothing to do with it
    return std::vector<Tensor>{mul(a, b)};
  };
  CHECK(regions(fused(beside, in)) == std::vector<std::size_t>{2});
  check_bits(beside, in);

  std::vector<int> seen;
  const Step effects = [&](std::span<const Tensor> given) {
    const Tensor a = exp(given[0]);
    repeat_in_replays([&] { seen.push_back(1); });
    const Tensor b = add(mul(a, 2.0), 1.0);
    repeat_in_replays([&] { seen.push_back(2); });
    return std::vector<Tensor>{tanh(b)};
  };
  Program::Impl program = fused(effects, {in[0]});
  CHECK(regions(program) == std::vector<std::size_t>{2});
  seen.clear();
  check_bits(effects, {in[0]}, program);
  CHECK(seen == std::vector<int>{1, 2});
}

TEST_CASE("fuse: a region that waits, or gives what is kept, needs no more memory than its ops") {
  const auto packed = [](const Recorded& of) {
    const Program::Impl program(of, {});
    return program.workspaces.empty() ? std::size_t{0} : program.workspaces[0].packing.bytes;
  };
  const Tensor w = randn({64, 64});
  const auto sums = [&](const auto& of_product) {
    return [&w, of_product](std::span<const Tensor> in) {
      Tensor y = in[0];
      for (int i = 0; i < 24; ++i) y = add(y, of_product(matmul(in[0], w)));
      return std::vector<Tensor>{y};
    };
  };
  const Step steps[] = {sums([](const Tensor& t) { return relu(t); }),
                        sums([](const Tensor& t) { return mean(t, {-1}, Keep::dims); }),
                        sums([](const Tensor& t) { return to(to(relu(t), bf16), f32); })};
  for (const Step& step : steps) {
    const NoGrad guard;
    const Recorded recorded = heard(step, {randn({32, 64})});
    CHECK(packed(fuse(recorded)) <= packed(recorded) + 32 * 64 * 4);
  }
}

TEST_CASE("fuse: a value that is read through a view of another shape is one of the region all the same") {
  const Step step = [](std::span<const Tensor> in) {
    const Tensor wide = mul(in[0], 3.0);
    const Tensor heads = add(reshape(wide, {4, 2, 8}), 1.0);
    return std::vector<Tensor>{tanh(reshape(heads, {4, 16})), sum(narrow(wide, 1, 0, 3))};
  };
  const std::vector<Tensor> in{numbers({4, 16}, f32, 1)};
  CHECK(regions(fused(step, in)) == std::vector<std::size_t>{3});
  check_bits(step, in);
}

TEST_CASE(
    "fuse: ops on images whose channels lie last, and on what else lies dense in another order, are one "
    "region") {
  const std::vector<int> orders[] = {{0, 3, 1, 2}, {3, 1, 0, 2}, {1, 0, 3, 2}};
  for (const std::vector<int>& order : orders)
    for (const DType dtype : {f32, bf16}) {
      const auto image = [&](unsigned seed) {
        const Tensor lying = numbers({2, 3, 4, 5}, dtype, seed);
        Shape axes;
        for (const int axis : order) axes.push_back(axis);
        return permute(lying, axes);
      };
      const Tensor x = image(1);
      const std::int64_t channels = x.shape()[1];
      const Step step = [](std::span<const Tensor> in) {
        const Tensor y = relu(add(in[0], in[1]));
        const Tensor scaled = add(mul(y, in[2]), in[3]);
        return std::vector<Tensor>{scaled, where(greater(y, 0.0), in[0], neg(in[4]))};
      };
      const std::vector<Tensor> in{x, image(2), numbers({channels, 1, 1}, dtype, 3), numbers({}, dtype, 4),
                                   contiguous(image(5))};
      Program::Impl program = fused(step, in);
      INFO(program.text());
      CHECK(regions(program) == std::vector<std::size_t>{6});  // not the one that is contiguous
      check_bits(step, in, program);
      const NoGrad guard;
      CHECK(program.replay(in)[0].strides() == step(in)[0].strides());
    }
}

TEST_CASE("fuse: rows that are taken apart and put together are one region with what is made of them") {
  const auto rope = [](std::span<const Tensor> in) {
    const std::int64_t half = in[0].shape().back() / 2;
    const Tensor x = mul(in[0], 2.0);
    const Tensor turned = cat({neg(narrow(x, -1, half, half)), narrow(x, -1, 0, half)}, -1);
    return std::vector<Tensor>{add(mul(x, in[1]), mul(turned, in[2]))};
  };
  for (const DType dtype : {f32, bf16})
    for (const std::int64_t columns : {4, 34, 64, 128, 2048}) {
      INFO(name_of(dtype) << ", " << columns << " columns");
      const std::vector<Tensor> in{numbers({3, 5, columns}, dtype, 1), numbers({3, 1, columns}, dtype, 2),
                                   numbers({columns}, dtype, 3)};
      Program::Impl program = fused(rope, in);
      CHECK(regions(program) == std::vector<std::size_t>{6});
      check_bits(rope, in, program);
      // And backwards, where parts of gradients are put into zeros.
      for (const Executor executor : {Executor::replay, Executor::fused}) {
        const Compiled compiled = compile(rope, {.executor = executor});
        for (int call = 0; call < 2; ++call) {
          std::vector<Tensor> eager = copies(in), own = copies(in);
          for (std::vector<Tensor>* of : {&eager, &own})
            for (Tensor& t : *of) t.requires_grad_();
          sum(square(rope(eager)[0])).backward();
          sum(square(compiled(own)[0])).backward();
          for (std::size_t i = 0; i < in.size(); ++i) CHECK(same_bits(eager[i].grad(), own[i].grad()));
        }
      }
    }
}

TEST_CASE("fuse: an element of a wide row that is read for the whole row is one") {
  for (const DType dtype : {f32, bf16, f64})
    for (const Shape& shape : {Shape{256}, Shape{1, 31}, Shape{1, 600}, Shape{5, 100}}) {
      INFO(name_of(dtype) << " " << shape);
      const Step step = [](std::span<const Tensor> in) {
        const Tensor y = mul(in[0], 2.0);
        const int last = y.rank() - 1;
        const Tensor one = narrow(y, last, 0, 1), behind = narrow(y, last, 3, 1);
        return std::vector<Tensor>{sigmoid(one), mul(clone(one), 0.5), to(behind, f32), add(one, behind),
                                   tanh(y)};
      };
      const std::vector<Tensor> in{numbers(shape, dtype, 1)};
      Program::Impl program = fused(step, in);
      INFO(program.text());
      for (int times = 0; times < 20; ++times) check_bits(step, in, program);
    }
}

TEST_CASE("fuse: random steps over rows and columns have their bits") {
  std::size_t members = 0;
  for (unsigned seed = 0; seed < 2000; ++seed) {
    INFO("step " << seed);
    const RandomRows step(seed);
    Program::Impl program = fused(step, step.inputs(0));
    INFO(program.text());
    for (const std::size_t size : regions(program)) members += size;
    for (unsigned call = 1; call < 3; ++call) check_bits(step, step.inputs(call), program);
  }
  CHECK(members > 8000);
}

TEST_CASE("fuse: compiled random functions have the bits of eager ones, forward and backward") {
  std::size_t fewer = 0;
  for (unsigned seed = 0; seed < 150; ++seed) {
    RandomStep eager(seed, Writes::never), own(seed, Writes::never);
    const Step function = [&](std::span<const Tensor> in) { return own(in); };
    const Executor executor = seed % 3 == 0 ? Executor::partition : Executor::fused;
    const Compiled compiled = compile(function, {.executor = executor, .full_graph = FullGraph::yes});
    for (unsigned call = 0; call < 4; ++call) {
      INFO("function " << seed << ", call " << call);
      const std::vector<Tensor> got = gradients_of(own, compiled, call),
                                expected = gradients_of(eager, eager, call);
      REQUIRE(got.size() == expected.size());
      for (std::size_t i = 0; i < got.size(); ++i) CHECK(same_bits(got[i], expected[i]));
    }
    CHECK(compiled.stats().hits == 3);
    fewer += compiled.text().find("fused[") != std::string::npos ? 1 : 0;
  }
  CHECK(fewer > 40);
}

TEST_CASE("partition: a backward makes again what is cheaper so, and has eager's bits") {
  Tensor gain = randn({8});
  gain.requires_grad_();
  const Step step = [&](std::span<const Tensor> in) {
    const Tensor x = mul(add(in[0], 1.0), in[1]);
    return std::vector<Tensor>{mul(mul(x, rsqrt(add(mean(square(x), {-1}, Keep::dims), 1e-5))), gain)};
  };
  std::vector<Tensor> gradients[3];
  std::string texts[3];
  for (const Executor executor : {Executor::replay, Executor::partition, Executor::fused}) {
    const auto number = static_cast<std::size_t>(executor);
    const Compiled compiled = compile(step, {.executor = executor});
    for (int call = 0; call < 3; ++call) {
      std::vector<Tensor> in{numbers({4, 8}, f32, 1), numbers({4, 8}, f32, 2)};
      for (Tensor& t : in) t.requires_grad_();
      gain.set_grad({});
      sum(square(compiled(in)[0])).backward();
      for (const Tensor& t : {in[0].grad(), in[1].grad(), gain.grad()}) gradients[number].push_back(t);
    }
    texts[number] = compiled.text();
  }
  for (std::size_t k = 1; k < 3; ++k) {
    INFO(texts[k]);
    for (std::size_t i = 0; i < gradients[0].size(); ++i) CHECK(same_bits(gradients[0][i], gradients[k][i]));
    const auto kept = [](const std::string& text) {
      std::size_t count = 0;
      for (std::size_t at = 0; (at = text.find("kept ", at)) != std::string::npos; ++at) ++count;
      return count;
    };
    CHECK(kept(texts[k]) < kept(texts[0]));
  }
}

TEST_CASE("fuse: a block of small ops is half as many launches, forward and backward, and stores less") {
  constexpr std::int64_t tokens = 6, width = 16, heads = 2, head = 8, inner = 24;
  struct Weights {
    Tensor attention_gain = ones({width}), gain = ones({width}), qkv = randn({3 * width, width}),
           out = randn({width, width}), gate = randn({inner, width}), up = randn({inner, width}),
           down = randn({width, inner});
    std::vector<Tensor> all() const { return {attention_gain, gain, qkv, out, gate, up, down}; }
  } w;
  for (Tensor t : w.all()) t.requires_grad_();
  const Tensor cosine = randn({tokens, 1, head}), sine = randn({tokens, 1, head});
  const auto norm = [](const Tensor& x, const Tensor& gain) {
    return mul(mul(x, rsqrt(add(mean(square(x), {-1}, Keep::dims), 1e-5))), gain);
  };
  const auto turn = [&](const Tensor& x) {
    const Tensor turned = cat({neg(narrow(x, -1, head / 2, head / 2)), narrow(x, -1, 0, head / 2)}, -1);
    return add(mul(x, cosine), mul(turned, sine));
  };
  const Step block = [&](std::span<const Tensor> in) {
    const Tensor projected = linear(norm(in[0], w.attention_gain), w.qkv, {});
    const auto part = [&](int i) {
      return reshape(narrow(projected, -1, i * width, width), {tokens, heads, head});
    };
    const Tensor q = transpose(turn(part(0)), 0, 1), k = transpose(turn(part(1)), 0, 1),
                 v = transpose(part(2), 0, 1);
    const Tensor mixed = matmul(softmax(mul(matmul(q, transpose(k, 1, 2)), 0.35), -1), v);
    const Tensor x = add(in[0], linear(reshape(transpose(mixed, 0, 1), {tokens, width}), w.out, {}));
    const Tensor y = norm(x, w.gain), gate = linear(y, w.gate, {});
    return std::vector<Tensor>{
        add(x, linear(mul(mul(gate, sigmoid(gate)), linear(y, w.up, {})), w.down, {}))};
  };
  CompileStats stats[3];
  std::vector<Tensor> results[3];
  for (const Executor executor : {Executor::replay, Executor::partition, Executor::fused}) {
    const auto number = static_cast<std::size_t>(executor);
    const Compiled compiled = compile(block, {.executor = executor});
    for (int call = 0; call < 2; ++call) {
      Tensor x = numbers({tokens, width}, f32, 1);
      x.requires_grad_();
      for (const Tensor& t : w.all()) t.set_grad({});
      const Tensor y = compiled({x})[0];
      sum(square(y)).backward();
      results[number] = {y.detach(), x.grad()};
      for (const Tensor& t : w.all()) results[number].push_back(t.grad());
    }
    stats[number] = compiled.stats();
    INFO(compiled.text());
    for (std::size_t i = 0; i < results[0].size(); ++i) CHECK(same_bits(results[0][i], results[number][i]));
  }
  INFO(stats[0].launches << " launches, " << stats[2].launches << " fused, " << stats[2].regions
                         << " regions of " << stats[2].ops_in_regions);
  CHECK(stats[0].regions == 0);
  CHECK(stats[2].regions >= 10);
  CHECK(2 * stats[2].launches <= stats[0].launches);
  CHECK(stats[2].bytes_saved > 0);
}

TEST_CASE("a minimal cut costs what the cheapest of all cuts does") {
  for (unsigned seed = 0; seed < 300; ++seed) {
    std::mt19937 random(seed);
    const std::size_t nodes = 2 + random() % 7;
    struct Arc {
      std::size_t from, to;
      std::int64_t capacity;
    };
    std::vector<Arc> arcs;
    MinCut cut(nodes);
    for (std::size_t i = 0; i < 2 * nodes; ++i) {
      arcs.push_back({random() % nodes, random() % nodes, static_cast<std::int64_t>(random() % 9)});
      cut.add(arcs.back().from, arcs.back().to, arcs.back().capacity);
    }
    const auto cost = [&](const auto& before) {
      std::int64_t sum = 0;
      for (const Arc& arc : arcs)
        if (before(arc.from) && !before(arc.to)) sum += arc.capacity;
      return sum;
    };
    std::int64_t cheapest = MinCut::never;
    for (std::size_t side = 0; side < std::size_t{1} << nodes;
         ++side)  // of the source, node 0, from the sink, node 1
      if ((side & 3) == 1)
        cheapest = std::min(cheapest, cost([&](std::size_t n) { return (side >> n & 1) != 0; }));
    const std::vector<bool> before = cut.run(0, 1);
    CHECK(before[0]);
    CHECK_FALSE(before[1]);
    CHECK(cost([&](std::size_t n) { return static_cast<bool>(before[n]); }) == cheapest);
  }
}
