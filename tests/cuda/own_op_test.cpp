// An application's own elementwise ops in kernels of fused regions.
#include "tests/cuda/own_op.h"

#include <fstream>
#include <sstream>

#include "autograd/autograd.h"
#include "autograd/compile.h"
#include "runtime/apply.h"
#include "runtime/cpu/elementwise_loop.h"
#include "runtime/cuda/functor_source.h"
#include "runtime/cuda/kernels.h"
#include "runtime/cuda/nvrtc.h"
#include "runtime/cuda/region_kernels.h"
#include "runtime/cuda/region_source.h"
#include "tests/autograd/fused_steps.h"
#include "tests/cuda/compare.h"
#include "tests/cuda/region_sources.h"
#include "tests/source_root.h"

using namespace sherd;
using namespace sherd::test;

namespace {

std::string own_header() {
  std::ostringstream text;
  text << std::ifstream(std::string(source_root) + "/tests/cuda/own_op.h").rdbuf();
  return text.str();
}

void add_own_ops() {
  cpu::add_elementwise<Bent>();
  cpu::add_elementwise<Blend>();
  add_own_ops_on_gpu();
  cuda::add_functor_source<Bent>(own_header());
  cuda::add_functor_source<Blend>(own_header());
}

/// Own ops among the library's.
std::vector<Tensor> step(std::span<const Tensor> in) {
  const Tensor x = apply(Bent{0.5F}, in[0] * 2), y = apply(Blend{}, x, tanh(in[1]));
  return {y + 1, sum(apply(Bent{2}, y) * in[0], {-1})};
}
/// With gradients along `of`, a function of its own or compiled.
std::vector<Tensor> step_and_gradients(const Step& of, std::span<const Tensor> in) {
  const GradMode recorded(true);
  const std::vector<Tensor> leaves{clone(in[0]).detach().requires_grad_(),
                                   clone(in[1]).detach().requires_grad_()};
  const std::vector<Tensor> out = of(leaves);
  std::vector<Tensor> all = grad(sum(out[0] * out[0]) + sum(out[1]), leaves);
  for (const Tensor& t : out) all.push_back(t.detach());
  return all;
}

}  // namespace

TEST_CASE("kernels of regions: NVRTC takes the text of an application's op, without a GPU") {
  if (skip_if(!cuda::has_nvrtc(), "NVRTC is not installed")) return;
  cuda::add_kernels();
  add_own_ops();
  std::size_t own = 0;
  for (const DType dtype : {f32, bf16, f64}) {
    const std::vector<Tensor> in{numbers({30, 64}, dtype, 1), numbers({30, 64}, dtype, 2)};
    const Step both = [](std::span<const Tensor> given) { return step_and_gradients(step, given); };
    compile_regions(fused(both, in), [&](const ops::Region& region, const cuda::RegionSource&) {
      for (const ops::Region::Member& member : region.members)
        own += cuda::functor_header(*member.op).find("struct Bent") != std::string::npos ? 1 : 0;
    });
  }
  CHECK(own >= 3 * 6);  // three ops and their gradients
}

TEST_CASE("cuda: an application's ops are members of regions, with the bits of their kernels") {
  if (no_gpu() || skip_if(!cuda::has_nvrtc(), "NVRTC is not installed")) return;
  add_own_ops();
  for (const DType dtype : {f32, bf16, f16, f64}) {
    const std::vector<Tensor> in{on_gpu(numbers({300, 70}, dtype, 1)), on_gpu(numbers({300, 70}, dtype, 2))};
    const Compiled compiled = compile(step, {.executor = Executor::fused});
    const std::vector<Tensor> want = step_and_gradients(step, in);
    for (int call = 0; call < 3; ++call) {
      const std::vector<Tensor> got = step_and_gradients(compiled, in);
      CHECK(cuda::finish_region_kernels().failed == 0);
      for (std::size_t i = 0; i < want.size(); ++i)
        CHECK(same_bits(to(got[i], Device::cpu()), to(want[i], Device::cpu())));
    }
    CHECK(compiled.stats().regions > 0);
  }
}
