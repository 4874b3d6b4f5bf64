// Sources of a program's regions, compiled without a GPU.
#pragma once

#include "autograd/capture/program.h"
#include "runtime/cuda/nvrtc.h"
#include "runtime/cuda/region_source.h"
#include "runtime/fused_region.h"
#include "tests/catch.h"

namespace sherd::test {

/// Has NVRTC compile the kernel of each region, which all have one, and calls `each(region, source)`.
template <class F>
void compile_regions(const Program::Impl& program, F&& each) {
  for (const Program::Impl::Step& s : program.steps) {
    const ops::Region* const region = ops::region_of(*s.op);
    if (region == nullptr) continue;
    const auto source = cuda::region_source(*region);
    INFO(region->text());
    REQUIRE(source.has_value());
    CHECK_NOTHROW(cuda::compile_source(cuda::region_headers() + source->text, "sm_90a"));
    each(*region, *source);
  }
}

}  // namespace sherd::test
