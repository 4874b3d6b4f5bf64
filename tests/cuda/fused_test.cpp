// Kernels of fused regions on a GPU: to the bit what the ops give there one after the other.
#include <deque>
#include <sstream>

#include "autograd/capture/passes/fuse.h"
#include "autograd/compile.h"
#include "runtime/apply.h"
#include "runtime/cuda/kernels.h"
#include "runtime/cuda/nvrtc.h"
#include "runtime/cuda/region_kernels.h"
#include "runtime/cuda/region_source.h"
#include "runtime/fused_region.h"
#include "runtime/ops/listing.h"
#include "tests/autograd/column_sum_steps.h"
#include "tests/autograd/random_step.h"
#include "tests/cuda/compare.h"
#include "tests/cuda/region_sources.h"

using namespace sherd;
using namespace sherd::test;

namespace {

[[nodiscard]] bool cannot() { return no_gpu() || skip_if(!cuda::has_nvrtc(), "NVRTC is not installed"); }

/// Programs whose kernels are compiled beside each other, and then have the bits of their steps.
class Programs {
 public:
  void add(std::string name, Step step, std::vector<Tensor> in) {
    std::vector<Tensor> there;
    for (const Tensor& t : in) there.push_back(t.device().is_cpu() ? on_gpu(t) : t);
    all_.push_back({std::move(name), std::move(step), std::move(there), {}});
    One& one = all_.back();
    one.program = std::make_unique<Program::Impl>(fused(one.step, one.in));
    for (const Program::Impl::Step& s : one.program->steps)
      if (const ops::Region* region = ops::region_of(*s.op)) {
        ++regions;
        kernels += cuda::region_source(*region) ? 1 : 0;
      }
    sums += column_sums(*one.program);
    const NoGrad guard;
    one.program->replay(copies(one.in));  // its members one by one, unless another has the same kernel
  }
  void check() {
    const cuda::RegionKernelCounts counts = cuda::finish_region_kernels();
    CHECK(counts.failed == 0);
    for (One& one : all_) {
      INFO(one.name << "\n" << one.program->text());
      check_bits(one.step, one.in, *one.program);
    }
  }
  std::size_t regions = 0, kernels = 0, sums = 0;  // of columns

 private:
  struct One {
    std::string name;
    Step step;
    std::vector<Tensor> in;
    std::unique_ptr<Program::Impl> program;
  };
  std::deque<One> all_;
};

}  // namespace

