// What a matrix library has to offer gemm.cpp: one tile of C on the calling thread.
#pragma once

#include "runtime/cpu/gemm.h"

namespace sherd::cpu {

#if defined(SHERD_ONEDNN) && defined(SHERD_OPENMP)
inline constexpr bool has_onednn = true;
#else
inline constexpr bool has_onednn = false;
#endif

/// Each uses m to ldc and `accumulate` of its argument (in bf16 `bias` and the batch too), runs on the
/// calling thread alone, and returns whether it worked.
bool gemm_tile_eigen(const Gemm<float>& g) noexcept;
bool gemm_tile_eigen(const Gemm<double>& g) noexcept;
bool gemm_tile_onednn(const Gemm<float>& g) noexcept;
/// Sums in f32 and rounds once, `bias` and what C holds included. Only where the processor has products of
/// bf16, else it would go through slow code.
bool gemm_tile_onednn(const Gemm<BFloat16>& g) noexcept;
bool onednn_multiplies_bf16() noexcept;

}  // namespace sherd::cpu
