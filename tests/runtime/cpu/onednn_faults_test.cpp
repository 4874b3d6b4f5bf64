#include "runtime/cpu/onednn_faults.h"

#include <fstream>
#include <sstream>

#include "runtime/cpu/gemm_tile.h"
#include "tests/catch.h"

using namespace sherd;
using namespace sherd::cpu;

namespace {

using Axis = ops::ConvRule::Axis;

const faults::Library libraries[] = {{2, 6, false}, {2, 6, true},  {3, 2, false}, {3, 2, true}, {3, 7, false},
                                     {3, 7, true},  {3, 13, true}, {3, 14, true}, {4, 0, true}};

bool in_16_bits(DType dtype) { return size_of(dtype) == 2; }

std::string text_of(const faults::Library& l) {
  return fmt::format("oneDNN {}.{}{}", l.major, l.minor, l.amx ? " with AMX" : "");
}

}  // namespace

TEST_CASE("oneDNN's faults: strides above the taps are kept off AMX in 16 bits, and nothing else is") {
  for (const auto& library : libraries)
    for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16})
      for (std::int64_t height = 1; height <= 4; ++height)
        for (std::int64_t width = 1; width <= 4; ++width)
          for (std::int64_t down = 1; down <= 5; ++down)
            for (std::int64_t across = 1; across <= 5; ++across)
              for (const std::int64_t dilation : {1, 3}) {
                const ops::ConvRule rule{Axis{down, 0, dilation}, Axis{across, 0, dilation}, 1};
                const bool steps_over = down > height || across > width;
                INFO(text_of(library) << " " << name_of(dtype) << " " << height << "x" << width << " stride "
                                      << down << " " << across << " dilation " << dilation);
                CHECK(faults::writes_beyond(rule, height, width, dtype, library) ==
                      (steps_over && in_16_bits(dtype) && library.amx));
              }
}

TEST_CASE("oneDNN's faults: gradients of kernels are not made in 16 bits") {
  for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16})
    for (const auto way : {conv::Way::forward, conv::Way::grad_input, conv::Way::grad_weight}) {
      INFO(name_of(dtype) << " " << static_cast<int>(way));
      CHECK(faults::brings_unwritten(way, dtype) == (way == conv::Way::grad_weight && in_16_bits(dtype)));
    }
}

TEST_CASE("oneDNN's faults: rows that do not fill tiles of AMX are multiplied by versions that end them") {
  for (const auto& library : libraries)
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16})
      for (std::int64_t terms = 0; terms <= 130; ++terms) {
        const bool reads_on = library.amx && library.major == 3 && library.minor >= 7 && library.minor < 14;
        INFO(text_of(library) << " " << name_of(dtype) << " " << terms);
        CHECK(faults::spreads_nan(terms, dtype, library) ==
              (reads_on && in_16_bits(dtype) && terms > 32 && terms % 32 != 0));
      }
}

TEST_CASE("oneDNN's faults: signals are held where its products leave the stack, and not elsewhere") {
  for (const bool avx512 : {false, true})
    for (faults::Library library : libraries) {
      library.avx512 = avx512;
      INFO(text_of(library));
      CHECK(faults::leaves_stack(library) == avx512);
    }
}

TEST_CASE("oneDNN's faults: AMX and AVX-512 are asked for where the processor has them alone") {
  const faults::Library here = faults::library_here();
  CHECK((here.major >= 2) == has_onednn);
  std::stringstream processor;
  processor << std::ifstream("/proc/cpuinfo").rdbuf();
  INFO(text_of(here));
  if (here.amx) CHECK(processor.str().find("amx_tile") != std::string::npos);
  if (here.avx512) CHECK(processor.str().find("avx512f") != std::string::npos);
}