TEST_CASE("kernels of regions: NVRTC takes the source of every elementwise op and gradient, without a GPU") {
  if (skip_if(!cuda::has_nvrtc(), "NVRTC is not installed")) return;
  cuda::add_kernels();
  const NoGrad guard;
  std::size_t compiled = 0, members = 0, sums = 0;
  const auto compile_all = [&](const Step& step, const std::vector<Tensor>& in) {
    compile_regions(fused(step, in), [&](const ops::Region& region, const cuda::RegionSource& source) {
      ++compiled;
      members += region.members.size();
      sums += source.column_sums.size();
    });
  };
  const std::vector<ElementwiseListing> all = elementwise_listing();
  for (const DType dtype : {f32, bf16, i64}) {
    const auto results = [&](std::span<const Tensor> x, bool gradients) {
      std::vector<Tensor> results;
      for (const ElementwiseListing& listing : all) {
        if (!listing.dtypes.contains(dtype) || listing.arity > 2 ||
            (gradients && !listing.op->differentiable()))
          continue;
        std::vector<Tensor> in;
        for (int k = 0; k < listing.arity; ++k) {
          in.push_back(mul(x[static_cast<std::size_t>(k)], 1));
          if (gradients) in.back().requires_grad_();
        }
        const GradMode recorded(gradients);
        const Tensor y = apply(*listing.op, Inputs(in.data(), in.size()))[0];
        if (!gradients) {
          results.push_back(y);
          continue;
        }
        for (const Tensor& g : grad(y, std::span<const Tensor>(in), x[0])) results.push_back(mul(g, 2));
      }
      return results;
    };
    const std::vector<Tensor> in{numbers({21, 64}, dtype, 1, 1.3, 1.9),
                                 numbers({21, 64}, dtype, 2, 1.3, 1.9)};
    compile_all([&](std::span<const Tensor> x) { return results(x, false); }, in);
    if (is_floating(dtype)) compile_all([&](std::span<const Tensor> x) { return results(x, true); }, in);
  }
  for (unsigned seed = 0; seed < 20; ++seed) {
    const RandomRows step(seed);
    compile_all(step, step.inputs(0));
  }
  for (const DType dtype : {f64, f32, bf16, f16})
    for (const Shape& shape : {Shape{3, 5}, Shape{600, 64}, Shape{9, 130, 200}, Shape{600, 257},
                               Shape{512, 1024}, Shape{520, 4096}}) {
      compile_all(sums_of_columns(f32), {numbers(shape, dtype, 1), numbers(shape, dtype, 2)});
      compile_all(sums_of_columns(dtype), {numbers(shape, dtype, 1), numbers(shape, dtype, 2)});
    }
  CHECK(sums > 100);
  std::size_t without = 0;  // whose text would be too long, or is not to be had
  for (const NamedStep& named : steps_of_parts())
    for (const Program::Impl::Step& s : fused(named.step, named.in).steps)
      if (const ops::Region* const region = ops::region_of(*s.op)) {
        const auto source = cuda::region_source(*region);
        CHECK((!source || source->text.size() < 100'000));
        without += source ? 0 : 1;
      }
  CHECK(without >= 2);
  INFO(compiled << " regions of " << members << " members");
  CHECK(members > 400);
}

TEST_CASE("cuda: a captured step with regions has the step's bits, as one graph") {
  if (cannot()) return;
  const Step step = [](std::span<const Tensor> in) {
    const Tensor x = tanh(mul(add(in[0], in[1]), 0.5));
    return std::vector<Tensor>{mul(x, rsqrt(add(mean(square(x), {-1}, Keep::dims), 1e-5))), silu(x)};
  };
  const NoGrad guard;
  const std::vector<Tensor> in{on_gpu(numbers({40, 192}, f32, 1)), on_gpu(numbers({192}, f32, 2))};
  Program program = capture(step, in, Executor::fused);
  CHECK(program.size() < 4);
  for (int times = 0; times < 3; ++times) {
    const std::vector<Tensor> got = program.replay(in), expected = step(in);
    for (std::size_t i = 0; i < got.size(); ++i) CHECK(same_bits(got[i], expected[i]));
  }
  CHECK(program.is_device_graph());
}

TEST_CASE("cuda: every elementwise op has its bits in the kernel of a region, on any dtype and layout") {
  if (cannot()) return;
  Programs programs;
  static const std::vector<ElementwiseListing> all = elementwise_listing();  // steps look at it later
  for (const ElementwiseListing& listing : all)
    for (const DType dtype : all_dtypes) {
      if (!listing.dtypes.contains(dtype)) continue;
      const bool often = dtype == f32 || dtype == bf16;
      for (int how = 0; how < (often ? 4 : 1); ++how) {
        const Shape shape = how % 2 == 0 ? Shape{37, 64} : Shape{21, 33};
        std::vector<Tensor> in;
        for (int k = 0; k < listing.arity; ++k) {
          const int kind = how == 0 ? 0 : (how + k) % 4;
          const Shape own = kind == 1   ? Shape{shape[0], 1}
                            : kind == 2 ? Shape{shape[1]}
                            : kind == 3 ? Shape{}
                                        : shape;
          in.push_back(numbers(own, dtype, static_cast<unsigned>(10 * how + k), listing.low, listing.high));
          if (k == 0 && listing.arity == 3)
            in[0] = greater(numbers(own, f32, static_cast<unsigned>(how)), 0.0);
        }
        const Step step = [=, &listing](std::span<const Tensor> x) {
          Tensors given;
          for (int k = 0; k < listing.arity; ++k) {
            const Tensor& own = x[static_cast<std::size_t>(k)];
            given.push_back(own.shape() == shape ? where(equal(own, own), own, own) : own);
          }
          return std::vector<Tensor>{apply(*listing.op, Inputs(given.begin(), given.size()))[0]};
        };
        programs.add(fmt::format("{} of {}, way {}", listing.op->name(), name_of(dtype), how), step, in);
      }
    }
  CHECK(programs.kernels == programs.regions);
  CHECK(programs.kernels > 500);
  programs.check();
}

TEST_CASE("cuda: gradients of elementwise ops are members with their bits") {
  if (cannot()) return;
  Programs programs;
  static const std::vector<ElementwiseListing> all = elementwise_listing();
  for (const ElementwiseListing& listing : all)
    for (const DType dtype : {f32, bf16}) {
      if (!listing.dtypes.contains(dtype) || !listing.op->differentiable() || listing.arity > 2) continue;
      const Step step = [=, &listing](std::span<const Tensor> x) {
        const GradMode recorded(true);
        std::vector<Tensor> leaves, grads;
        for (const Tensor& t : x) leaves.push_back(mul(t, 1.0).detach().requires_grad_());
        const Tensor y = apply(*listing.op, Inputs(leaves.data(), leaves.size()))[0];
        for (const Tensor& g : grad(y, std::span<const Tensor>(leaves), neg(y.detach())))
          if (g.defined()) grads.push_back(mul(g, 0.5));
        return grads;
      };
      std::vector<Tensor> in;
      for (int k = 0; k < listing.arity; ++k)
        in.push_back(numbers({21, 64}, dtype, static_cast<unsigned>(k), listing.low, listing.high));
      programs.add(fmt::format("gradient of {} of {}", listing.op->name(), name_of(dtype)), step, in);
    }
  CHECK(programs.kernels == programs.regions);
  CHECK(programs.kernels > 60);
  programs.check();
}

TEST_CASE("cuda: casts and sums of rows have their bits in the kernel of a region") {
  if (cannot()) return;
  Programs programs;
  for (const DType dtype : {f64, f32, bf16, f16})
    for (const DType other : {f64, f32, bf16, f16})
      for (const std::int64_t columns : {2, 17, 64, 250, 1000, 1024, 2048, 4100, 6144, 16384}) {
        const Step step = [=](std::span<const Tensor> in) {
          const Tensor x = to(in[0], other);
          const Tensor centred = sub(x, mean(x, {-1}, Keep::dims));
          const Tensor scaled = div(centred, sqrt(add(mean(square(centred), {-1}, Keep::dims), 1e-5)));
          return std::vector<Tensor>{to(mul(scaled, to(in[1], other)), dtype), sum(centred, {-1})};
        };
        programs.add(fmt::format("{} by {}, {} columns", name_of(dtype), name_of(other), columns), step,
                     {numbers({9, columns}, dtype, 1), numbers({columns}, dtype, 2)});
      }
  // Of so many rows that sums are of one part.
  programs.add("many rows",
               [](std::span<const Tensor> in) {
                 return std::vector<Tensor>{mul(in[0], sum(square(in[0]), {-1}, Keep::dims))};
               },
               {ones({1 << 16, 4200}, {bf16, gpu})});
  CHECK(programs.kernels == programs.regions);
  programs.check();
}

TEST_CASE("cuda: sums of columns have their bits in the kernel of a region") {
  if (cannot()) return;
  Programs programs;
  const auto add = [&](const Shape& shape, DType dtype, DType other, const std::vector<Tensor>& in) {
    programs.add(fmt::format("{} by {}, {}", name_of(dtype), name_of(other), shape), sums_of_columns(other),
                 in);
  };
  // Lanes of warps and of blocks, whole packs and single elements.
  for (const DType dtype : {f64, f32, bf16, f16})
    for (const DType other : {f64, f32, bf16, f16})
      for (const Shape& shape :
           {Shape{33000, 64}, Shape{40001, 7}, Shape{4100, 300}, Shape{2, 3, 700, 257}, Shape{5, 1000, 512}})
        add(shape, dtype, other, {numbers(shape, dtype, 1), numbers(shape, dtype, 2)});
  // Several runs a thread, and as many columns as a block takes.
  const auto drawn = [](const Shape& shape, DType dtype) { return to(randn(shape, {f32, gpu}), dtype); };
  for (const auto& [rows, columns, dtype] :
       {std::tuple{20011, 4096, bf16}, {10007, 4096, f32}, {10007, 2048, f64}, {300000, 100, f32}}) {
    const Shape shape{rows, columns};
    add(shape, dtype, dtype, {drawn(shape, dtype), drawn(shape, dtype)});
  }
  CHECK(programs.kernels == programs.regions);
  CHECK(programs.sums == 3 * programs.regions);
  programs.check();
}

TEST_CASE("cuda: few rows, and rows of too many columns for a thread, are summed outside regions") {
  if (cannot()) return;
  const Tensor first = empty({1}, {f32, gpu});  // the back end says what it takes when it is first used
  const auto sums = [](std::int64_t rows, std::int64_t columns, DType dtype) {
    return ops::sums_columns(rows, columns, dtype, DeviceType::cuda);
  };
  CHECK(sums(8192, 1024, bf16));
  CHECK_FALSE(sums(512, 1024, f32));
  CHECK_FALSE(sums(1 << 16, 8192, f32));
  CHECK_FALSE(sums(1 << 16, 4096, f64));
}

TEST_CASE("cuda: gradients of gains are made in the region of a layer's backward, with eager's bits") {
  if (cannot()) return;
  for (const DType dtype : {f32, bf16})
    for (const TrainedLayer& layer : trained_layers({4200, 320}, dtype, gpu)) {
      INFO(layer.name << " of " << name_of(dtype));
      const std::vector<Tensor> expected = trained(layer, layer.step);
      const Compiled compiled = compile(layer.step, {.executor = Executor::fused});
      for (int call = 0; call < 4; ++call) {
        INFO(compiled.text() << "call " << call);
        if (call == 2) CHECK(cuda::finish_region_kernels().failed == 0);
        const std::vector<Tensor> got = trained(layer, compiled);
        REQUIRE(got.size() == expected.size());
        for (std::size_t i = 0; i < got.size(); ++i) CHECK(same_bits(got[i], expected[i]));
      }
      const std::string text = compiled.text();
      std::istringstream lines(text.substr(text.find("backward")));
      bool within = false;
      for (std::string line; std::getline(lines, line);) {
        const std::size_t region = line.find("fused[");
        within = within || (region != line.npos && line.find("= sum[axes=1,", region) != line.npos);
      }
      CHECK(within);
    }
}

TEST_CASE("cuda: a captured step whose regions sum columns has the step's bits, as one graph") {
  if (cannot()) return;
  const NoGrad guard;
  const Step step = sums_of_columns(f32);
  const std::vector<Tensor> in{on_gpu(numbers({4200, 320}, bf16, 1)), on_gpu(numbers({4200, 320}, bf16, 2))};
  Program program = capture(step, in, Executor::fused);
  for (int times = 0; times < 3; ++times) {
    const std::vector<Tensor> got = program.replay(in), expected = step(in);
    for (std::size_t i = 0; i < got.size(); ++i) CHECK(same_bits(got[i], expected[i]));
  }
  CHECK(program.is_device_graph());
}

TEST_CASE("cuda: what a region writes in place is read before and after as the step does") {
  if (cannot()) return;
  Programs programs;
  for (const DType dtype : {f32, bf16})
    programs.add(std::string(name_of(dtype)),
                 [](std::span<const Tensor> in) {
                   const Tensor x = matmul(in[0], in[1]);
                   const Tensor before = mul(x, 2.0);
                   add_(x, in[1]);
                   const Tensor y = exp(mul(x, 0.01));
                   mul_(y, before);
                   mul_(x, y);
                   return std::vector<Tensor>{y, add(y, x)};
                 },
                 {numbers({70, 70}, dtype, 1), numbers({70, 70}, dtype, 2)});
  CHECK(programs.kernels == 2);
  programs.check();
}

TEST_CASE("cuda: ops on images whose channels lie last have their bits in the kernel of a region") {
  if (cannot()) return;
  Programs programs;
  for (const DType dtype : {f32, bf16})
    for (const std::int64_t channels : {3, 8, 64}) {
      const auto image = [&](unsigned seed) {
        return permute(numbers({2, 6, 5, channels}, dtype, seed), {0, 3, 1, 2});
      };
      programs.add(fmt::format("{}, {} channels", name_of(dtype), channels),
                   [](std::span<const Tensor> in) {
                     const Tensor y = relu(add(in[0], in[1]));
                     return std::vector<Tensor>{add(mul(y, in[2]), in[3]),
                                                where(greater(y, 0.0), in[0], neg(in[4]))};
                   },
                   {image(1), image(2), numbers({channels, 1, 1}, dtype, 3), numbers({}, dtype, 4),
                    contiguous(image(5))});
    }
  CHECK(programs.kernels == programs.regions);
  CHECK(programs.kernels >= 6);
  programs.check();
}

TEST_CASE("cuda: parts of what members make, and what lies in several ways, have their bits") {
  if (cannot()) return;
  Programs programs;
  for (const NamedStep& named : steps_of_parts()) programs.add(named.name, named.step, named.in);
  programs.check();
}

TEST_CASE("cuda: rows that are taken apart and put together have their bits in the kernel of a region") {
  if (cannot()) return;
  Programs programs;
  for (const DType dtype : {f32, bf16})
    for (const std::int64_t columns : {4, 34, 64, 128, 2048})
      programs.add(fmt::format("{}, {} columns", name_of(dtype), columns),
                   [](std::span<const Tensor> in) {
                     const std::int64_t half = in[0].shape().back() / 2;
                     const Tensor x = mul(in[0], 2.0);
                     const Tensor turned = cat({neg(narrow(x, -1, half, half)), narrow(x, -1, 0, half)}, -1);
                     return std::vector<Tensor>{add(mul(x, in[1]), mul(turned, in[2]))};
                   },
                   {numbers({3, 5, columns}, dtype, 1), numbers({3, 1, columns}, dtype, 2),
                    numbers({columns}, dtype, 3)});
  CHECK(programs.kernels == programs.regions);
  programs.check();
}

TEST_CASE("cuda: random steps over rows and columns have their bits in the kernels of regions") {
  if (cannot()) return;
  Programs programs;
  for (unsigned seed = 0; seed < 200; ++seed) {
    const RandomRows step(seed, gpu);
    programs.add(fmt::format("step {}", seed), step, step.inputs(1));
  }
  CHECK(programs.kernels > programs.regions * 9 / 10);
  programs.check();
}

TEST_CASE("cuda: random steps over many rows have their bits in the kernels of regions") {
  if (cannot()) return;
  Programs programs;
  for (unsigned seed = 0; seed < 80; ++seed) {
    const RandomRows step(seed, gpu, Rows::many);
    programs.add(fmt::format("step {}", seed), step, step.inputs(1));
  }
  CHECK(programs.sums > 5);
  programs.check();
}

TEST_CASE("cuda: compiled random functions have eager's bits, forward and backward") {
  if (cannot()) return;
  std::size_t fewer = 0;
  for (unsigned seed = 0; seed < 60; ++seed) {
    RandomStep eager(seed, Writes::never, gpu), own(seed, Writes::never, gpu);
    const Step function = [&](std::span<const Tensor> in) { return own(in); };
    const Compiled compiled = compile(function, {.executor = Executor::fused, .full_graph = FullGraph::yes});
    for (unsigned call = 0; call < 4; ++call) {
      INFO("function " << seed << ", call " << call);
      if (call == 3) cuda::finish_region_kernels();  // before, members run one by one
      const std::vector<Tensor> got = gradients_of(own, compiled, call, gpu),
                                expected = gradients_of(eager, eager, call, gpu);
      REQUIRE(got.size() == expected.size());
      for (std::size_t i = 0; i < got.size(); ++i) CHECK(same_bits(got[i], expected[i]));
    }
    fewer += compiled.text().find("fused[") != std::string::npos ? 1 : 0;
  }
  CHECK(fewer > 20);
  CHECK(cuda::finish_region_kernels().failed == 0);
}
