#include "runtime/cpu/onednn_faults.h"

#if defined(SHERD_ONEDNN) && defined(SHERD_OPENMP)
#include "runtime/cpu/onednn.h"
#endif

namespace sherd::cpu::faults {
namespace {

bool in_16_bits(DType dtype) { return dtype == DType::bf16 || dtype == DType::f16; }

}  // namespace

Library library_here() noexcept {
#if defined(SHERD_ONEDNN) && defined(SHERD_OPENMP)
  const dnnl_version_t& version = *dnnl_version();
  const auto isa = static_cast<unsigned>(dnnl_get_effective_cpu_isa());
  constexpr auto avx512 = static_cast<unsigned>(dnnl_cpu_isa_avx512_core),
                 amx = static_cast<unsigned>(dnnl_cpu_isa_avx512_core_amx);
  return {version.major, version.minor, (isa & amx) == amx, (isa & avx512) == avx512};
#else
  return {};
#endif
}

// Taps and not what they span: oneDNN reckons with the smaller of stride and taps, whatever the dilation.
bool writes_beyond(const ops::ConvRule& rule, std::int64_t height, std::int64_t width, DType dtype,
                   const Library& library) {
  return library.amx && in_16_bits(dtype) && (rule.down.stride > height || rule.across.stride > width);
}

bool brings_unwritten(conv::Way way, DType dtype) {
  return way == conv::Way::grad_weight && in_16_bits(dtype);
}

bool leaves_stack(const Library& library) { return library.avx512; }

bool spreads_nan(std::int64_t terms, DType dtype, const Library& library) {
  return library.amx && in_16_bits(dtype) && terms > 32 && terms % 32 != 0 && !library.is_before(3, 7) &&
         library.is_before(3, 14);
}

}  // namespace sherd::cpu::faults
