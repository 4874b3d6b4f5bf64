// What a matrix library has to offer gemm.cpp: one tile of C on the calling thread.
#pragma once

#include <memory>
#include <vector>

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
/// Whether the one of floats must not be interrupted by signals (`onednn_faults.h`).
bool onednn_leaves_stack() noexcept;
/// Sums in f32 and rounds once, `bias` and what C holds included. Only where the processor has products of
/// bf16, else it would go through slow code.
bool gemm_tile_onednn(const Gemm<BFloat16>& g) noexcept;
bool onednn_multiplies_bf16() noexcept;
/// The same of sums of `terms` terms, which must be right as well.
bool onednn_multiplies_bf16(std::int64_t terms) noexcept;
/// Smaller products of bf16 are not worth a call of it.
inline constexpr std::int64_t onednn_work_bf16 = 32 * 32 * 32;

/// The B of products of few rows of bf16, in parts of its columns, each laid as oneDNN reads it fastest. One
/// product at a time.
class PackedB {
 public:
  /// Null where `g` is not such a product, or where the library fails.
  static std::shared_ptr<PackedB> of(const Gemm<BFloat16>& g) noexcept;
  PackedB();
  ~PackedB();
  PackedB(const PackedB&) = delete;
  PackedB& operator=(const PackedB&) = delete;
  std::int64_t parts() const { return static_cast<std::int64_t>(parts_.size()); }
  /// Computes the part's columns of C; returns whether it worked.
  bool multiply(std::int64_t part, const BFloat16* a, BFloat16* c) noexcept;

 private:
  struct Part;
  std::vector<std::unique_ptr<Part>> parts_;
};

}  // namespace sherd::cpu
